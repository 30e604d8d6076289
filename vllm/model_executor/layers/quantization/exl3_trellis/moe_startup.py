# SPDX-License-Identifier: Apache-2.0
"""Before the first rows of routed experts: one arena for all layers of an owner, every kernel checked and loaded.

vLLM runs the whole model once, before it counts the memory that is left for its KV cache: the first layer of an owner
that is called then makes the arena and warms every layer's plans, those too that this run does not reach.  So what live
requests need is there, and counted.  Not while weights are loaded: what a library then kept for itself would lie in the
memory that sleeping empties.  No vLLM.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .moe_plan import kernels_of
from .plan import Device
from .scratch import Owner, current_lane, reserve, scratch

if TYPE_CHECKING:
    from torch.nn import Module

    from .moe_dispatch import Experts, Route
    from .plan import Plan

logger = logging.getLogger("vllm.exl3")
ALIGNMENT = 256  # bytes, of an arena
MIB = 1 << 20
WINDOWS = ("decode", "prefill", "parity")
SMALL_CAPACITY = 1024  # rows, that the log weighs against a larger prefill capacity
WORTH_SAYING = 256 * MIB  # and what it must free for that; a small one has longer prompts run in slices


def startup_of(owner: Owner) -> Startup:
    """The owner's, one for all its lanes and streams."""
    return owner.model.keep(("experts", owner.role, owner.device, owner.capacity), Startup)


class Startup:
    """What the layers of one owner need together.  Holds neither a layer nor its owner alive."""

    def __init__(self) -> None:
        self.layers: weakref.WeakKeyDictionary[Module, Experts] = weakref.WeakKeyDictionary()
        self.need = 0  # bytes: the most that any window of any layer works in
        self.plans: dict[Hashable, Plan] = {}  # (provider, plan) -> the first equal one, which holds what it compiled
        self.warmed: set[Hashable] = set()  # (provider, plan)
        self.ready = False
        self.lane = 0  # vLLM's workspace lane, in which they were loaded and will run

    def one(self, provider: str, plan: Plan) -> Plan:
        """The plan that all layers share that have an equal one."""
        return self.plans.setdefault((provider, plan), plan)

    def add(self, layer: Module, experts: Experts) -> None:
        """A layer has been planned, or planned again by a reload."""
        with experts.owner.model.lock:
            if not self.layers:  # a reload need not be in their lane
                self.lane = current_lane()
            self.layers[layer] = experts
            for route in experts.routes.values():
                self.need = max(self.need, route.plan.workspace_bytes)
                if (route.backend.name, route.plan) not in self.warmed:
                    self.ready = False

    def arena(self, owner: Owner) -> torch.Tensor:
        """[at least `need`] u8 of this lane, microbatch and stream; the first call checks and warms everything.

        Raises:
            NoBackendError: a provider disagrees with the reference on this device.
            RuntimeError: the first call came too late, or the device has too little memory.
        """
        if not self.ready:
            self._warm(owner)
        return self._arena(owner)

    def _arena(self, owner: Owner) -> torch.Tensor:
        return scratch(owner, ("experts", self.need), lambda: self._make_arena(owner))

    def _make_arena(self, owner: Owner) -> torch.Tensor:
        try:
            return aligned(self.need, owner.device)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(self._too_large(owner)) from error

    def _too_large(self, owner: Owner) -> str:
        """That the arena does not fit, and the capacity whose arena does: the present one halved until then."""
        free = free_bytes(owner.device)
        found = f"EXL3 experts of the {owner.role} work in an arena of {self.need / MIB:.1f} MiB"
        found += f", and {owner.device} has {free / MIB:.1f} MiB free"
        windows = next(iter(self.layers.values())).windows
        if windows.decode and windows.prefill:
            rows, least = windows.prefill.rows, windows.decode.rows + 1
            while rows > least:
                rows = max(rows // 2, least)
                need = self._need_with(rows, owner)
                if need + ALIGNMENT <= free:
                    hint = f"an arena of {need / MIB:.1f} MiB, less leaves more for the KV cache"
                    return f"{found}: set VLLM_EXL3_PREFILL_CAPACITY={rows} (now {windows.prefill.rows}): {hint}"
        return f"{found}: no VLLM_EXL3_PREFILL_CAPACITY makes it fit; lower --max-num-batched-tokens, or use more GPUs"

    def _need_with(self, rows: int, owner: Owner) -> int:
        """What `need` would be with a prefill capacity of `rows`."""
        needs, device = [0], Device.of(torch.device(owner.device))
        kinds = {
            (route.backend.name, route.plan, name): (route.backend, experts)
            for experts in self.layers.values()
            for name, route in experts.routes.items()
        }
        for (_, plan, name), (backend, experts) in kinds.items():
            prefill = experts.windows.prefill
            if name == "prefill" and prefill:
                plan = backend.plan(experts.query, device, replace(prefill, rows=rows))
            needs.append(plan.workspace_bytes)
        return max(needs)

    def _warm(self, owner: Owner) -> None:
        with owner.model.lock:
            if self.ready:
                return  # another thread has been here
            if owner.device.startswith("cuda") and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"EXL3 experts ({owner.role}) first run inside a CUDA graph capture; want a run before"
                )
            reserve(owner, ("experts", self.need), lambda: self._make_arena(owner))
            arena = self._arena(owner)
            lines: dict[tuple[str, str], Line] = defaultdict(Line)
            for layer, experts in list(self.layers.items()):
                for window in experts.windows.all:
                    route = experts.routes[window.name]
                    line = lines[window.name, route.backend.name]
                    line.add(experts, route, window.name)
                    line.kernels += self._make_ready(owner, layer, experts, route, arena, line)
            for (window_name, provider), line in sorted(lines.items(), key=lambda item: WINDOWS.index(item[0][0])):
                hint = self._saving(owner) if window_name == "prefill" else ""
                text = line.text(self.need) + hint
                logger.info("EXL3 experts of the %s, %s: %s, %s", owner.role, window_name, provider, text)
            self.ready = True

    def _saving(self, owner: Owner) -> str:
        """What a small capacity would free for the KV cache: vLLM itself knows of no capacity.  Blank: little."""
        windows = next(iter(self.layers.values())).windows
        if not (windows.decode and windows.prefill and windows.decode.rows < SMALL_CAPACITY < windows.prefill.rows):
            return ""
        freed = self.need - self._need_with(SMALL_CAPACITY, owner)
        knob = f"VLLM_EXL3_PREFILL_CAPACITY={SMALL_CAPACITY}"
        return f"; {knob} would free {freed / MIB:.0f} MiB" if freed > WORTH_SAYING else ""

    def _make_ready(
        self, owner: Owner, layer: Module, experts: Experts, route: Route, arena: torch.Tensor, line: Line
    ) -> int:
        """Check and warm what has not been, for layers of the same kind; how many specialisations were loaded."""
        held, name = owner.model.held, route.backend.name
        checked, warmed = ("checked", name, owner.device, kernels_of(experts.query)), (name, route.plan)
        if checked in held and warmed in self.warmed:
            return 0
        with line.measured(owner.device):
            owner.model.keep(checked, lambda: route.backend.check(experts.query, torch.device(owner.device)))
            if warmed in self.warmed:
                return 0
            count = route.backend.warm(route.plan, route.prepared(layer._parameters), arena)
            self.warmed.add(warmed)
            return count


class Line:
    """What the log says of one window and provider."""

    def __init__(self) -> None:
        self.layers = self.kernels = self.bytes = self.held = 0
        self.seconds = 0.0
        self.ranges: set[str] = set()
        self.dtypes: set[str] = set()  # of activations and outputs
        self.refusals: dict[str, None] = {}

    def add(self, experts: Experts, route: Route, window: str) -> None:
        """Count a layer."""
        self.layers += 1
        self.bytes = max(self.bytes, route.plan.workspace_bytes)
        self.dtypes.add(experts.query.io_dtype)
        self.ranges.add(experts.windows.describe(window))
        self.refusals.update(dict.fromkeys(route.refusals))

    @contextmanager
    def measured(self, device: str) -> Iterator[None]:
        """Add the seconds, and the bytes of the device, that something takes."""
        began, free = time.monotonic(), free_bytes(device)
        yield
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # what a check has worked in
        self.seconds += time.monotonic() - began
        self.held += max(0, free - free_bytes(device))  # others on the card may let go of some meanwhile

    def text(self, need: int) -> str:
        """In words."""
        memory = f"works in {self.bytes / MIB:.1f} of the arena's {need / MIB:.1f} MiB"
        warmed = f"{self.kernels} specialisations checked and loaded in {self.seconds:.1f} s, {self.held / MIB:.1f} MiB"
        layers = f"{self.layers} layers in {', '.join(sorted(self.dtypes))}"
        parts = [layers, ", ".join(sorted(self.ranges)), memory, warmed]
        return "; ".join(parts + [f"not {why}" for why in self.refusals])


def free_bytes(device: str) -> int:
    """Of a GPU; 0 where nobody counts."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else 0


def aligned(size: int, device: str) -> torch.Tensor:
    """[size] u8 at a multiple of ALIGNMENT."""
    with torch.inference_mode(False):  # vLLM makes its first run inside, and need not make every other
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        first = -memory.data_ptr() % ALIGNMENT
        return memory[first : first + size]
