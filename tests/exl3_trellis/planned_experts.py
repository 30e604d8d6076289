"""A layer of routed experts, planned as the door to vLLM plans it, for a provider that records what it is asked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from tests.exl3_trellis.moe_layers import load, make_layer, make_spec, query_of, slices_of, stored_tensors
from tests.exl3_trellis.recording import Recording
from tests.exl3_trellis.test_torch_moe import routing
from vllm.model_executor.layers.quantization.exl3_trellis.backends import torch_moe
from vllm.model_executor.layers.quantization.exl3_trellis.moe_dispatch import Experts, Route
from vllm.model_executor.layers.quantization.exl3_trellis.moe_plan import Limits, choose_experts, windows
from vllm.model_executor.layers.quantization.exl3_trellis.moe_startup import startup_of
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, Window
from vllm.model_executor.layers.quantization.exl3_trellis.scratch import Model, Owner

CPU = Device(kind="cpu")
SPEC = make_spec({shard: [3, 4, 3, 4] for shard in ("w1", "w3", "w2")}, hidden=128)
QUERY = query_of(SPEC, make_layer(SPEC, 256)[1])
LIMITS = Limits(min_rows=2, decode_rows=4, capacity=9, chunk=3)
MOST = 24  # rows of a step


@dataclasses.dataclass(eq=False)
class Planned:
    """A layer and what it runs with."""

    layer: torch.nn.Module
    experts: Experts

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.experts.run(self.layer._parameters, x, weights, ids)


@functools.cache
def decoded() -> dict[str, torch.Tensor]:
    """What the torch provider prepares of SPEC."""
    layer, parts = make_layer(SPEC, 256)
    load(layer, stored_tensors(SPEC))
    return torch_moe.prepare(QUERY, slices_of(layer, SPEC, parts))


def owner_of(model: Model | None = None, role: Any = "target", capacity: int = MOST) -> Owner:
    return Owner(model=model or Model(), role=role, device="cpu", capacity=capacity)


def planned(
    owner: Owner, providers: Sequence[Any], limits: Limits = LIMITS, name: str = "model.layers.3.mlp.experts"
) -> Planned:
    """A loaded layer, planned for `providers`."""
    layer, query = torch.nn.Module(), dataclasses.replace(QUERY, max_rows=owner.capacity)
    choice = choose_experts(query, CPU, providers)
    served = windows(limits, query.max_rows, planned=choice.planned is not None)
    routes, startup = {}, startup_of(owner)
    for window in served.all:
        backend, refusals = choice.of(window.name)
        names = {}
        for key, tensor in backend.prepare(query, ()).items():
            names[key] = f"{backend.name}_{key}"
            layer.register_parameter(names[key], torch.nn.Parameter(tensor, requires_grad=False))
        plan = startup.one(backend.name, backend.plan(query, CPU, window))
        routes[window.name] = Route(backend=backend, plan=plan, names=names, refusals=refusals)
    experts = Experts(layer=name, owner=owner, query=query, windows=served, routes=routes, startup=startup)
    startup.add(layer, experts)
    return Planned(layer, experts)


def both() -> tuple[Recording, Recording]:
    """One for decode and prefill, one for the parity path."""
    return Recording(decoded=decoded()), Recording(name="torch", capturable=False, decoded=decoded())


def activations(rows: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, ids = (each[:rows] for each in routing(max(rows, 1), SPEC.count, seed=seed))
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)), weights, ids


def alone(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The torch provider with nothing around it."""
    plan = torch_moe.plan(QUERY, CPU, Window(name="parity", rows=64, block=64))
    y = torch.empty_like(x)
    torch_moe.run(plan, decoded(), torch.empty(0, dtype=torch.uint8), x, weights, ids, y)
    return y
