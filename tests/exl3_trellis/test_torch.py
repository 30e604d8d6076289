# SPDX-License-Identifier: Apache-2.0
"""The torch provider of linear layers where weights stay encoded, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from vllm.model_executor.layers.quantization.exl3_trellis import ops, reference
from vllm.model_executor.layers.quantization.exl3_trellis.backends import LinearWeights
from vllm.model_executor.layers.quantization.exl3_trellis.backends import torch as provider
from vllm.model_executor.layers.quantization.exl3_trellis.layout import trellis_shape
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, LinearQuery, Shard

CARD = Device(kind="cuda", sm=90, sms=132, smem=232_448)
SHARDS = (  # the second starts inside a block of 128
    Shard(n=256, width=256, rate=3, codebook="mul1"),
    Shard(n=256, width=100, rate=2.5, codebook="mul1", first=28),
    Shard(n=128, width=128, rate=4, codebook="mcg"),
)
QUERY = LinearQuery(k=256, width=200, shards=SHARDS, io_dtype="bfloat16", max_rows=64)
PLAN = provider.plan(QUERY, CARD)


@pytest.fixture
def weights() -> LinearWeights:
    """Random, of every shard."""
    torch.manual_seed(5)
    words = [torch.randint(-(1 << 15), 1 << 15, trellis_shape(QUERY.k, s.n, s.rate)).flatten() for s in SHARDS]
    columns = sum(shard.n for shard in SHARDS)
    return LinearWeights(
        trellis=torch.cat(words).short(),
        suh=torch.randn(QUERY.k * len(SHARDS)).half(),
        svh=torch.randn(columns).half(),
    )


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, QUERY.width, generator=torch.Generator().manual_seed(count)).bfloat16()


def test_weights_that_stay_encoded_give_what_decoded_ones_do(weights):
    x = rows(5)
    once = provider.plan(QUERY, Device(kind="cpu"))
    want = provider.run(once, provider.prepare(once, weights), x).float()
    y = provider.run(PLAN, provider.prepare(PLAN, weights), x)
    assert y.dtype == x.dtype
    assert ((y.float() - want).norm() / want.norm()).item() < 1e-2  # both round to bfloat16


def test_the_operator_obeys_the_rules_of_torch(weights):
    arguments = (rows(3), weights.trellis, weights.suh, weights.svh, QUERY.k, list(PLAN.shards), list(PLAN.codebooks))
    torch.library.opcheck(ops.reference_linear, arguments, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_sees_one_node(weights):
    """Whole graphs, as vLLM compiles: the reference's tables, and the thread that makes them, stay out of them."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    prepared = provider.prepare(PLAN, weights)
    run = torch.compile(partial(provider.run, PLAN), fullgraph=True, backend=keep, dynamic=True)
    torch._dynamo.reset()
    for count in (4, 7):
        assert torch.equal(run(prepared, rows(count)), provider.run(PLAN, prepared, rows(count)))
    called = [node.target for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    assert called.count(ops.reference_linear) + called.count(ops.reference_linear.default) == 1
    assert not [target for target in called if "matmul" in str(target)]


def test_torch_compile_takes_it_where_tables_are_made_in_a_thread(weights, monkeypatch):
    """As they are on a GPU; none is there yet."""

    def outside_pools(_device: torch.device, work: Callable[[], object]) -> object:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()

    monkeypatch.setattr(reference, "outside_pools", outside_pools)
    for table in (reference.hadamard_matrix, reference.value_table, reference._table_as, reference._windows):
        table.cache_clear()
    prepared = provider.prepare(PLAN, weights)
    torch._dynamo.reset()
    run = torch.compile(partial(provider.run, PLAN), fullgraph=True, backend="eager")
    assert torch.equal(run(prepared, rows(4)), provider.run(PLAN, prepared, rows(4)))
