# SPDX-License-Identifier: Apache-2.0
"""Reconstruction, the transforms, and the native provider's own start-up check."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import BOOK_RATES, DEVICE, error, layer
from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends import LinearWeights, native
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, LinearQuery, NoBackendError, Shard
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_rotated, dense_weight, hadamard

K, N = 640, 384


@pytest.mark.parametrize(("book", "rate"), BOOK_RATES)
def test_rotated_weights_are_exact(book: str, rate: float) -> None:
    of = layer(K, N, rate, book)
    w = torch.full((K, N), float("nan"), dtype=torch.float16, device=DEVICE)
    torch.ops.exl3.reconstruct(w, of.trellis, round(2 * rate), ops.CODEBOOK_CODES[book])
    assert torch.equal(w, decode_rotated(of.trellis, book))


@pytest.mark.parametrize(("book", "rate"), BOOK_RATES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 8e-4), (torch.bfloat16, 2.5e-3)])
def test_original_weights(book: str, rate: float, dtype: torch.dtype, limit: float) -> None:
    of = layer(K, N, rate, book)
    whole = dense_weight(of.trellis, of.suh, of.svh, book)
    for rows, first_block, columns in ((K, 0, N), (K - 7, 1, 193)):
        w = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
        rate2, code = round(2 * rate), ops.CODEBOOK_CODES[book]
        torch.ops.exl3.reconstruct_original(w, of.trellis, of.suh, of.svh, N, first_block, rate2, code)
        assert error(w, whole[:rows, 128 * first_block : 128 * first_block + columns]) < limit


@pytest.mark.parametrize(("book", "rate"), [("mcg", 3.0), ("mul1", 2.5), ("3inst", 8.0)])
def test_original_weights_of_more_tiles_than_run_at_once(book: str, rate: float) -> None:
    k, n, first_block = 4096, 5120, 1
    of, rows, columns = layer(k, n, rate, book), k - 7, n - 128 - 65
    w = torch.full((rows, columns), float("nan"), dtype=torch.float16, device=DEVICE)
    rate2, code = round(2 * rate), ops.CODEBOOK_CODES[book]
    torch.ops.exl3.reconstruct_original(w, of.trellis, of.suh, of.svh, n, first_block, rate2, code)
    whole = dense_weight(of.trellis, of.suh, of.svh, book)
    assert error(w, whole[:rows, 128 * first_block : 128 * first_block + columns]) < 8e-4


def test_hadamard_of_rows() -> None:
    x = torch.randn(5, 300, device=DEVICE, dtype=torch.float16)
    pre, post = (torch.randn(384, device=DEVICE, dtype=torch.float16) for _ in range(2))
    y = torch.full((5, 350), float("nan"), device=DEVICE)
    torch.ops.exl3.hadamard(y, x, pre, post, 384)
    wide = torch.nn.functional.pad(x.double(), (0, 84))
    assert error(y, (hadamard(wide * pre.double()) * post.double())[:, :350]) < 1e-6


def query(book: str = "mcg", rate: float = 3.0, dtype: str = "bfloat16") -> LinearQuery:
    shard = Shard(n=N, width=N, rate=rate, codebook=book)
    return LinearQuery(k=K, width=K, shards=(shard,), io_dtype=dtype, max_rows=2048)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("book", ["3inst", "mcg", "mul1"])
def test_native_serves_a_layer_at_any_row_count(book: str, dtype: str) -> None:
    of, asked = layer(K, N, 3.0, book), query(book, dtype=dtype)
    device = Device.of(DEVICE)
    assert native.can_run(asked, device) == (True, "")
    plan = native.plan(asked, device)
    prepared = native.prepare(plan, LinearWeights(trellis=of.trellis.view(-1), suh=of.suh, svh=of.svh))
    for rows in sorted({1, 33, 129, plan.fused_rows, min(plan.fused_rows + 1, 2048), 2048}):
        x = torch.randn(rows, K, device=DEVICE).to(getattr(torch, dtype))
        assert error(native.run(plan, prepared, x), of.truth(x)) < (3e-3 if dtype == "bfloat16" else 1e-3)


def test_start_up_check_refuses_a_kernel_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, *rest: honest(x, *rest) * 1.01)
    with pytest.raises(NoBackendError, match="native: mcg, 5 bit, float16, 1 rows, fused, disagrees with the refer"):
        native.check_kernels(DEVICE, "mcg", 5.0, "float16")
