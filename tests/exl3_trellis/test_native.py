"""The plans of the backend `native`, which need no card: which way how many rows go."""

from __future__ import annotations

from vllm.model_executor.layers.quantization.exl3_trellis.backends import native
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, LinearQuery, Shard

CARDS = {
    90: Device(kind="cuda", sm=90, sms=132, smem=232_448),
    80: Device(kind="cuda", sm=80, sms=108, smem=166_912),
    120: Device(kind="cuda", sm=120, sms=188, smem=101_376),
}


def query(dtype: str = "bfloat16", fused: bool = True, max_rows: int = 8192) -> LinearQuery:
    shards = tuple(Shard(n=n, width=n - 5, rate=rate, codebook="mul1") for n, rate in ((4096, 3), (1024, 2.5)))
    return LinearQuery(k=4096, width=4000, shards=shards, io_dtype=dtype, max_rows=max_rows, fused=fused)


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
