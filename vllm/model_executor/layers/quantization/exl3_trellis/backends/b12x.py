# SPDX-License-Identifier: Apache-2.0
"""Provider `b12x` of routed experts: the planned Trellis kernels of the b12x library, on the slabs as they were loaded.

Its public preparation regroups every tile.  What its kernels read is the native order of tiles all the same, which is
the order of `slabs`, so this module hands them views: no weight is copied.  Side vectors are regrouped, once.  That
takes some of the library's internals, so one version is accepted and `library` looks for everything it needs.

The library says that it supports SM12x only; nothing on this path asks.  See MEASURED for the cards where it was seen
to agree with float64.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from ..expert_check import compare
from ..expert_intake import ExpertSlice
from ..plan import Device, MoeQuery, Window
from ..slabs import slabs
from . import b12x_library as library
from . import b12x_mixed, b12x_uniform

if TYPE_CHECKING:
    from . import MoeBackend

name = "b12x"
capturable = True
MEASURED = (90, 120, 121)  # compute capabilities: 90 by bench/moe.py, the others by the library's authors
CODEBOOK = "mcg"
RATES = (3.0, 4.0, 5.0, 6.0)
CHANNELS = 256  # both sides are multiples of this: the widest column tile of its kernels
TIERS = 2  # rates that one launch may mix
TIER_EXPERTS = 256  # an expert's place in its tier is eight bits
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CHECK_LIMIT = 4e-3  # relative; rounding outputs to bf16 alone takes 1.7e-3


@dataclass(frozen=True, kw_only=True)
class B12xPlan:
    """One window of one layer."""

    query: MoeQuery
    window: Window
    block: int  # rows a block: the window's, or the largest smaller one whose tiles fit this card's shared memory
    workspace_bytes: int
    # What the library compiled, by device: code, which it keeps itself, and no memory of a model.
    programs: dict[torch.device, Any] = field(default_factory=dict, compare=False, repr=False)


def can_run(query: MoeQuery, device: Device) -> tuple[bool, str]:
    """On the cards where it was measured; the reasons are in the order in which they are cheap to find."""
    why = _refuse_card(device) or _refuse_layer(query) or library.missing()
    return not why, why


def _refuse_card(device: Device) -> str:
    if device.kind != "cuda":
        return f"runs on CUDA, not on {device.kind}"
    if device.sm not in MEASURED:
        cards = ", ".join(f"SM{sm}" for sm in MEASURED)
        return f"measured on {cards}; this card is SM{device.sm}"
    return ""


def _refuse_layer(query: MoeQuery) -> str:
    others = query.codebooks - {CODEBOOK}
    if others:
        return f"codebook {' and '.join(sorted(others))}, want {CODEBOOK}"
    if any(rate not in RATES for rate in query.rates):
        want = ", ".join(f"{rate:g}" for rate in RATES)
        return f"rates {', '.join(f'{rate:g}' for rate in query.rates)}, want each one of {want}"
    if query.w3 is None or any(bank.rates != query.w1.rates for bank in query.banks.values()):
        return "an expert's gate, up and down must have the same rate, and there must be all three"
    if len(query.rates) > TIERS:
        return f"{len(query.rates)} rates in one layer, want at most {TIERS}"
    if len(query.rates) > 1 and max(tier_sizes(query)) > TIER_EXPERTS:
        return f"{max(tier_sizes(query))} experts of one rate among others, want at most {TIER_EXPERTS}"
    if query.k % CHANNELS or query.width % CHANNELS:
        return f"sizes {query.k} x {query.width}, want multiples of {CHANNELS}"
    if query.slices != 1:
        return f"{query.slices} slices an expert, want 1"
    if (query.hidden, query.intermediate) != (query.k, query.width):
        return f"sizes {query.hidden} x {query.intermediate} padded to {query.k} x {query.width}, want no padding"
    act = query.activation
    if (act.name, act.limit, act.alpha, act.beta) != ("silu", None, 1.0, 0.0):
        return f"activation {act.name}, limit {act.limit}, want silu without a limit"
    if query.weight_on_input:
        return "weights on the input, want them on the output"
    if query.io_dtype not in DTYPES:
        return f"activations are {query.io_dtype}, want one of {', '.join(DTYPES)}"
    return ""


def tier_sizes(query: MoeQuery) -> tuple[int, ...]:
    """Experts of each rate, ascending."""
    return tuple(query.w1.rates.count(rate) for rate in query.rates)


def _kind(query: MoeQuery) -> Any:
    """The module that runs such a layer."""
    return b12x_uniform if len(query.rates) == 1 else b12x_mixed


def plan(query: MoeQuery, device: Device, window: Window) -> B12xPlan:
    """Size the arena; compiles nothing.  Call it on the device it is for."""
    kind = _kind(query)
    block = library.fitting_block(query, device, window.block, kind.TILES, kind.SHARED_RESERVE)
    size = kind.workspace_bytes(query, device, window.rows, block)
    return B12xPlan(query=query, window=window, block=block, workspace_bytes=size)


def prepare(query: MoeQuery, weights: tuple[ExpertSlice, ...]) -> dict[str, torch.Tensor]:
    """Views of the slabs, and side vectors in the order of the tiers.

    w13     flat i16, as loaded              w2     flat i16, as loaded
    suh     [2, experts or 1, k] f16         svh    [experts or 1, k] f16
    middle  [experts, 3 * width] f16: svh of gate and up, suh of down
    ones    [experts] f32 and zeros [4] u8: scales that its other formats have
    tiers   [experts] i32: an expert's place; descriptors [3 * experts] i32: tier and place in it.  Several rates only.
    """
    (part,) = weights
    device = part.w2_trellis.device
    order = _tier_order(query)
    suh, svh = part.w13_suh.unsqueeze(0), part.w2_svh.unsqueeze(0)
    if not query.shared_h:
        suh, svh = part.w13_suh, part.w2_svh
    middle = torch.cat((part.w13_svh.flatten(1), part.w2_suh), dim=1)
    if len(query.rates) > 1:
        index = torch.tensor(order, device=device)
        middle = middle[index]
        if not query.shared_h:
            suh, svh = suh[index], svh[index]
    prepared = {
        "w13": part.w13_trellis,
        "w2": part.w2_trellis,
        "suh": suh.transpose(0, 1).contiguous(),
        "svh": svh.contiguous(),
        "middle": middle,
        "ones": torch.ones(query.experts, dtype=torch.float32, device=device),
        "zeros": torch.zeros(4, dtype=torch.uint8, device=device),
    }
    if len(query.rates) > 1:
        prepared |= b12x_mixed.maps(order, tier_sizes(query), device)
    return prepared


def _tier_order(query: MoeQuery) -> list[int]:
    """Experts by rate, then by number: the order inside the slabs."""
    sizes = {"w2": query.sizes("w2")}
    return [expert for slab in slabs("w2", {"w2": query.w2.rates}, sizes) for expert in slab.experts]


def _programs(plan: B12xPlan, device: torch.device) -> Any:
    """Those of the plan, loaded by its first call."""
    if device not in plan.programs:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"b12x: {plan.query}, {plan.window.name} window: warm it up before capture")
        plan.programs[device] = _kind(plan.query).load(plan, device)
    return plan.programs[device]


def run(
    plan: B12xPlan,
    prepared: Mapping[str, torch.Tensor],
    arena: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Fill y [m, hidden] from x [m, hidden] and the routing [m, top_k]."""
    if not x.shape[0]:
        return
    programs = _programs(plan, x.device)
    _kind(plan.query).run(plan, programs, prepared, arena[: plan.workspace_bytes], x, topk_weights, topk_ids, y)


def warm(plan: B12xPlan, prepared: Mapping[str, torch.Tensor], arena: torch.Tensor) -> int:
    """Compile, then run every bucket of rows with both kinds of ids; nobody's ids, so that no weight is read."""
    query, count = plan.query, 0
    x = torch.zeros(plan.window.rows, query.hidden, dtype=DTYPES[query.io_dtype], device=arena.device)
    for rows in library.row_buckets(plan.window.rows):
        for dtype in (torch.int32, torch.int64):
            ids = torch.full((rows, query.top_k), -1, dtype=dtype, device=arena.device)
            run(plan, prepared, arena, x[:rows], torch.zeros_like(ids, dtype=torch.float32), ids, x[:rows])
            count += 1
    torch.cuda.synchronize(arena.device)
    return count


def check(query: MoeQuery, device: torch.device) -> None:
    """The kernels of this layer's sizes, rates and dtype on a few random experts, against the reference.

    Raises:
        NoBackendError: they disagree.
    """
    compare(cast("MoeBackend", sys.modules[__name__]), query, device, CHECK_LIMIT)
