# SPDX-License-Identifier: Apache-2.0
"""Routed experts of the native provider: against float64, the same bytes in every batch and from graphs."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from bench.moe_layers import Truth, error, mixed, query, routing
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native_moe
from vllm.model_executor.layers.quantization.exl3_trellis.codebook import CODEBOOKS
from vllm.model_executor.layers.quantization.exl3_trellis.expert_check import random_experts
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import ExpertSlice
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, MoeQuery, NoBackendError, Window

CUDA = torch.device("cuda", 0)
GLM = {"k": 6144, "width": 512, "top_k": 8}
LAYERS = {
    "glm-k3": query([3] * 256, **GLM),
    "glm-mixed": query(mixed(3, 4, 148, 108), **GLM),
    "glm-shared-k4": query([4] * 256, **GLM, shared_h=True),
    "small-k5-fp16": query([5] * 8, 256, 512, 3, io_dtype="float16"),
    "small-k6-shared": query([6] * 8, 512, 256, 2, shared_h=True),
    "288-experts": query([3] * 288, 256, 256, 8),
    "odd-sizes": query([3] * 8, 384, 128, 2),
    "four-slices": query([4] * 8, 256, 128, 2, slices=4),
    "mul1-mixed": query(mixed(3.5, 2, 5, 3), 640, 384, 2, codebook="mul1"),
    "3inst": query([4] * 8, 512, 256, 2, codebook="3inst"),
}
WINDOWS = {"decode": Window(name="decode", rows=32, block=8), "prefill": Window(name="prefill", rows=4096, block=64)}
ROWS = {"decode": (1, 3, 8, 32), "prefill": (1, 33, 500, 2050, 4096)}
# Rounding of bfloat16 outputs is most of it; without that, of inputs, sums and the middle to fp16.
LIMITS = {"bfloat16": 2e-3, "float16": 1e-3, "float32": 1e-3}


@functools.lru_cache(maxsize=1)
def made(name: str) -> tuple[tuple[ExpertSlice, ...], Truth]:
    """Weights of a layer, and what they mean."""
    weights = random_experts(LAYERS[name], CUDA)
    return weights, Truth(LAYERS[name], weights)


def inputs(layer: MoeQuery, rows: int) -> torch.Tensor:
    generator = torch.Generator(device=CUDA).manual_seed(rows)
    return torch.randn(rows, layer.hidden, generator=generator, device=CUDA).to(getattr(torch, layer.io_dtype))


class Runner:
    """The provider with an arena that is poisoned before every call."""

    def __init__(self, layer: MoeQuery, weights: tuple[ExpertSlice, ...], window: str) -> None:
        self.plan = native_moe.plan(layer, Device.of(CUDA), WINDOWS[window])
        self.prepared = native_moe.prepare(layer, weights)
        self.arena = torch.empty(self.plan.workspace_bytes, dtype=torch.uint8, device=CUDA)

    def __call__(self, x: torch.Tensor, routes: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.full_like(x, float("nan"))
        self.arena.fill_(255)
        native_moe.run(self.plan, self.prepared, self.arena, x, routes, ids, y)
        return y


@pytest.mark.parametrize("name", LAYERS)
def test_agrees_with_float64(name: str) -> None:
    layer = LAYERS[name]
    assert native_moe.can_run(layer, Device.of(CUDA)) == (True, "")
    weights, truth = made(name)
    found = {}
    for window, counts in ROWS.items():
        run = Runner(layer, weights, window)
        for rows in counts:
            for turn, kind in enumerate(("balanced", "zipf", "one_hot")):
                routes, ids = routing(kind, rows, layer.experts, layer.top_k, CUDA)
                ids[:, 0].masked_fill_(torch.arange(rows, device=CUDA) % 3 == 1, -1)
                some = slice(None) if rows < 100 else torch.arange(0, rows, rows // 50, device=CUDA)
                x = inputs(layer, rows)
                y = run(x, routes, ids.long() if turn % 2 else ids)
                assert not y.isnan().any(), (window, rows, kind)
                found[window, rows, kind] = error(y[some], truth(x[some], routes[some], ids[some]))
    worst = max(found, key=lambda case: (math.isnan(found[case]), found[case]))
    print(f"{name}: worst error {found[worst]:.2e} at {worst}")
    assert found[worst] < LIMITS[layer.io_dtype], found


@pytest.mark.parametrize("book", CODEBOOKS)
def test_every_rate(book: str) -> None:
    for rate in CODEBOOKS[book].rates:
        layer = query([rate] * 4, 384, 256, 2, codebook=book, io_dtype="float32")
        weights = random_experts(layer, CUDA)
        truth = Truth(layer, weights)
        x = inputs(layer, 500)
        routes, ids = routing("balanced", 500, 4, 2, CUDA)
        counts = [("decode", 9), *(("prefill", rows) for rows in (5, 20, 40, 80, 300, 500))]  # all row tiles
        for window, rows in counts:
            y = Runner(layer, weights, window)(x[:rows], routes[:rows], ids[:rows])
            got = error(y, truth(x[:rows], routes[:rows], ids[:rows]))
            assert got < LIMITS["float32"], f"{rate} bits, {rows} rows to {window}: {got}"


@pytest.mark.parametrize("name", ["small-k5-fp16", "mul1-mixed", "glm-mixed"])
def test_a_row_has_the_same_bytes_in_every_batch(name: str) -> None:
    layer = LAYERS[name]
    weights, _ = made(name)
    rows = 1200
    x = inputs(layer, rows)
    routes, ids = routing("zipf", rows, layer.experts, layer.top_k, CUDA)
    for window, counts in (("decode", (1, 2, 9, 32)), ("prefill", (1, 33, 100, 500, 1200))):
        run = Runner(layer, weights, window)
        whole = run(x[: counts[-1]], routes[: counts[-1]], ids[: counts[-1]])
        for count in counts:
            assert torch.equal(run(x[:count], routes[:count], ids[:count]), whole[:count]), f"{count} rows to {window}"
            last = slice(counts[-1] - count, counts[-1])
            assert torch.equal(run(x[last], routes[last], ids[last]), whole[last]), f"the last {count} rows to {window}"


# The last in blocks of 256.
REPLAYED = [("small-k6-shared", "decode", 32), ("small-k6-shared", "prefill", 700), ("3inst", "prefill", 1000)]


@pytest.mark.parametrize(("name", "window", "rows"), REPLAYED)
def test_graph_replays_give_the_eager_bytes(name: str, window: str, rows: int) -> None:
    layer = LAYERS[name]
    weights, _ = made(name)
    run = Runner(layer, weights, window)
    assert native_moe.warm(run.plan, run.prepared, run.arena) == len(run.plan.row_tiles)
    x, y = inputs(layer, rows), torch.empty(rows, layer.hidden, dtype=torch.bfloat16, device=CUDA)
    routes, ids = routing("zipf", rows, layer.experts, layer.top_k, CUDA)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        before = torch.cuda.memory_allocated()
        for _ in range(3):  # one call after the other in the same arena
            native_moe.run(run.plan, run.prepared, run.arena, x, routes, ids, y)
        assert torch.cuda.memory_allocated() == before, "run allocates"
    for seed in range(3):
        fresh = routing("zipf", rows, layer.experts, layer.top_k, CUDA, seed)
        routes.copy_(fresh[0])
        ids.copy_(fresh[1])
        want = run(x, routes, ids)
        run.arena.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, want)


@pytest.mark.parametrize("name", ["small-k6-shared", "four-slices", "mul1-mixed"])
def test_the_start_up_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native_moe.check(LAYERS[name], CUDA)
    honest = native_moe.ops_moe.moe
    monkeypatch.setattr(native_moe.ops_moe, "moe", lambda y, x, *rest: honest(y, (x * 1.02).to(x.dtype), *rest))
    with pytest.raises(NoBackendError, match="native: decode in blocks of 8 rows.* disagrees with the ref"):
        native_moe.check(LAYERS[name], CUDA)


def test_the_arena_is_small() -> None:
    layer = LAYERS["glm-k3"]
    sizes = {}
    for capacity in (1024, 4096):
        windows = [WINDOWS["decode"], replace(WINDOWS["prefill"], rows=capacity)]
        sizes[capacity] = max(native_moe.plan(layer, Device.of(CUDA), window).workspace_bytes for window in windows)
    print({capacity: f"{size / 2**20:.1f} MiB" for capacity, size in sizes.items()})
    assert sizes[4096] <= 256 << 20
    assert sizes[1024] <= 0.3 * sizes[4096]
