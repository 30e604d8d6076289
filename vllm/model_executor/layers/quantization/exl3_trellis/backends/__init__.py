# SPDX-License-Identifier: Apache-2.0
"""Kernel providers: one module each.  Those of linear layers have four verbs.

    can_run(query, device) -> (ok, reason)      from numbers alone; nothing is compiled, at most the library is imported
    plan(query, device) -> plan                 frozen
    prepare(plan, weights) -> {name: tensor}    once, after loading; views what it can, copies only what it must reorder
    run(plan, prepared, x) -> y                 allocates y, and scratch for the time of the call

Providers of routed experts have more, for they serve a layer through several plans: see `MoeBackend`.

`x` is [m, query.width] and `y` is [m, query.out_width], both of query.io_dtype; the layer's bias is not part of it.

What `prepare` returns becomes parameters of the layer, and `run` gets those back under the same names.  They are
tensors and nothing else, and none of them may hold an address: a reload writes new values into the same storage, and
sleeping moves it.  Everything that is not a tensor belongs in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

    from ..expert_intake import ExpertSlice
    from ..plan import Device, LinearQuery, MoeQuery, Plan, Window


@dataclass(frozen=True, kw_only=True)
class LinearWeights:
    """The tensors of a linear layer's shards, end to end in the order of `query.shards`, on the device to run them."""

    trellis: torch.Tensor  # [sum of k/16 * n/16 * 16*rate] i16: each shard's [k/16, n/16, 16*rate], flattened
    suh: torch.Tensor  # [shards * k] f16
    svh: torch.Tensor  # [sum of n] f16


class Backend(Protocol):
    """What a provider module offers."""

    name: str
    for_graphs: bool  # whether the CUDA graphs that vLLM captures by default should hold its calls

    def installed(self) -> bool:
        """Whether what it needs is installed, as far as files tell: no library is loaded and no device asked."""

    def can_run(self, query: LinearQuery, device: Device) -> tuple[bool, str]: ...

    def plan(self, query: LinearQuery, device: Device) -> Plan: ...

    def prepare(self, plan: Plan, weights: LinearWeights) -> dict[str, torch.Tensor]: ...

    def run(self, plan: Plan, prepared: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor: ...


class MoeBackend(Protocol):
    """What a provider module of routed experts offers.

    A layer has one plan for each window of rows, and prepares its tensors once for all of them.
    """

    name: str
    capturable: bool  # whether `run` may be inside a CUDA graph capture

    def can_run(self, query: MoeQuery, device: Device) -> tuple[bool, str]:
        """From numbers alone; nothing is compiled, at most the library is imported."""

    def plan(self, query: MoeQuery, device: Device, window: Window) -> Plan:
        """Frozen and hashable; `workspace_bytes` is exact, and all that `run` needs."""

    def prepare(self, query: MoeQuery, weights: tuple[ExpertSlice, ...]) -> dict[str, torch.Tensor]:
        """Once after loading; views where it can.  `weights` has `query.slices` entries, laid out as in `slabs`."""

    def run(
        self,
        plan: Plan,
        prepared: Mapping[str, torch.Tensor],
        arena: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Write all of y.  A capturable provider allocates nothing and never waits for the device.

        Args:
            plan: of the window that the rows fall into.
            prepared: what `prepare` returned.
            arena: [at least plan.workspace_bytes] u8, aligned to 256 bytes; what it holds is ignored, NaN included.
            x: [m, query.hidden] query.io_dtype, m at most window.rows.
            topk_weights: [m, top_k] f32.
            topk_ids: [m, top_k] i32 or i64; an id below 0 is nobody's.
            y: [m, query.hidden] query.io_dtype: the sum over this rank's slices, which vLLM reduces and scales.
        """

    def warm(self, plan: Plan, prepared: Mapping[str, torch.Tensor], arena: torch.Tensor) -> int:
        """Load or compile every specialisation that `run` may reach with this plan; how many there are.

        Called after loading and before the KV cache is sized, on the device that will serve.
        """

    def check(self, query: MoeQuery, device: torch.device) -> None:
        """Compare with the reference on small random experts, on this very device.

        Raises:
            NoBackendError: they disagree.
        """


def likely(fused: bool, forced: str) -> Backend:
    """The provider that linear layers of an ordinary GPU will get, for those who must not touch it yet.

    fused, forced: VLLM_EXL3_FUSED and VLLM_EXL3_BACKEND.
    """
    providers = candidates(fused)
    named = [provider for provider in providers if provider.name == forced]
    return next(provider for provider in named or providers if named or provider.installed())


def candidates(fused: bool = True) -> tuple[Backend, ...]:
    """Every provider, in the order `auto` tries them; with `fused` off, exllamav3's own kernels come first."""
    from . import exllamav3, native
    from . import torch as torch_backend

    kernels = (native, exllamav3) if fused else (exllamav3, native)
    return tuple(cast(Backend, module) for module in (*kernels, torch_backend))


def moe_candidates() -> tuple[MoeBackend, ...]:
    """Every provider of routed experts, in the order `auto` tries them."""
    from . import b12x, exllamav3_moe, native_moe, torch_moe

    return tuple(cast(MoeBackend, module) for module in (native_moe, b12x, exllamav3_moe, torch_moe))
