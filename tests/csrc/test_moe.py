"""Routed experts of csrc/exl3 on the emulated device, through operator `moe`, against float64.

Every product has inputs and sums rounded to fp16 by design. One wrong weight, sign or route would be above 1e-2.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import pytest
import torch

from tests.csrc.emulation import load
from tests.csrc.experts import DEVICE, Call, Listed, arena_bytes, query, random_call, run, skewed, truth
from tests.csrc.shards import error, same_bytes
from vllm.model_executor.layers.quantization.exl3_trellis import ops_moe
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native_moe
from vllm.model_executor.layers.quantization.exl3_trellis.codebook import CODEBOOKS
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Activation

FORMATS = [(name, rate) for name, book in CODEBOOKS.items() for rate in book.rates]
MIXED = query([(3, 3, 3), (4, 3, 4), (3, 4, 3), (2, 5, 8)])
LIMIT, PLANS = 1e-3, ("decode", "prefill")
RAGGED, TALL = [130, 100, 70, 20], [289, 190, 99, 22]


def check(of, call: Call, plan: str, limit: float = LIMIT, **options) -> torch.Tensor:
    y = run(of, call, plan, **options)
    got = error(y, truth(of, call.x, call.weights, call.ids))
    assert got < limit, f"{plan}, {options}: error {got}"
    return y


@pytest.mark.parametrize("book, rate", FORMATS)
def test_every_codebook_and_rate(book, rate):
    of = query([(rate, rate, rate)] * 3, book)
    call = random_call(of, 3)
    for plan in PLANS:
        check(of, call, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_rates_differ_between_experts_and_projections(plan):
    check(MIXED, random_call(MIXED, 5), plan)
    tier_without_gates = query([(3, 4, 4), (3, 4, 3), (3, 4, 4)], "mul1")
    check(tier_without_gates, random_call(tier_without_gates, 4), plan)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_a_row_has_the_same_bytes_in_every_block(tile):
    """Alone, and in batches whose experts have full, ragged and several blocks of every height; by warpgroups too."""
    call = random_call(MIXED, 75)
    whole = check(MIXED, call, "prefill", row_tile=tile)
    alone = Call(x=call.x[70:72], weights=call.weights[70:72], ids=call.ids[70:72])
    assert same_bytes(run(MIXED, alone, "prefill", row_tile=16, capacity=75), whole[70:72])
    if tile >= 32:
        assert same_bytes(run(MIXED, call, "prefill", row_tile=tile, target="warpgroup"), whole)


@pytest.mark.parametrize("tile, routes", [(64, RAGGED), (128, RAGGED), (256, TALL)])
def test_larger_blocks_of_sm90_have_the_same_bytes(tile, routes):
    """Two column blocks at once, or 256 routes: several heights and rates, and an odd pass, which goes singly."""
    of = query([(3, 3, 3), (4, 2, 1), (3, 4, 3), (3, 3, 5)], k=640, width=256, top_k=1)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(routes)).view(-1, 1)
    call = random_call(of, len(ids), ids)
    cut = {"row_tile": tile, "down_columns": 512, "target": "warpgroup"}
    whole = check(of, call, "prefill", **cut)
    assert same_bytes(run(of, call, "prefill", **cut | {"pairs": False, "row_tile": min(tile, 128)}), whole)


SHARED = {  # target, row tile, window: routes of each expert, thread blocks, how many take a share
    ("warp", 16, 100): ([60, 40, 25, 3], 10, 10),
    ("warp", 64, 100): ([60, 40, 25, 3], 10, 10),
    ("warpgroup", 32, 100): ([60, 40, 25, 3], 10, 10),
    ("warpgroup", 128, 100): ([60, 40, 25, 3], 10, 5),
    ("warpgroup", 256, 300): (TALL, 17, 9),
    ("warpgroup", 256, 600): (TALL, 14, 7),  # after three rounds of whole items
}


@pytest.mark.parametrize(
    "target, tile, window", [pytest.param(*key, marks=[pytest.mark.slow] * (key[1] < 64)) for key in SHARED]
)
def test_shares_that_end_within_items_leave_the_same_bytes(target, tile, window):
    """Several windows, blocks of several sizes; what the sums begin with lies in the arena, where they end as well."""
    of = query([(3, 3, 3), (4, 4, 2), (3, 4, 3), (2, 2, 3)], k=640, width=256, top_k=1, slices=2)
    routes, grid, shares = SHARED[target, tile, window]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(routes)).view(-1, 1)
    call, cut, seen = random_call(of, len(ids), ids), {"row_tile": tile, "window": window, "target": target}, []
    whole = check(of, call, "prefill", grid=2, **cut)
    assert same_bytes(run(of, call, "prefill", grid=grid, look=lambda arena: seen.append(arena.clone()), **cut), whole)
    for arena in seen:
        flags = Listed.share_flags(arena, windows=-(-len(ids) // window), grid=grid, row_tile=tile)
        assert (flags[:, 0] == shares).all(), "a share each"
        assert (flags[:, 1:].sum(1) >= 3).all(), "shares that left sums"


def test_a_row_has_the_same_bytes_in_every_decode():
    call = random_call(MIXED, 30)
    whole = check(MIXED, call, "decode")
    alone = Call(x=call.x[28:29], weights=call.weights[28:29], ids=call.ids[28:29])
    assert same_bytes(run(MIXED, alone, "decode", capacity=30), whole[28:29])


@pytest.mark.parametrize("plan", PLANS)
def test_all_rows_on_one_expert_and_rows_on_none(plan):
    rows = 19
    ids = torch.full((rows, 2), -1, dtype=torch.int64)
    ids[:, 1] = 2
    ids[4:7] = -1
    check(MIXED, random_call(MIXED, rows, ids), plan)
    nobody = random_call(MIXED, 3, torch.tensor([[-1, -7], [4, 1 << 40], [-1, -1]]))
    assert (run(MIXED, nobody, plan) == 0).all()


@pytest.mark.parametrize(
    "cut", [{"window": 7}, {"window": 16}, {"down_columns": 128}, {"window": 5, "down_columns": 256}]
)
def test_passes_of_routes_and_columns(cut):
    """Windows that cut an expert's routes, that end with them, and a last one that is short."""
    of = query([(3, 3, 3), (4, 4, 4), (3, 3, 3)], k=640)
    call = random_call(of, 21)
    assert same_bytes(check(of, call, "prefill", **cut), run(of, call, "prefill", window=64, down_columns=640))


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_of_the_depth(parts):
    of = query([(3, 3, 3), (4, 4, 4), (3, 3, 3)], k=640)
    check(of, random_call(of, 3), "decode", parts=parts)


@pytest.mark.parametrize("grid", [1, 5, 1000])
@pytest.mark.parametrize("plan", PLANS)
def test_any_number_of_thread_blocks(plan, grid):
    check(MIXED, random_call(MIXED, 6), plan, grid=grid)


@pytest.mark.parametrize("plan", PLANS)
def test_more_items_than_a_thread_block_lists(plan):
    of = query([(3, 3, 3), (2, 2, 2)] * 5, k=1280)
    check(of, random_call(of, 9), plan, grid=1)
    if plan == "prefill":  # of the fewest stages each
        of = query([(3, 3, 3), (2, 2, 2)] * 10, k=128)
        check(of, random_call(of, 30), plan, grid=2, row_tile=256, target="warpgroup")
        of = query([(8, 8, 8)] * 12, k=128)  # a shorter ring
        check(of, random_call(of, 20), plan, grid=2, row_tile=256, target="warpgroup")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "changes", [{}, {"shared_h": True}, {"weight_on_input": True}, {"shared_h": True, "weight_on_input": True}]
)
def test_slices_and_shared_rotations(plan, changes):
    of = query([(3, 3, 3), (4, 3, 4), (3, 4, 3)], width=256, slices=3, **changes)
    check(of, random_call(of, 5), plan)
    check(of, random_call(of, 5), plan, **({"window": 3} if plan == "prefill" else {}))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("experts, top_k", [(1, 1), (40, 7), (300, 40)])
def test_many_experts(plan, experts, top_k):
    of = query([(3, 3, 3)] * experts, k=128, top_k=top_k)
    check(of, random_call(of, 2), plan)


def test_routes_of_several_chunks():
    """More than the prefill plan sorts in one thread block; nobody's among them."""
    of = query([(3, 3, 3)] * 20, k=128, top_k=16)
    call = random_call(of, 130)
    call.ids[::3, 5] = -1
    whole = check(of, call, "prefill")
    alone = Call(x=call.x[128:], weights=call.weights[128:], ids=call.ids[128:])
    assert same_bytes(run(of, alone, "prefill", capacity=130), whole[128:])


@pytest.mark.parametrize("rows, tile, window", [(150, 32, 70), (128, 32, 4), (230, 64, 300), (1030, 128, 900)])
def test_blocks_of_a_window_are_listed_by_size(rows, tile, window):
    """Every route in one block, every block in one window; routing is skewed, and some routes are nobody's."""
    of = query([(3, 3, 3), (2, 2, 2), (4, 4, 4)] * 4, k=128)
    call = random_call(of, rows, skewed(rows, of.experts, of.top_k))
    seen = []
    run(of, call, "prefill", row_tile=tile, window=window, look=lambda arena: seen.append(arena.clone()))
    for arena in seen:
        _check_listed(Listed.of(arena, call, of.experts, window), call, tile, window, native_moe.table_of(of))


def _check_listed(listed: Listed, call: Call, tile: int, window: int, table: torch.Tensor) -> None:
    ids = call.ids.flatten().tolist()
    assert sorted(listed.routes) == [[route, expert] for route, expert in enumerate(ids) if expert >= 0]
    assert torch.equal(listed.weights, table.T[[expert for expert, _, _ in listed.blocks]])
    several = False
    for number, (begin, end) in enumerate(itertools.pairwise(listed.first)):
        blocks = listed.blocks[begin:end]
        sizes = [-(-count // 32) for _, _, count in blocks]
        assert sizes == sorted(sizes, reverse=True)
        several |= len(set(sizes)) > 1
        place, last = number * window, min((number + 1) * window, len(listed.routes))
        for expert, start, count in sorted(blocks, key=lambda block: block[1]):
            assert start == place and 1 <= count <= tile
            assert {of for _, of in listed.routes[start : start + count]} == {expert}
            place += count
        assert place == max(last, number * window)
    assert several == (tile > 32), "blocks of one size have no order"


@pytest.mark.parametrize(
    "activation",
    [
        Activation(name="silu"),
        Activation(name="silu", limit=0.5),
        Activation(name="swigluoai", limit=0.7, alpha=1.702, beta=1.0),
        Activation(name="swiglustep", limit=0.4),
        Activation(name="gelu"),
        Activation(name="gelu_tanh"),
        Activation(name="relu2"),
    ],
)
def test_activations(activation):
    of = query([(3, 3, 3)] * 3, activation=activation)
    call = random_call(of, 3)
    large = activation.limit is None and activation.name != "relu2"  # whose squares leave fp16
    for plan, scale in itertools.product(PLANS, (1, 40)[: 1 + large]):
        check(of, replace(call, x=call.x * scale), plan)


@pytest.mark.parametrize("io_dtype, limit", [("float16", LIMIT), ("bfloat16", 3e-3)])
def test_types_and_strides(io_dtype, limit):
    of = replace(MIXED, io_dtype=io_dtype)
    call = random_call(of, 3)
    wide = replace(call, ids=call.ids.long())
    for plan in PLANS:
        y = check(of, call, plan, limit, pad=5)
        assert same_bytes(y, run(of, wide, plan, dependent=False, pad=3)), "rows at multiples of 16 bytes"


def test_the_start_up_check_passes(monkeypatch):
    """It plans for a few rows and runs the kernels of every row tile."""

    def moe(y, x, weights, ids, arena, table, slices, sizes, cut, numbers, dependent):
        room = torch.full((arena.numel() + 256,), 255, dtype=torch.uint8)
        scratch = room[-room.data_ptr() % 256 :][: arena.numel()]
        sizes, cut = ops_moe._numbers(sizes), ops_moe._numbers(cut)
        load("warpgroup").ops.moe(y, x, weights, ids, scratch, table, slices, sizes, cut, *numbers, dependent)
        load("warpgroup").synchronize()

    monkeypatch.setattr(ops_moe, "moe", moe)
    monkeypatch.setattr(ops_moe, "arena_bytes", functools.partial(arena_bytes, "warpgroup"))
    monkeypatch.setattr(native_moe.Device, "of", lambda _: DEVICE)
    native_moe.check(query([(3, 4, 3)] * 4, width=256, top_k=1), torch.device("cpu"))


GOOD_SIZES = [128, 128, 128, 128, 2, 1, 1, 6, 0, 0, 0]
GOOD_PLAN = [0, 16, 1, 64, 128, 4, 0]
REFUSALS = [
    ({"sizes": GOOD_SIZES[1:]}, "10 sizes and 7 numbers of a plan, want 11 and 7"),
    ({"sizes": [100, *GOOD_SIZES[1:]]}, "experts of 100 x 128, want multiples of 128"),
    ({"sizes": [128, 129, *GOOD_SIZES[2:]]}, "hidden is 129, want 1 to k = 128"),
    ({"sizes": [*GOOD_SIZES[:4], 2049, *GOOD_SIZES[5:]]}, "2049 experts, want 1 to 2048"),
    ({"sizes": [*GOOD_SIZES[:7], 5, *GOOD_SIZES[8:]]}, "rate 5/2 with codebook 1, want 1 to 8 bits"),
    ({"sizes": [*GOOD_SIZES[:10], 5]}, "activation 5, want 0 to 4"),
    ({"plan": [0, 24, *GOOD_PLAN[2:]]}, "blocks of 24 rows, want 8 to decode, else 16, 32, 64, 128 or 256"),
    ({"plan": [0, 256, *GOOD_PLAN[2:]]}, "blocks of 256 rows, want SM90 (pairs) and inputs that are not shared"),
    (
        {"sizes": [*GOOD_SIZES[:5], 65, *GOOD_SIZES[6:]], "plan": [0, 16, 1, 2, 128, 4, 0]},
        "130 routes in windows of 2, want at most 64 windows",
    ),
    ({"plan": [1, 8, 1, 1, 128, 4, 0]}, "2 routes, want at most the window of a decode plan, 1"),
    ({"plan": [*GOOD_PLAN[:4], 100, 4, 0]}, "down in passes of 100 columns, want a multiple of 128"),
    ({"weights": torch.zeros(1)}, "weights has 1 elements, want at least 2"),
    ({"ids": torch.zeros(2, dtype=torch.int16)}, "ids has scalar type 2, want 3"),
    ({"arena": torch.zeros(256, dtype=torch.uint8)}, "arena has 256 elements, want at least "),
    ({"y": torch.zeros(2, 127)}, "x is 2 x 128 and y is 2 x 127, want both 2 x 128"),
    ({"y": torch.zeros(2, 128, dtype=torch.half)}, "x and y have scalar types 6 and 5, want the same"),
    ({"slices": []}, "0 tensors of slices, want six for each"),
]


@pytest.mark.parametrize("change, message", REFUSALS)
def test_operator_refuses(change, message):
    halves = torch.zeros(512, dtype=torch.half)
    arena = torch.zeros((1 << 20) + 256, dtype=torch.uint8)
    good = {
        "y": torch.zeros(2, 128),
        "x": torch.zeros(2, 128),
        "weights": torch.zeros(2),
        "ids": torch.full((2,), -1, dtype=torch.int32),
        "arena": arena[-arena.data_ptr() % 256 :],
        "table": torch.zeros(6, dtype=torch.int64),
        "slices": [torch.zeros(8, dtype=torch.int16), halves, halves] * 2,
        "sizes": GOOD_SIZES,
        "plan": GOOD_PLAN,
    } | {"limit": 1.0, "alpha": 1.0, "beta": 0.0, "dependent_launch": False}
    for rows in (2, 0):
        load("warp").ops.moe(**good | {name: good[name][:rows] for name in ("x", "y")})
        load("warp").synchronize()
    with pytest.raises(RuntimeError, match=re.escape(f"exl3: {message}")):
        load("warp").ops.moe(**good | change)
