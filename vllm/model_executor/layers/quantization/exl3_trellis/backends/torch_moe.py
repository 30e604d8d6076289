# SPDX-License-Identifier: Apache-2.0
"""Provider `torch` of routed experts: the reference mathematics on any device.

On a CPU every expert is decoded once, at load.  Elsewhere the experts that a call needs are decoded in that call, which
is slow and needs no memory but one expert's: for a card that no kernel supports, and for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..expert_intake import ExpertSlice
from ..plan import Activation, Device, MoeQuery, Window
from ..reference import decode_dense
from ..slabs import MATRICES, MATRIX, slabs
from .torch import DTYPES

name = "torch"
capturable = False
KINDS = ("w13_trellis", "w13_suh", "w13_svh", "w2_trellis", "w2_suh", "w2_svh")


@dataclass(frozen=True, kw_only=True)
class TorchMoePlan:
    """Nothing to decide, for any number of rows."""

    query: MoeQuery
    workspace_bytes: int = 0


def can_run(query: MoeQuery, device: Device) -> tuple[bool, str]:
    """Whatever has a known activation, in the dtypes vLLM serves."""
    if query.io_dtype not in DTYPES:
        return False, f"activations are {query.io_dtype}, want one of {', '.join(DTYPES)}"
    if query.activation.name not in ACTIVATIONS:
        return False, f"activation {query.activation.name}, want one of {', '.join(ACTIVATIONS)}"
    return True, ""


def plan(query: MoeQuery, device: Device, window: Window) -> TorchMoePlan:
    """The same for all rows."""
    return TorchMoePlan(query=query)


def prepare(
    query: MoeQuery, weights: tuple[ExpertSlice, ...], decode_once: bool | None = None
) -> dict[str, torch.Tensor]:
    """Decode to dense [experts, out, in] matrices, or keep the slabs as they are.

    Args:
        query: the layer.
        weights: its slabs; those that are decoded are let go.
        decode_once: None: where memory is the host's.
    """
    if decode_once is None:
        decode_once = weights[0].w2_trellis.device.type == "cpu"
    if not decode_once:
        return {f"slice{i}_{kind}": getattr(part, kind) for i, part in enumerate(weights) for kind in KINDS}
    into, middle = len(query.banks) - 1, query.intermediate
    empty = {"dtype": DTYPES[query.io_dtype], "device": weights[0].w2_trellis.device}
    w13 = torch.empty(query.experts, into * middle, query.hidden, **empty)
    w2 = torch.empty(query.experts, query.hidden, middle, **empty)
    for matrix in MATRICES:
        for expert, shard, index, decode in _modules(query, weights, matrix):
            first = index * query.width
            stop = min(first + query.width, middle)
            if shard == "w2":
                decode(w2[expert, :, first:stop].t())
            else:
                row = middle if shard == "w3" else 0
                decode(w13[expert, row + first : row + stop].t())
        for part in weights:
            part.release(matrix)
    return {"w13": w13, "w2": w2}


def run(
    plan: TorchMoePlan,
    prepared: Mapping[str, torch.Tensor],
    arena: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Fill y [m, hidden] from x [m, hidden] and the routing [m, top_k]; needs no arena."""
    query = plan.query
    weights_of = _dense(prepared) if "w13" in prepared else _decoding(query, prepared, x.dtype)
    y.copy_(_grouped(x, topk_weights, topk_ids, query.experts, weights_of, query.activation, query.weight_on_input))


def warm(plan: TorchMoePlan, prepared: Mapping[str, torch.Tensor], arena: torch.Tensor) -> int:
    """Nothing is compiled."""
    return 0


def check(query: MoeQuery, device: torch.device) -> None:
    """It is the reference."""


WeightsOf = Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # expert -> [gate and up, hidden], [hidden, middle]


def _dense(prepared: Mapping[str, torch.Tensor]) -> WeightsOf:
    w13, w2 = prepared["w13"], prepared["w2"]
    return lambda expert: (w13[expert], w2[expert])


def _decoding(query: MoeQuery, prepared: Mapping[str, torch.Tensor], dtype: torch.dtype) -> WeightsOf:
    """Decodes an expert when it is asked for, over the one before."""
    weights = tuple(ExpertSlice(**{kind: prepared[f"slice{i}_{kind}"] for kind in KINDS}) for i in range(query.slices))
    empty = {"dtype": dtype, "device": weights[0].w2_trellis.device}
    one = torch.empty(len(query.banks) - 1, query.intermediate, query.hidden, **empty)
    two = torch.empty(query.hidden, query.intermediate, **empty)

    def decoded(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        for matrix in MATRICES:
            for _, shard, index, decode in _modules(query, weights, matrix, expert):
                middle = slice(index * query.width, min((index + 1) * query.width, query.intermediate))
                decode((two[:, middle] if shard == "w2" else one[int(shard == "w3"), middle]).t())
        return one.flatten(0, 1), two

    return decoded


def _grouped(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    weights_of: WeightsOf,
    activation: Activation,
    weight_on_input: bool,
) -> torch.Tensor:
    """Run each expert once, on the rows that chose it; sums are float32, in the order of the experts."""
    ids = topk_ids.flatten().long()
    order = ids.argsort(stable=True)
    order = order[ids[order] >= 0]
    counts = torch.bincount(ids[order], minlength=experts).tolist()
    scale = topk_weights.flatten().float()
    y = torch.zeros_like(x, dtype=torch.float32)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        chosen = order[start : start + count]
        start += count
        rows = chosen // topk_ids.shape[1]
        weight = scale[chosen, None]
        w13, w2 = weights_of(expert)
        chosen_x = (x[rows] * weight).to(x.dtype) if weight_on_input else x[rows]
        middle = ACTIVATIONS[activation.name](F.linear(chosen_x, w13), activation)
        part = F.linear(middle.to(x.dtype), w2).float()
        y.index_add_(0, rows, part if weight_on_input else part * weight)
    return y.to(x.dtype)


Decode = Callable[[torch.Tensor], object]


def _modules(
    query: MoeQuery, weights: tuple[ExpertSlice, ...], matrix: str, only: int | None = None
) -> Iterator[tuple[int, str, int, Decode]]:
    """(expert, shard, slice, decode) of every module; `decode(out)` fills [in, out] and cuts what is beyond it."""
    sizes = {shard: query.sizes(shard) for shard in query.banks}
    rates = {shard: bank.rates for shard, bank in query.banks.items()}
    for index, part in enumerate(weights):
        trellis = getattr(part, f"{matrix}_trellis")
        for slab in slabs(matrix, rates, sizes):
            tiles = trellis[slab.start : slab.stop].view(slab.shape)
            for offset, expert in enumerate(slab.experts):
                if only in (None, expert):
                    yield expert, slab.shard, index, _decoder(query, part, slab.shard, expert, tiles[offset])


def _decoder(query: MoeQuery, part: ExpertSlice, shard: str, expert: int, trellis: torch.Tensor) -> Decode:
    vectors = []
    for side in ("suh", "svh"):
        vector = getattr(part, f"{MATRIX[shard]}_{side}")
        shared = query.shared_h and side == ("svh" if shard == "w2" else "suh")
        vector = vector if shared else vector[expert]
        vectors.append(vector if shard == "w2" else vector[1 if shard == "w3" else 0])
    suh, svh = vectors
    book = query.banks[shard].codebooks[expert]
    return lambda out: decode_dense(trellis, suh, svh, book, out=out)


def _halves(x: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, float32, clamped where the activation has a limit."""
    gate, up = x.float().chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate, up


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, Activation], torch.Tensor]:
    def apply(x: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return function(gate) * up

    return apply


def _swiglu(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta), both clamped first."""
    gate, up = _halves(x, activation)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def _swiglu_step(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Clamps after the SiLU, not before."""
    gate, up = x.float().chunk(2, dim=-1)
    limit = activation.limit
    return F.silu(gate).clamp(max=limit) * (up if limit is None else up.clamp(-limit, limit))


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


# vLLM's name -> function of [gate, up] side by side; without a gate, of the one projection.
ACTIVATIONS: dict[str, Callable[[torch.Tensor, Activation], torch.Tensor]] = {
    "silu": _swiglu,
    "swigluoai": _swiglu,
    "swigluoai_uninterleave": _swiglu,
    "swiglustep": _swiglu_step,
    "gelu": _gated(F.gelu),
    "gelu_tanh": _gated(_tanh_gelu),
    "relu2": _gated(_squared_relu),
    "silu_no_mul": lambda x, _: F.silu(x.float()),
    "gelu_no_mul": lambda x, _: F.gelu(x.float()),
    "gelu_tanh_no_mul": lambda x, _: _tanh_gelu(x.float()),
    "relu2_no_mul": lambda x, _: _squared_relu(x.float()),
}
