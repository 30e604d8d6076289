# SPDX-License-Identifier: Apache-2.0
"""What routed experts are compared with: each peer makes the calls to be timed for one layer and several inputs.

native, b12x     planned providers, through their interface, as a layer calls them
exl3_moe         exllamav3's kernel alone, in chunks of 128 rows; routes are sorted outside the timing
exl3_moe_coop    exllamav3's kernel for decoding, up to 256 routes; layers of one rate
bf16             the unquantized layer: vLLM's Triton experts where vLLM is installed, else torch._grouped_mm
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import ModuleType

import torch

from bench.moe_layers import Truth
from vllm.model_executor.layers.quantization.exl3_trellis import backends
from vllm.model_executor.layers.quantization.exl3_trellis.backends import b12x, exllamav3_moe
from vllm.model_executor.layers.quantization.exl3_trellis.expert_check import random_experts
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import ExpertSlice
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, MoeQuery, Window

MIB = 1 << 20
DECODE_ROWS, DECODE_BLOCK, PREFILL_BLOCK, PARITY_BLOCK = 32, 8, 64, 128
COOP_SLOTS = 256
Call = Callable[[], object]


@dataclass(frozen=True)
class Input:
    """What one call gets."""

    x: torch.Tensor  # [m, hidden] bf16
    weights: torch.Tensor  # [m, top_k] f32
    ids: torch.Tensor  # [m, top_k] i32


@dataclass
class Calls:
    """What to time: one call an input, each leaving its result in `outputs`."""

    calls: list[Call]
    outputs: list[torch.Tensor]
    arena_bytes: int = 0


@dataclass
class Layer:
    """One layer's weights in every form that a peer needs, made when first asked for."""

    query: MoeQuery
    device: torch.device
    held: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def slabs(self) -> tuple[ExpertSlice, ...]:
        """As loaded."""
        return random_experts(self.query, self.device)

    @cached_property
    def truth(self) -> Truth:
        """In float64."""
        return Truth(self.query, self.slabs)

    @cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[experts, 2 * width, k] and [experts, k, width] bf16: made up, for speed does not depend on values."""
        query, empty = self.query, {"dtype": torch.bfloat16, "device": self.device}
        w13 = torch.empty(query.experts, 2 * query.width, query.k, **empty).normal_(std=query.k**-0.5)
        return w13, torch.empty(query.experts, query.k, query.width, **empty).normal_(std=query.width**-0.5)

    def prepared(self, provider: backends.MoeBackend) -> dict[str, torch.Tensor]:
        """What a provider made of the slabs."""
        if provider.name not in self.held:
            self.held[provider.name] = provider.prepare(self.query, self.slabs)
        return self.held[provider.name]


def native() -> ModuleType | None:
    """This project's provider, if it is there and its extension loads."""
    if importlib.util.find_spec(f"{backends.__name__}.native_moe") is None:
        return None
    return importlib.import_module(f"{backends.__name__}.native_moe")


def planned(provider: backends.MoeBackend, block: int, layer: Layer, inputs: Sequence[Input]) -> Calls:
    """Calls of a provider with the plan for these rows, and its arena."""
    rows = inputs[0].x.shape[0]
    ok, why = provider.can_run(layer.query, Device.of(layer.device))
    if not ok:
        raise RuntimeError(why)
    name, most = ("decode", DECODE_ROWS) if rows <= DECODE_ROWS else ("prefill", rows)
    plan = provider.plan(layer.query, Device.of(layer.device), Window(name=name, rows=most, block=block))
    arena = torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=layer.device)
    outputs = [torch.empty_like(one.x) for one in inputs]
    calls: list[Call] = [
        partial(provider.run, plan, layer.prepared(provider), arena, one.x, one.weights, one.ids, y)
        for one, y in zip(inputs, outputs, strict=True)
    ]
    return Calls(calls=calls, outputs=outputs, arena_bytes=plan.workspace_bytes)


def native_calls(layer: Layer, inputs: Sequence[Input]) -> Calls:
    """Ours, in the blocks that the environment asks for by default."""
    provider = native()
    if provider is None:
        raise RuntimeError("backends/native_moe.py is not there")
    block = DECODE_BLOCK if inputs[0].x.shape[0] <= DECODE_ROWS else PREFILL_BLOCK
    return planned(provider, block, layer, inputs)


def b12x_calls(layer: Layer, inputs: Sequence[Input]) -> Calls:
    """In the blocks that the library itself chooses for these rows."""
    from b12x.moe._shared.kernels.w4a16.host import select_route_block_size_m

    rows = inputs[0].x.shape[0]
    block = DECODE_BLOCK
    if rows > DECODE_ROWS:
        block = select_route_block_size_m(rows, layer.query.top_k, layer.query.experts)
    return planned(b12x, block, layer, inputs)


def exl3_moe_calls(layer: Layer, inputs: Sequence[Input]) -> Calls:
    """All rows at once, in the arena of the parity path."""
    query, rows = layer.query, inputs[0].x.shape[0]
    ok, why = exllamav3_moe.can_run(query, Device.of(layer.device))
    if not ok:
        raise RuntimeError(why)
    prepared = layer.prepared(exllamav3_moe)
    window = Window(name="parity", rows=rows, block=min(rows, PARITY_BLOCK))
    plan = exllamav3_moe.plan(query, Device.of(layer.device), window)
    arena = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=layer.device)
    buffers = exllamav3_moe.views(plan, arena)
    outputs = [torch.zeros(rows, query.k, device=layer.device) for _ in inputs]
    calls: list[Call] = []
    for one, y in zip(inputs, outputs, strict=True):
        steps: list[Call] = [y.zero_]
        for part in exllamav3_moe.launches(plan, prepared, one.weights, one.ids.long()):
            steps.append(partial(exllamav3_moe.launch, query, prepared, 0, one.x.half(), y, buffers, part))
        calls.append(partial(_in_turn, steps))
    return Calls(calls=calls, outputs=outputs, arena_bytes=plan.workspace_bytes)


def _in_turn(steps: list[Call]) -> None:
    for step in steps:
        step()


def coop_calls(layer: Layer, inputs: Sequence[Input]) -> Calls:
    """The kernel for decoding, with fp16 rows and fp32 sums."""
    import exllamav3_ext

    query, rows = layer.query, inputs[0].x.shape[0]
    slots = rows * query.top_k
    if slots > COOP_SLOTS or len(query.rates) != 1:
        raise RuntimeError(f"takes {COOP_SLOTS} routes and one rate")
    prepared = layer.prepared(exllamav3_moe)
    addresses = exllamav3_moe.addresses(prepared, 0)
    half = {"dtype": torch.float16, "device": layer.device}
    single = {"dtype": torch.float32, "device": layer.device}
    wide, middle = (COOP_SLOTS, query.k), (COOP_SLOTS, query.width)
    scratch = [torch.empty(*wide, **half), torch.empty(*wide, **half)]
    scratch += [torch.empty(*middle, **half) for _ in range(3)] + [torch.empty(*wide, **single)]
    # Counters of finished blocks and a table of runs; the kernel refuses fewer (exl3_moe_coop.cuh).
    length = COOP_SLOTS * (query.width // 128) + rows * (query.k // 128) + 2 * COOP_SLOTS + 3
    counters = torch.zeros(length, dtype=torch.int32, device=layer.device)
    outputs = [torch.empty(rows, query.k, **single) for _ in inputs]
    rates, no_bias, act = query.rates * 3, (None, None, None), (0, 0.0, True)  # SiLU, no limit, gated
    calls: list[Call] = []
    for one, y in zip(inputs, outputs, strict=True):
        routes = (one.x.half(), one.ids.long(), one.weights.half(), -1, -1, query.k)
        mine = (*routes, *addresses, *no_bias, *rates, True, False, *act, *scratch, counters, y, None, None)
        calls.append(partial(exllamav3_ext.exl3_moe_coop, *mine))
    return Calls(calls=calls, outputs=outputs, arena_bytes=sum(each.nbytes for each in (*scratch, counters)))


def bf16_name() -> str:
    """Which bf16 peer this machine has."""
    try:
        module = importlib.import_module("vllm.model_executor.layers.fused_moe")
        version = importlib.import_module("vllm").__version__
    except (ImportError, AttributeError, OSError, RuntimeError):
        return "torch._grouped_mm"
    return f"vLLM {version} Triton" if hasattr(module, "fused_experts") else "torch._grouped_mm"


def bf16_calls(layer: Layer, inputs: Sequence[Input]) -> Calls:
    """The unquantized layer; its results are not looked at."""
    w13, w2 = layer.dense
    run = _grouped
    if bf16_name() != "torch._grouped_mm":
        run = importlib.import_module("vllm.model_executor.layers.fused_moe").fused_experts
    calls: list[Call] = [partial(run, one.x, w13, w2, one.weights, one.ids) for one in inputs]
    return Calls(calls=calls, outputs=[])


def _grouped(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Two grouped products over rows sorted by expert; no host sync."""
    flat, top_k = ids.flatten(), ids.shape[1]
    order = flat.argsort(stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(w13.shape[0], device=x.device, dtype=flat.dtype), right=True)
    offsets, rows = ends.to(torch.int32), order // top_k
    gate, up = torch._grouped_mm(x[rows], w13.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return y.index_add_(0, rows, out.float() * weights.flatten()[order].unsqueeze(1)).to(x.dtype)


PEERS: dict[str, Callable[[Layer, Sequence[Input]], Calls]] = {
    "native": native_calls,
    "b12x": b12x_calls,
    "exl3_moe": exl3_moe_calls,
    "exl3_moe_coop": coop_calls,
    "bf16": bf16_calls,
}
