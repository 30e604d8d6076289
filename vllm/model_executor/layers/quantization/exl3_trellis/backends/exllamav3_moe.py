# SPDX-License-Identifier: Apache-2.0
"""Provider `exllamav3` of routed experts: the parity path, exllamav3's `exl3_moe`.

One launch serves every expert, up to a block of rows each; an expert with more gets more launches.  The kernel spins on
barriers that need all its blocks on the card at once, and every kernel of the library on a card shares one buffer of
locks: it runs alone, on one stream, and never inside a CUDA graph.  It adds an expert's outputs in the order in which
they finish, so the last bits differ from run to run.
Does not serve what that kernel refuses: the 3inst codebook, several codebooks in one expert; nor a padded middle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import arena_layout
from ..arena_layout import Layout, layout_bytes
from ..expert_check import compare
from ..expert_intake import ExpertSlice
from ..plan import Device, MoeQuery, Window
from ..slabs import MATRIX, slabs
from . import exllamav3_library as library
from .torch_moe import KINDS

if TYPE_CHECKING:
    from . import MoeBackend

name = "exllamav3"
capturable = False
CODEBOOKS = ("mcg", "mul1")
BLOCKS_PER_EXPERT = 8  # what a group of its blocks is made of
DTYPES = ("float16", "bfloat16", "float32")
SILU = 0
CHECK_LIMIT = 4e-3  # relative; its activations are fp16 throughout
SIDES = ("suh", "svh")

Tier = tuple[tuple[float, ...], tuple[str, ...]]  # rates and codebooks of gate, up and down
Tiers = tuple[tuple[Tier, tuple[int, ...]], ...]  # and its experts


@dataclass(frozen=True, kw_only=True)
class ParityMoePlan:
    """The arena holds the rows of a call, and what the experts that run at once work in."""

    query: MoeQuery
    rows: int  # most of a call
    block: int  # most rows of one expert in one launch
    groups: int  # experts at once
    tiers: Tiers
    workspace_bytes: int


def can_run(query: MoeQuery, device: Device) -> tuple[bool, str]:
    """Where `exllamav3_ext` can be imported, for what its fused kernel takes."""
    why = _refuse_layer(query)
    if device.kind != "cuda":
        why = f"runs on CUDA, not on {device.kind}"
    elif device.sm < library.MIN_SM:
        why = f"needs SM{library.MIN_SM} or newer, this card is SM{device.sm}"
    why = why or library.missing("exl3_moe")
    return not why, why


def _refuse_layer(query: MoeQuery) -> str:
    act = query.activation
    if (act.name, act.limit, act.alpha, act.beta) != ("silu", None, 1.0, 0.0) or query.w3 is None:
        return f"activation {act.name}, limit {act.limit}, want silu without a limit"
    if query.codebooks - set(CODEBOOKS):
        return f"codebook {' and '.join(sorted(query.codebooks))}, want {' or '.join(CODEBOOKS)}"
    for (_, books), _ in _tiers(query):
        if len(set(books)) > 1:
            return f"an expert has the codebooks {' and '.join(sorted(set(books)))}, want one"
    if query.intermediate != query.slices * query.width:
        return f"{query.intermediate} channels in the middle, padded to {query.slices * query.width}, want no padding"
    if query.weight_on_input:
        return "weights on the input, want them on the output"
    if query.io_dtype not in DTYPES:
        return f"activations are {query.io_dtype}, want one of {', '.join(DTYPES)}"
    return ""


def _tiers(query: MoeQuery) -> Tiers:
    """Experts that one launch can serve together: equal in the rates and codebooks of their projections."""
    banks = [query.banks[shard] for shard in ("w1", "w3", "w2") if shard in query.banks]
    found: dict[Tier, list[int]] = {}
    for expert in range(query.experts):
        kind = tuple(bank.rates[expert] for bank in banks), tuple(bank.codebooks[expert] for bank in banks)
        found.setdefault(kind, []).append(expert)
    return tuple((kind, tuple(experts)) for kind, experts in sorted(found.items()))


def _layout(query: MoeQuery, rows: int, block: int, groups: int) -> Layout:
    """Every buffer of a call."""
    half = torch.float16
    return {
        "x": ((rows, query.k), half),
        "sum": ((rows, query.k), torch.float32),
        "gate_in": ((groups, block, query.k), half),
        "up_in": ((groups, block, query.k), half),
        "gate_out": ((groups, block, query.width), half),
        "up_out": ((groups, block, query.width), half),
    }


def plan(query: MoeQuery, device: Device, window: Window) -> ParityMoePlan:
    """As many experts at once as the card has room for their blocks, a block of the window's rows each."""
    groups, block = max(1, device.sms // BLOCKS_PER_EXPERT), min(window.rows, window.block)
    size = layout_bytes(_layout(query, window.rows, block, groups))
    return ParityMoePlan(
        query=query, rows=window.rows, block=block, groups=groups, tiers=_tiers(query), workspace_bytes=size
    )


def prepare(query: MoeQuery, weights: tuple[ExpertSlice, ...]) -> dict[str, torch.Tensor]:
    """The slabs as they are, and where in them each expert's tensors begin.

    slice{i}_{kind}  as loaded
    places    [3, 3, experts] i64 bytes: of gate, up, down and of trellis, suh, svh, from the start of its parameter
    tiers     [tiers, experts] i64: the expert where it is of this tier, elsewhere `experts`
    """
    device = weights[0].w2_trellis.device
    places = torch.tensor([_places(query, shard) for shard in ("w1", "w3", "w2")])
    kinds = _tiers(query)
    tiers = torch.full((len(kinds), query.experts), query.experts)
    for row, (_, experts) in enumerate(kinds):
        tiers[row, list(experts)] = torch.tensor(experts)
    slabs_of = {f"slice{i}_{kind}": getattr(part, kind) for i, part in enumerate(weights) for kind in KINDS}
    return slabs_of | {"places": places.to(device), "tiers": tiers.to(device)}


def _places(query: MoeQuery, shard: str) -> list[list[int]]:
    """Bytes from the start of a parameter to each expert's trellis, suh and svh."""
    matrix, experts = MATRIX[shard], range(query.experts)
    rates = {each: bank.rates for each, bank in query.banks.items()}
    sizes = {each: query.sizes(each) for each in query.banks}
    trellis = [0] * query.experts
    for slab in slabs(matrix, rates, sizes):
        for expert, first in slab.places() if slab.shard == shard else ():
            trellis[expert] = 2 * first
    rows = [trellis]
    each, first = (1, 0) if shard == "w2" else (2, int(shard == "w3"))
    for side, length in zip(SIDES, query.sizes(shard), strict=True):
        shared = query.shared_h and side == ("svh" if shard == "w2" else "suh")
        rows.append([2 * length * (first + each * (0 if shared else expert)) for expert in experts])
    return rows


def run(
    plan: ParityMoePlan,
    prepared: Mapping[str, torch.Tensor],
    arena: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Fill y [m, hidden] from x [m, hidden] and the routing [m, top_k].  Waits for the device, to count launches.

    Raises:
        RuntimeError: inside a CUDA graph capture.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("backend exllamav3 cannot be captured into a CUDA graph: use --enforce-eager")
    query, m = plan.query, x.shape[0]
    buffers = views(plan, arena)
    a, total = buffers["x"][:m], buffers["sum"][:m].zero_()
    a[:, : query.hidden].copy_(x)
    a[:, query.hidden :].zero_()
    for part in launches(plan, prepared, topk_weights, topk_ids.long()):
        for index in range(query.slices):
            launch(query, prepared, index, a, total, buffers, part)
    y.copy_(total[:, : query.hidden])


def views(plan: ParityMoePlan, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """The buffers inside the arena."""
    return arena_layout.views(_layout(plan.query, plan.rows, plan.block, plan.groups), arena)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Experts of one tier, with at most a block of rows each."""

    counts: torch.Tensor  # [experts + 1] i64: routes of each expert; the last is not looked at
    rows: torch.Tensor  # [routes] i64, by expert
    weights: torch.Tensor  # [routes] f16
    rates: tuple[float, ...]  # of gate, up and down
    codebook: str


def launches(
    plan: ParityMoePlan, prepared: Mapping[str, torch.Tensor], topk_weights: torch.Tensor, ids: torch.Tensor
) -> Iterator[Launch]:
    """What to launch for a routing [m, top_k]: each tier, and of it every expert's n-th block of rows together."""
    experts, scores = plan.query.experts, topk_weights.flatten()
    known, nobody = ids.clamp(0).flatten(), (ids < 0).flatten()
    for row, ((rates, books), _) in enumerate(plan.tiers):
        keys = prepared["tiers"][row][known].masked_fill(nobody, experts)
        order = keys.argsort(stable=True)
        found = keys[order]
        starts = torch.searchsorted(found, found)  # where the routes of the same expert begin
        blocks = (torch.arange(len(found), device=found.device) - starts) // plan.block
        blocks = blocks.masked_fill(found == experts, -1)
        for block in range(int(blocks.max()) + 1):
            mine = order[blocks == block]
            counts = torch.bincount(keys[mine], minlength=experts + 1)
            rows = mine // plan.query.top_k
            yield Launch(counts=counts, rows=rows, weights=scores[mine].half(), rates=rates, codebook=books[0])


def addresses(prepared: Mapping[str, torch.Tensor], index: int) -> list[torch.Tensor]:
    """Nine tables of [experts] i64: trellis, suh and svh of gate, up and down.  Made anew: sleeping moves the slabs."""
    found = []
    for place, shard in zip(prepared["places"], ("w1", "w3", "w2"), strict=True):
        for offsets, kind in zip(place, ("trellis", *SIDES), strict=True):
            found.append(offsets + prepared[f"slice{index}_{MATRIX[shard]}_{kind}"].data_ptr())
    return found


def launch(
    query: MoeQuery,
    prepared: Mapping[str, torch.Tensor],
    index: int,
    a: torch.Tensor,
    total: torch.Tensor,
    buffers: Mapping[str, torch.Tensor],
    part: Launch,
) -> None:
    """Add one slice of the experts of a launch to total [m, k] f32, from a [m, k] f16."""
    import exllamav3_ext

    temps = [buffers[key] for key in ("gate_in", "up_in", "gate_out", "up_out")]
    tables = addresses(prepared, index)
    flags: list[Any] = [part.codebook == "mcg", part.codebook == "mul1"] * 3
    most = buffers["gate_in"].shape[1]
    no_limit, all_active, no_scratch, counts = 0.0, -1, (None, None), (1, most, 16)  # rows: fewest, most, a tile
    rest = (*flags, no_limit, all_active, *no_scratch, *counts)
    route = (part.counts, part.rows, part.weights)
    exllamav3_ext.exl3_moe(a, total, *route, *temps, SILU, *part.rates, *tables, *rest)


def warm(plan: ParityMoePlan, prepared: Mapping[str, torch.Tensor], arena: torch.Tensor) -> int:
    """One row of one expert of each tier, so that the kernel that serves it is loaded."""
    query, device = plan.query, arena.device
    x = torch.zeros(1, query.hidden, dtype=getattr(torch, query.io_dtype), device=device)
    for _, experts in plan.tiers:
        ids = torch.full((1, query.top_k), -1, dtype=torch.int32, device=device)
        ids[0, 0] = experts[0]
        run(plan, prepared, arena, x, torch.zeros_like(ids, dtype=torch.float32), ids, torch.empty_like(x))
    torch.cuda.synchronize(device)
    return len(plan.tiers)


def check(query: MoeQuery, device: torch.device) -> None:
    """A few random experts of this layer's sizes, against the reference.

    Raises:
        NoBackendError: they disagree.
    """
    compare(cast("MoeBackend", sys.modules[__name__]), query, device, CHECK_LIMIT)
