# SPDX-License-Identifier: Apache-2.0
"""The providers of routed experts that come from libraries, against float64 and through CUDA graphs.

Each is skipped, with its own reason, where it cannot run.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from bench.moe_layers import Truth, error, mixed, query, routing
from vllm.model_executor.layers.quantization.exl3_trellis.backends import b12x, exllamav3_moe
from vllm.model_executor.layers.quantization.exl3_trellis.expert_check import random_experts
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import ExpertSlice
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, MoeQuery, Window

CUDA = torch.device("cuda", 0)
LIMIT = 2e-3
# Of results that are rounded to bf16, by which the exact one is 1.65e-3 away: of a provider that computes in fp32, and
# of exllamav3, which computes in fp16 and is held to LIMIT where nothing is rounded.
ROUNDED_LIMIT = {"b12x": LIMIT, "exllamav3": 2.5e-3}
GLM = {"k": 6144, "width": 512, "top_k": 8}

# name -> layer: GLM-5.2 at TP4, then small and odd ones
LAYERS = {
    "glm-k3": query([3] * 256, **GLM),
    "glm-k4": query([4] * 256, **GLM),
    "glm-mixed": query(mixed(3, 4, 148, 108), **GLM),
    "glm-shared-mixed": query(mixed(3, 4, 148, 108), **GLM, shared_h=True),
    "small-k3-fp16": query([3] * 8, 512, 256, 2, io_dtype="float16"),
    "small-k5": query([5] * 8, 256, 512, 3),
    "small-k6-shared": query([6] * 8, 512, 256, 2, shared_h=True),
    "small-mixed-35": query(mixed(3, 5, 5, 3), 512, 256, 2),
    "288-experts": query([3] * 288, 256, 256, 8),
    "odd-sizes": query([3] * 8, 384, 128, 2),
    "two-slices": query([4] * 8, 256, 128, 2, slices=2),
    "mul1": query([3] * 8, 512, 256, 2, codebook="mul1"),
}
WINDOWS = (Window(name="decode", rows=32, block=8), Window(name="prefill", rows=4096, block=64))
PARITY = Window(name="parity", rows=2048, block=128)
ROWS = {"decode": (1, 3, 8, 32), "prefill": (33, 500, 4096), "parity": (1, 7, 128, 300, 2048)}
COMPARED = 100  # rows, evenly taken
ROUTINGS = ("balanced", "zipf", "one_hot")


def windows(provider) -> tuple[Window, ...]:
    return WINDOWS if provider.capturable else (PARITY,)


def must_run(provider, layer: MoeQuery) -> None:
    ok, why = provider.can_run(layer, Device.of(CUDA))
    if not ok:
        pytest.skip(f"{provider.name}: {why}")


def inputs(layer: MoeQuery, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    return torch.randn(rows, layer.hidden, generator=generator, device=CUDA).to(getattr(torch, layer.io_dtype))


def poisoned(plan) -> torch.Tensor:
    """An arena full of NaN."""
    return torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=CUDA)


@functools.lru_cache(maxsize=1)
def made(name: str) -> tuple[tuple[ExpertSlice, ...], Truth]:
    """Weights of a layer, and what they mean."""
    weights = random_experts(LAYERS[name], CUDA)
    return weights, Truth(LAYERS[name], weights)


def routes_of(layer: MoeQuery, kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A routing in which every third row has a route that is nobody's."""
    routes, ids = routing(kind, rows, layer.experts, layer.top_k, CUDA)
    ids[:, 0].masked_fill_(torch.arange(rows, device=CUDA) % 3 == 1, -1)
    return routes, ids


@pytest.mark.parametrize("exact", (False, True), ids=("own-dtype", "float32"))
@pytest.mark.parametrize("provider", (b12x, exllamav3_moe), ids=lambda provider: provider.name)
@pytest.mark.parametrize("name", LAYERS)
def test_agrees_with_float64(name: str, provider, exact: bool) -> None:
    layer = replace(LAYERS[name], io_dtype="float32") if exact else LAYERS[name]
    must_run(provider, layer)
    weights, truth = made(name)
    prepared = provider.prepare(layer, weights)
    found = {}
    for window in windows(provider):
        plan = provider.plan(layer, Device.of(CUDA), window)
        arena = poisoned(plan)
        for rows in ROWS[window.name]:
            for turn, kind in enumerate(ROUTINGS):
                routes, ids = routes_of(layer, kind, rows)
                x = inputs(layer, rows)
                y = torch.full_like(x, float("nan"))
                provider.run(plan, prepared, arena, x, routes, ids.long() if turn % 2 else ids, y)
                some = slice(None, None, -(-rows // COMPARED))
                found[window.name, rows, kind] = error(y[some], truth(x[some], routes[some], ids[some]))
                arena.fill_(255)
    worst = max(found, key=lambda case: (math.isnan(found[case]), found[case]))
    print(f"{provider.name}, {name}, {layer.io_dtype}: worst error {found[worst]:.2e} at {worst}")
    assert found[worst] < (ROUNDED_LIMIT[provider.name] if layer.io_dtype == "bfloat16" else LIMIT), found


@pytest.mark.parametrize("name", ("small-k3-fp16", "small-mixed-35"))
def test_b12x_replays_from_a_graph(name: str) -> None:
    layer = LAYERS[name]
    must_run(b12x, layer)
    weights, truth = made(name)
    prepared = b12x.prepare(layer, weights)
    plan = b12x.plan(layer, Device.of(CUDA), WINDOWS[0])
    arena = poisoned(plan)
    assert b12x.warm(plan, prepared, arena) > 0
    x, y = inputs(layer, 5), torch.empty(5, layer.hidden, dtype=getattr(torch, layer.io_dtype), device=CUDA)
    routes, ids = routing("zipf", 5, layer.experts, layer.top_k, CUDA)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        before = torch.cuda.memory_allocated()  # torch itself keeps a kilobyte of each graph
        b12x.run(plan, prepared, arena, x, routes, ids, y)
        assert torch.cuda.memory_allocated() == before, "run allocates"
    for seed in (1, 2):
        x.copy_(inputs(layer, 5, seed))
        fresh = routing("zipf", 5, layer.experts, layer.top_k, CUDA, seed)
        routes.copy_(fresh[0])
        ids.copy_(fresh[1])
        arena.fill_(255)
        graph.replay()
        found = error(y, truth(x, routes, ids))
        assert found < LIMIT, f"replay {seed}: relative error {found:.2e}"


def test_b12x_compiles_nothing_in_a_capture() -> None:
    layer = query([3] * 8, 256, 256, 2)
    must_run(b12x, layer)
    plan = b12x.plan(layer, Device.of(CUDA), Window(name="decode", rows=7, block=8))
    prepared = b12x.prepare(layer, random_experts(layer, CUDA))
    x = inputs(layer, 1)
    routes, ids = routing("zipf", 1, layer.experts, layer.top_k, CUDA)
    arena, y, stream = poisoned(plan), torch.empty_like(x), torch.cuda.Stream()
    with (
        pytest.raises(RuntimeError, match="decode window: warm it up before capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        b12x.run(plan, prepared, arena, x, routes, ids, y)


def test_exllamav3_refuses_a_capture() -> None:
    layer = LAYERS["small-k3-fp16"]
    must_run(exllamav3_moe, layer)
    plan = exllamav3_moe.plan(layer, Device.of(CUDA), PARITY)
    prepared = exllamav3_moe.prepare(layer, random_experts(layer, CUDA))
    x = inputs(layer, 1)
    routes, ids = routing("zipf", 1, layer.experts, layer.top_k, CUDA)
    arena, y = poisoned(plan), torch.empty_like(x)
    with (
        pytest.raises(RuntimeError, match="exllamav3 cannot be captured into a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
    ):
        exllamav3_moe.run(plan, prepared, arena, x, routes, ids, y)


@pytest.mark.parametrize("provider", (b12x, exllamav3_moe), ids=lambda provider: provider.name)
def test_the_start_up_check_passes(provider) -> None:
    layer = LAYERS["small-mixed-35"]
    must_run(provider, layer)
    provider.check(layer, CUDA)


@pytest.mark.parametrize("provider", (b12x, exllamav3_moe), ids=lambda provider: provider.name)
def test_preparing_copies_no_weights(provider) -> None:
    layer = LAYERS["small-mixed-35"]
    must_run(provider, layer)
    (part,) = random_experts(layer, CUDA)
    addresses = {part.w13_trellis.data_ptr(), part.w2_trellis.data_ptr()}
    prepared = provider.prepare(layer, (part,))
    assert addresses <= {tensor.data_ptr() for tensor in prepared.values()}
