"""A provider of routed experts that computes with the torch provider, in an arena, and remembers what it was asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.model_executor.layers.quantization.exl3_trellis.backends import torch_moe
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import ExpertSlice
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, MoeQuery, NoBackendError, Window

BYTES_A_ROW = 24


@dataclass(frozen=True, kw_only=True)
class RecordedPlan:
    """A window of the torch provider's."""

    window: Window
    inner: torch_moe.TorchMoePlan
    workspace_bytes: int


@dataclass(frozen=True)
class Call:
    """One `run`."""

    window: str
    rows: int
    arena: int  # address
    ids: torch.dtype
    warmed: int  # plans, by then


@dataclass(eq=False)
class Recording:
    """Refuses queries for a reason, if it is given one; disagrees with the reference, if told to.

    Runs `decoded` where it is given, which the torch provider has prepared before; else prepares what it is handed, as
    views of it if `views` says so, decoded in every call.
    """

    name: str = "recording"
    capturable: bool = True
    refusal: str = ""
    asked: int = 0  # whether it can run
    disagrees: bool = False
    calls: list[Call] = field(default_factory=list)
    planned: list[RecordedPlan] = field(default_factory=list)
    warmed: list[RecordedPlan] = field(default_factory=list)
    prepared: int = 0
    decoded: dict[str, torch.Tensor] | None = None
    views: bool = False
    seconds_to_warm: float = 0.0
    checked: list[MoeQuery] = field(default_factory=list)

    def can_run(self, query: MoeQuery, device: Device) -> tuple[bool, str]:
        self.asked += 1
        return not self.refusal, self.refusal

    def plan(self, query: MoeQuery, device: Device, window: Window) -> RecordedPlan:
        inner = torch_moe.plan(query, device, window)
        plan = RecordedPlan(window=window, inner=inner, workspace_bytes=window.rows * BYTES_A_ROW)
        self.planned.append(plan)
        return plan

    def prepare(self, query: MoeQuery, weights: tuple[ExpertSlice, ...]) -> dict[str, torch.Tensor]:
        assert torch.get_default_dtype() == torch.float32
        self.prepared += 1
        if self.decoded is not None:
            return self.decoded
        return torch_moe.prepare(query, weights, decode_once=not self.views)

    def run(
        self,
        plan: RecordedPlan,
        prepared: Mapping[str, torch.Tensor],
        arena: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        assert arena.dtype == torch.uint8
        assert arena.numel() >= plan.workspace_bytes
        assert arena.data_ptr() % 256 == 0
        assert x.shape[0] <= plan.window.rows
        assert topk_weights.dtype == torch.float32
        arena.fill_(255)  # what another window left is of no use
        self.calls.append(Call(plan.window.name, x.shape[0], arena.data_ptr(), topk_ids.dtype, len(self.warmed)))
        torch_moe.run(plan.inner, prepared, arena, x, topk_weights, topk_ids, y)

    def warm(self, plan: RecordedPlan, prepared: Mapping[str, torch.Tensor], arena: torch.Tensor) -> int:
        assert arena.numel() >= plan.workspace_bytes
        assert all(isinstance(tensor, torch.Tensor) for tensor in prepared.values())
        time.sleep(self.seconds_to_warm)
        self.warmed.append(plan)
        return 2

    def check(self, query: MoeQuery, device: torch.device) -> None:
        assert torch.get_default_dtype() == torch.float32
        self.checked.append(query)
        if self.disagrees:
            raise NoBackendError(f"{self.name}: {query} disagrees with the reference")

    def ran(self) -> list[tuple[str, int]]:
        """(window, rows) of every call so far, which are then forgotten."""
        found = [(call.window, call.rows) for call in self.calls]
        self.calls.clear()
        return found


def windows_of(plans: Iterable[Any]) -> Counter[str]:
    """How many plans each window has."""
    return Counter(plan.window.name for plan in plans)
