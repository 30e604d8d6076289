"""Whole kernels of csrc/exl3 on the emulated device, through their operators, against the reference.

EXACT: float32 sums differ from float64 by about 1e-7; a rotated input that lies near the middle of two fp16 numbers and
goes the other way adds up to 2e-5. One wrong weight or sign would be above 1e-3.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.csrc import calls
from tests.csrc.calls import enqueue_linear, linear
from tests.csrc.emulation import load
from tests.csrc.memory import Arena
from tests.csrc.shards import error, random_shard, random_x, same_bytes
from vllm.model_executor.layers.quantization.exl3_trellis.codebook import CODEBOOKS
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_rotated, hadamard

FORMATS = [(name, rate) for name, book in CODEBOOKS.items() for rate in book.rates]
EXACT = 5e-5
ROUNDED = {torch.float16: 5e-4, torch.bfloat16: 3e-3, torch.float32: EXACT}
TRANSFORMED_IN_FP16 = 1e-3  # by tensor cores and pairs, for what a library then multiplies


@pytest.mark.parametrize("book, rate", FORMATS)
def test_a_row_is_right_and_the_same_in_every_batch(book, rate):
    """One row count for each row tile (8, 16, 32, 64, 128), and a full one; rows lie elsewhere in each.

    One thread block does it all, so that every ring of stages goes round.
    """
    shard, x = random_shard(256, 256, rate, book), random_x(65, 256)
    whole = linear(x, [shard], splits=1)
    assert error(whole, shard.product(x)) < EXACT
    for m in (1, 8, 9, 17, 33):
        assert same_bytes(linear(x[-m:], [shard], splits=1), whole[-m:])


@pytest.mark.parametrize("book, rate", FORMATS)
def test_warpgroups_give_the_same_bytes(book, rate):
    shard, x = random_shard(256, 256, rate, book), random_x(65, 256)
    for m in (17, 33, 65):
        warps = linear(x[-m:], [shard], splits=1)
        assert same_bytes(linear(x[-m:], [shard], splits=1, target="warpgroup"), warps)


@pytest.mark.parametrize("book, rate", [("mcg", 3), ("mcg", 4), ("mul1", 2.5), ("3inst", 8)])
@pytest.mark.parametrize("m, blocks", [(70, 1), (70, 2), (300, 4), (300, 5), (300, 6), (600, 100)])
def test_many_rows(book, rate, m, blocks):
    """Whole tiles and tiles that several blocks share, as few blocks as one and more than there is work for."""
    shard, x = random_shard(384, 256, rate, book), random_x(m, 384)
    y = linear(x, [shard], target="warpgroup", blocks=blocks)
    assert error(y, shard.product(x)) < EXACT


@pytest.mark.parametrize("splits", [1, 2, 4, 5, 8, 9, 100])
def test_every_cut_of_the_work(splits):
    """Nine units of work: runs of units that end within column blocks, at their borders, and one unit each."""
    shard, x = random_shard(384, 384, 3, "mcg"), random_x(17, 384)
    y = linear(x, [shard], splits=splits)
    assert error(y, shard.product(x)) < EXACT
    assert same_bytes(linear(x[3:4], [shard], splits=splits), y[3:4])


def test_more_rows_than_a_tile():
    shard, x = random_shard(128, 256, 4, "mul1"), random_x(130, 128)
    y = linear(x, [shard])
    assert error(y, shard.product(x)) < EXACT
    assert same_bytes(linear(x[127:130], [shard]), y[127:130])


@pytest.mark.parametrize("y_type", ROUNDED)
@pytest.mark.parametrize("x_type", ROUNDED)
def test_types_and_ragged_edges(x_type, y_type):
    """x narrower than k, y a part of n, rows of both apart, and nothing written between them."""
    shard, x = random_shard(256, 256, 2, "mcg", first=37, width=150), random_x(3, 205, x_type)
    y = linear(x, [shard], dtype=y_type, pad=3)
    assert error(y, shard.product(x)) < ROUNDED[y_type]


MERGED = [
    random_shard(256, 128, 3, "mul1"),
    random_shard(256, 256, 2.5, "mul1", first=128, width=100),
    random_shard(256, 128, 8, "mul1", first=0, width=96),
]


@pytest.mark.parametrize("m, target", [(2, "warp"), (33, "warp"), (33, "warpgroup")])
@pytest.mark.parametrize("splits", [1, 3, 7])
def test_merged_projections(m, target, splits):
    """Shards of other rates, signs and widths in one launch, with runs of work that cross their borders."""
    x = random_x(m, 256)
    y = linear(x, MERGED, splits=splits, target=target)
    parts = y.split([shard.width for shard in MERGED], dim=1)
    for shard, part in zip(MERGED, parts, strict=True):
        assert error(part, shard.product(x)) < EXACT


@pytest.mark.parametrize("y_type", ROUNDED)
@pytest.mark.parametrize("pad", [0, 3, 8])
@pytest.mark.parametrize("blocks", [1, 5])
def test_many_rows_of_merged_projections(y_type, pad, blocks):
    """Columns cut at any place, rows apart, parts that end within a shard."""
    x = random_x(280, 250, torch.bfloat16)
    y = linear(x, MERGED, dtype=y_type, pad=pad, target="warpgroup", blocks=blocks)
    parts = y.split([shard.width for shard in MERGED], dim=1)
    for shard, part in zip(MERGED, parts, strict=True):
        assert error(part, shard.product(x)) < ROUNDED[y_type]


@pytest.mark.parametrize("m", [1, 17])
def test_dependent_launches_wait_for_what_they_read(m):
    """Layers in a chain that share a scratch, each kernel started before the one ahead of it has begun."""
    first, second = random_shard(256, 256, 3, "mcg"), random_shard(256, 128, 4, "mcg")
    x = random_x(m, 256)

    def call(arena: Arena) -> torch.Tensor:
        hidden, y = arena.empty((m, 256), torch.float16), arena.empty((m, 128), torch.float32)
        scratch = enqueue_linear(arena, hidden, x, [first], splits=3, dependent=True)
        enqueue_linear(arena, y, hidden, [second], splits=3, dependent=True, scratch=scratch)
        load("warp").synchronize()
        return torch.cat((hidden.float(), y), dim=1)

    hidden, y = calls.under_both_schedules(call).split([256, 128], dim=1)
    assert same_bytes(hidden, linear(x, [first], dtype=torch.float16).float())
    assert error(y, second.product(hidden)) < EXACT


@pytest.mark.parametrize("book, rate", FORMATS)
def test_reconstruct_is_exact(book, rate):
    """In the rotated basis, bit for bit, also where k is no multiple of a kernel's block."""
    shard = random_shard(80, 256, rate, book)
    want = decode_rotated(shard.trellis, book)
    for dtype in (torch.float16, torch.bfloat16):
        got = calls.reconstruct(shard, dtype)
        assert same_bytes(got, want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "k, first_block, columns, pad", [(256, 0, 384, 0), (205, 1, 150, 1), (512, 1, 150, 2), (7, 2, 128, 8)]
)
def test_reconstruct_original(dtype, k, first_block, columns, pad):
    """Some columns of the matrix before rotation, its rows cut and apart."""
    for book, rate in (("3inst", 4), ("mcg", 3), ("mul1", 1.5)):
        shard = random_shard(-(-k // 128) * 128, 384, rate, book)
        got = calls.reconstruct_original(shard, dtype, k, first_block, columns, pad)
        want = shard.matrix()[:k, 128 * first_block : 128 * first_block + columns]
        assert error(got, want) < max(ROUNDED[dtype], TRANSFORMED_IN_FP16)


@pytest.mark.parametrize("y_type", ROUNDED)
@pytest.mark.parametrize("x_type", ROUNDED)
@pytest.mark.parametrize("signs", [(True, True), (True, False), (False, True)])
def test_hadamard(x_type, y_type, signs):
    """640 channels leave a warp of the last block without work."""
    x = random_x(3, 600, x_type)
    pre, post = (torch.randn(640, generator=torch.Generator().manual_seed(seed)).half() for seed in (1, 2))
    got = calls.hadamard_rows(x, pre if signs[0] else None, post if signs[1] else None, 640, 630, y_type)
    wide = torch.nn.functional.pad(x.double(), (0, 40)) * (pre.double() if signs[0] else 1)
    want = (hadamard(wide) * (post.double() if signs[1] else 1))[:, :630]
    assert error(got, want) < ROUNDED[y_type]


SHARD, ROOM = random_shard(128, 256, 3, "mcg"), torch.zeros(1 << 17, dtype=torch.uint8)
GOOD = {
    "y": torch.zeros(2, 256),
    "x": torch.zeros(2, 128),
    "trellis": SHARD.trellis,
    "suh": SHARD.suh,
    "svh": SHARD.svh,
    "scratch": ROOM[-ROOM.data_ptr() % 256 :][: 1 << 16],
    "k": 128,
    "shards": [256, 0, 256, 6],
    "codebook": 1,
    "splits": 2,
    "dependent_launch": False,
}
REFUSALS = [
    ({"x": torch.zeros(2, 129)}, "x has 129 columns, want at most k = 128"),
    ({"x": torch.zeros(128, 2).t()}, "columns of x are 2 elements apart, want 1"),
    ({"x": torch.zeros(2, 128, dtype=torch.float64)}, "x has scalar type 7, want float16, bfloat16 or float32"),
    ({"y": torch.zeros(2, 255)}, "y is 2 x 255, want 2 x 256"),
    ({"k": 100, "x": torch.zeros(2, 64)}, "k is 100, want a multiple of 128"),
    ({"codebook": 3}, "codebook 3, want 0 (3inst), 1 (mcg) or 2 (mul1)"),
    ({"shards": [256, 0, 256, 5]}, "rate 5/2 with codebook 1, want 1 to 8 bits, or 1.5, 2.5, 3.5 with mul1"),
    ({"shards": [256, 0, 256]}, "3 shard integers, want 4 for each of 1 to 8 shards"),
    ({"shards": [200, 0, 200, 6]}, "shard 0 has n = 200, want a multiple of 128"),
    ({"shards": [256, 128, 256, 6]}, "shard 0 takes columns 128 to 384 of 256"),
    ({"shards": [256, 0, 256, 8]}, "trellis has 6144 elements, want at least 8192"),
    ({"trellis": SHARD.trellis.int()}, "trellis has scalar type 3, want 2"),
    ({"suh": SHARD.suh[:64]}, "suh has 64 elements, want at least 128"),
    ({"svh": SHARD.svh.repeat(2)[::2]}, "svh is not contiguous"),
    ({"scratch": torch.zeros(4095, dtype=torch.uint8)}, "scratch has 4095 elements, want at least "),
    ({"splits": 0}, "splits is 0, want at least 1"),
    ({"trellis": torch.cat((SHARD.trellis.view(-1),) * 2)[1:]}, "trellis begins at "),
    ({"svh": torch.zeros(300, dtype=torch.half)[2:]}, "svh begins at "),
]


@pytest.mark.parametrize("change, message", REFUSALS)
def test_operators_refuse(change, message):
    load("warp").ops.linear(**GOOD)
    load("warp").synchronize()
    with pytest.raises(RuntimeError, match=re.escape(f"exl3: {message}")):
        load("warp").ops.linear(**GOOD | change)
