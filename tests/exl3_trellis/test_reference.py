# SPDX-License-Identifier: Apache-2.0
"""The reference against exllamav3's own results, and against its own float64 variant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm.model_executor.layers.quantization.exl3_trellis import layout, reference

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "exl3_golden_vectors.safetensors")
LINEARS = sorted(name.removesuffix(".trellis") for name in GOLDEN if name.endswith(".trellis"))
HALF = {1.5: "1p5", 2.5: "2p5", 3.5: "3p5"}


def linear(key: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    return GOLDEN[f"{key}.trellis"], GOLDEN[f"{key}.suh"], GOLDEN[f"{key}.svh"], key.split(".", maxsplit=1)[0]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error: ||got - want|| / ||want||, in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_vectors_cover_the_format():
    whole = {f"{book}.k{rate}" for book in ("3inst", "mcg", "mul1") for rate in range(1, 9)}
    assert set(LINEARS) == whole | {f"mul1.k{rate}" for rate in HALF.values()}


@pytest.mark.parametrize("key", LINEARS)
def test_decodes_bit_for_bit(key):
    trellis, _, _, name = linear(key)
    got = reference.decode_rotated(trellis, name)
    assert torch.equal(got.view(torch.int16), GOLDEN[f"{key}.w_rotated"].view(torch.int16))


@pytest.mark.parametrize("key", LINEARS)
def test_forward_rounds_as_exllamav3(key):
    """1e-5 is far above float32 sums in another order (2e-7), far below one missed fp16 rounding (2e-4)."""
    for rows in (1, 5, 33):
        x, y = GOLDEN[f"{key}.x{rows}"], GOLDEN[f"{key}.y{rows}"]
        assert error(reference.forward(x, *linear(key)), y) < 1e-5
        assert 1e-5 < error(reference.forward(x, *linear(key), exact=True), y) < 1e-3


def test_hadamard_is_exllamav3s():
    assert torch.equal(reference.hadamard(GOLDEN["had.x"].float()).half(), GOLDEN["had.y"])


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("key", ["3inst.k5", "mcg.k3", "mul1.k2p5"])
def test_dense_weight_is_the_forward(key, dtype, bound):
    x = torch.eye(256, dtype=torch.float64)
    want = reference.forward(x, *linear(key), exact=True)
    got = reference.decode_dense(*linear(key), dtype=dtype)
    assert got.dtype == dtype
    assert error(got, want) < bound


def test_codebook_spread():
    """The standard deviations that generators and error budgets take from the codebooks."""
    for name, book in reference.CODEBOOKS.items():
        assert float(reference.value_table(name).double().std()) == pytest.approx(book.std, abs=1e-4)


def random_linear(k: int, n: int, rate: float = 3):
    torch.manual_seed(k + n)
    trellis = torch.randint(-(1 << 15), 1 << 15, layout.trellis_shape(k, n, rate), dtype=torch.int16)
    return trellis, torch.randn(layout.padded(k)).half(), torch.randn(layout.padded(n)).half(), "mcg"


def test_pieces_make_the_whole(monkeypatch):
    """Matrices larger than one piece, cut both ways, with a ragged last piece: the same as in one go."""
    weights = random_linear(640, 896)
    whole = reference.decode_dense(*weights)
    rotated = reference.decode_rotated(weights[0], "mcg")
    x = torch.randn(3, 640)
    y = reference.forward(x, *weights)
    for size in (1, 128 * 384, 128 * 896 * 2):
        monkeypatch.setattr(reference, "CHUNK_WEIGHTS", size)
        pieces = reference._chunks(weights[0])
        assert len(pieces) > 1
        weights_of = [(r1 - r0) * (c1 - c0) * 256 for (r0, r1), (c0, c1) in pieces]
        assert max(weights_of) <= max(size, 128 * 128), "a piece is what bounds the extra memory"
        assert error(reference.decode_dense(*weights), whole) < 1e-6
        assert torch.equal(reference.decode_rotated(weights[0], "mcg"), rotated)
        assert error(reference.forward(x, *weights), y) < 1e-5


def test_rows():
    weights = random_linear(512, 256)
    whole = reference.dense_weight(*weights)
    assert torch.allclose(reference.decode_dense(*weights, torch.float64, rows=(128, 384)), whole[128:384])
    want = re.escape("rows [64, 128) of 512: want a non-empty range of whole blocks of 128")
    with pytest.raises(ValueError, match=f"^{want}$"):
        reference.decode_dense(*weights, rows=(64, 128))


def test_out_is_cut_and_may_be_transposed(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_WEIGHTS", 128 * 128)
    weights = random_linear(300, 200)
    out = torch.zeros(200, 300, dtype=torch.bfloat16)  # as a linear layer holds it
    got = reference.decode_dense(*weights, out=out.t())
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out.t(), reference.decode_dense(*weights)[:300, :200].bfloat16())
    small = torch.zeros(100, 72)  # whole blocks are beyond it
    assert torch.equal(reference.decode_dense(*weights, out=small), reference.decode_dense(*weights)[:100, :72])


def test_short_input_is_extended_with_zeros_and_bias_added():
    weights = random_linear(300, 200)
    x, bias = torch.randn(2, 4, 300), torch.randn(200)
    want = x.double() @ reference.dense_weight(*weights)[:300, :200] + bias.double()
    got = reference.forward(x, *weights, bias=bias, exact=True)
    assert got.shape == (2, 4, 256)
    assert error(got[..., :200], want) < 1e-14
    assert error(reference.forward(x, *weights, bias=bias)[..., :200], want) < 1e-3


def test_packed_signs():
    packed = torch.tensor([0b101, -(1 << 15)], dtype=torch.int16)
    want = torch.ones(32, dtype=torch.float16)
    want[[0, 2, 31]] = -1
    assert torch.equal(reference.unpack_signs(packed), want)


TRELLIS = torch.zeros(8, 16, 48, dtype=torch.int16)
ONES = torch.ones(256).half()


@pytest.mark.parametrize(
    "trellis, suh, svh, name, message",
    [
        (TRELLIS.int(), ONES, ONES, "mcg", "trellis: torch.int32 [8, 16, 48], want torch.int16 [k/16, n/16, 16*K]"),
        (TRELLIS[0], ONES, ONES, "mcg", "trellis: torch.int16 [16, 48], want torch.int16 [k/16, n/16, 16*K]"),
        (TRELLIS[..., :40], ONES, ONES, "mcg", "codebook mcg: 2.5 bits a weight, want one of 1, 2, 3, 4, 5, 6, 7, 8"),
        (TRELLIS, ONES, ONES, "mcg", "suh: [256], want [128] for a trellis of [8, 16, 48]"),
        (TRELLIS, ONES[:128], ONES[:128], "mcg", "svh: [128], want [256] for a trellis of [8, 16, 48]"),
        (TRELLIS[:, :9], ONES[:128], ONES[:144], "mcg", "svh: 144 channels, want a multiple of 128"),
    ],
)
def test_tensors_that_do_not_fit(trellis, suh, svh, name, message):
    for use in (reference.decode_dense, lambda *tensors: reference.forward(torch.ones(1, 8), *tensors)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            use(trellis, suh, svh, name)
