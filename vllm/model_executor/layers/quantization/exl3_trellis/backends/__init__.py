"""Kernel providers: one module each, all with the same four verbs.

    can_run(query, device) -> (ok, reason)      from numbers alone, nothing is imported or compiled
    plan(query, device) -> plan                 frozen; `plan.workspace_bytes` is all it will ever need
    prepare(plan, weights) -> prepared          once, after loading; may reorder weights, never copies what it can view
    run(plan, prepared, x) -> y                 allocates nothing but y

`x` is [m, query.width] and `y` is [m, query.out_width], both of query.io_dtype; the layer's bias is not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch

    from ..plan import Device, LinearQuery, Plan


@dataclass(frozen=True, kw_only=True)
class ShardWeights:
    """The stored tensors of one shard, on the device that will run it."""

    trellis: torch.Tensor  # [k/16, n/16, 16*rate] i16
    suh: torch.Tensor  # [k] f16
    svh: torch.Tensor  # [n] f16


class Backend(Protocol):
    """What a provider module offers."""

    name: str

    def can_run(self, query: LinearQuery, device: Device) -> tuple[bool, str]: ...

    def plan(self, query: LinearQuery, device: Device) -> Plan: ...

    def prepare(self, plan: Plan, weights: tuple[ShardWeights, ...]) -> Any: ...

    def run(self, plan: Plan, prepared: Any, x: torch.Tensor) -> torch.Tensor: ...


def _available() -> tuple[ModuleType, ...]:
    from . import torch as torch_backend

    return (torch_backend,)


def candidates() -> tuple[Backend, ...]:
    """Every provider, in the order `auto` tries them."""
    return tuple(cast(Backend, module) for module in _available())
