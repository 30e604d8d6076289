"""The plans of the backend `native`, which need no card: which way how many rows go, and that the scratch suffices."""

from __future__ import annotations

import pytest
import torch

from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, LinearQuery, Shard

CARDS = {
    90: Device(kind="cuda", sm=90, sms=132, smem=232_448),
    80: Device(kind="cuda", sm=80, sms=108, smem=166_912),
    120: Device(kind="cuda", sm=120, sms=188, smem=101_376),
}
ROWS = (1, 8, 9, 64, 65, 128, 129, 256, 257, 300, 2048, 2049, 8192)


def query(dtype: str = "bfloat16", fused: bool = True, max_rows: int = 8192) -> LinearQuery:
    shards = tuple(Shard(n=n, width=n - 5, rate=rate, codebook="mul1") for n, rate in ((4096, 3), (1024, 2.5)))
    return LinearQuery(k=4096, width=4000, shards=shards, io_dtype=dtype, max_rows=max_rows, fused=fused)


def asked_for(monkeypatch: pytest.MonkeyPatch, plan: native.NativePlan, rows: int) -> int:
    """Bytes of scratch that a call of so many rows takes; its kernels are left out."""
    sizes: list[int] = []

    def scratch(x: torch.Tensor, size: int) -> torch.Tensor:
        sizes.append(size)
        raise StopIteration

    monkeypatch.setattr(ops, "scratch", scratch)
    x = torch.empty(rows, plan.query.width, dtype=getattr(torch, plan.query.io_dtype), device="meta")
    weights = [torch.empty(0, device="meta")] * 3
    numbers = (plan.codebook, plan.splits, plan.fused_rows, plan.many_rows, plan.chunk_columns)
    with pytest.raises(StopIteration):
        ops._linear(x, *weights, plan.query.k, list(plan.shards), *numbers, plan.sm, plan.sms)
    return sizes[0]


@pytest.mark.parametrize("many", [0, native.EVERY_ROW, 1024])
@pytest.mark.parametrize("sm", CARDS)
@pytest.mark.parametrize("dtype, fused", [("bfloat16", True), ("float32", True), ("float16", False)])
def test_the_plan_knows_the_scratch_of_every_call(monkeypatch, dtype, fused, sm, many):
    monkeypatch.setattr(native, "crossover", lambda _device: (128, many))
    plan = native.plan(query(dtype, fused), CARDS[sm])
    sizes = [asked_for(monkeypatch, plan, rows) for rows in ROWS]
    assert max(sizes) <= plan.workspace_bytes


def test_only_sm90_gets_a_kernel_of_its_own():
    for sm, card in CARDS.items():
        plan = native.plan(query(), card)
        assert (plan.sm, plan.sms) == (sm, card.sms)
        if sm != 90:
            assert plan.many_rows == 0


def test_the_parity_path_decodes_and_multiplies():
    plan = native.plan(query(fused=False), CARDS[90])
    assert (plan.fused_rows, plan.many_rows) == (0, 0)


def test_float32_never_reaches_the_library():
    for card in CARDS.values():
        plan = native.plan(query("float32"), card)
        assert max(plan.fused_rows, plan.many_rows) == plan.query.max_rows
