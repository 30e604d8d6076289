# SPDX-License-Identifier: Apache-2.0
"""Run a layer's routed experts: cut the rows into windows, hand each to its provider.

What a layer needs before it can run (memory, loaded kernels) is `moe_startup`'s.  No vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .backends import MoeBackend
from .moe_plan import Windows
from .moe_startup import Startup
from .plan import MoeQuery, Plan
from .scratch import Owner

IDS = (torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the rows of one window run."""

    backend: MoeBackend
    plan: Plan
    names: Mapping[str, str]  # of a prepared tensor -> of the parameter that holds it
    refusals: tuple[str, ...] = ()  # why not the providers before this one

    def run(
        self,
        params: Mapping[str, torch.Tensor],
        arena: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """As `MoeBackend.run`; `params` are the layer's own."""
        self.backend.run(self.plan, self.prepared(params), arena, x, topk_weights, topk_ids, y)

    def prepared(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the provider once returned from `prepare`, as it is now: a reload changes the values, or the objects."""
        return {name: params[held] for name, held in self.names.items()}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The routed experts of one layer, planned."""

    layer: str  # its name, for messages
    owner: Owner
    query: MoeQuery
    windows: Windows
    routes: Mapping[str, Route]  # by name of the window
    startup: Startup  # the owner's

    def run(
        self,
        params: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """y [m, hidden] for any number of rows: the sum over this rank's slices.  Allocates nothing but y.

        Args:
            params: the layer's own parameters, by name.
            x: [m, hidden] of the query's dtype.
            topk_weights: [m, top_k], converted if it is not f32.
            topk_ids: [m, top_k] i32 or i64; an id below 0 is nobody's.

        Raises:
            ValueError: a tensor is not as above.
            RuntimeError: rows that need the parity path came while a CUDA graph is captured.
        """
        rows = x.shape[0]
        self._require(x, topk_weights, topk_ids)
        x, weights, ids = x.contiguous(), topk_weights.float().contiguous(), topk_ids.contiguous()
        y = torch.empty_like(x)
        arena = self.startup.arena(self.owner)
        for name, start, stop in self.windows.cuts(rows):
            route = self.routes[name]
            if not route.backend.capturable and capturing(x.device):
                raise RuntimeError(self._refusal(route, stop - start))
            if stop - start == rows:
                route.run(params, arena, x, weights, ids, y)
            else:
                part = slice(start, stop)
                route.run(params, arena, x[part], weights[part], ids[part], y[part])
        return y

    def _require(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        query, routing = self.query, (x.shape[0], self.query.top_k)
        if x.dim() != 2 or x.shape[1] != query.hidden or str(x.dtype) != f"torch.{query.io_dtype}":
            want = f"[m, {query.hidden}] {query.io_dtype}"
            raise ValueError(f"{self.layer}: activations are {list(x.shape)} {x.dtype}, want {want}")
        if weights.shape != routing or ids.shape != routing or ids.dtype not in IDS:
            got = f"{list(weights.shape)} and {list(ids.shape)} {ids.dtype}"
            raise ValueError(f"{self.layer}: routing is {got}, want {list(routing)}, ids of int32 or int64")

    def _refusal(self, route: Route, rows: int) -> str:
        who = f"{self.layer} ({self.owner.role})"
        why = f"{rows} rows take the parity path ({route.backend.name}), which no CUDA graph can hold"
        return f"{who}: {why}: set {self.windows.remedy(rows)}"


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
