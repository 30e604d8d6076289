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
from ..plan import Activation, Device, MoeQuery
from ..reference import decode_dense
from ..slabs import MATRICES, MATRIX, slabs
from .torch import DTYPES

name = "torch"
KINDS = ("w13_trellis", "w13_suh", "w13_svh", "w2_trellis", "w2_suh", "w2_svh")


@dataclass(frozen=True, kw_only=True)
class TorchMoePlan:
    """Nothing to decide but when to decode."""

    query: MoeQuery
    decode_once: bool
    workspace_bytes: int = 0


def can_run(query: MoeQuery, device: Device) -> tuple[bool, str]:
    """Whatever has a known activation, in the dtypes vLLM serves."""
    if query.io_dtype not in DTYPES:
        return False, f"activations are {query.io_dtype}, want one of {', '.join(DTYPES)}"
    if query.activation.name not in ACTIVATIONS:
        return False, f"activation {query.activation.name}, want one of {', '.join(ACTIVATIONS)}"
    return True, ""


def plan(query: MoeQuery, device: Device) -> TorchMoePlan:
    """Decode once where memory is the host's."""
    return TorchMoePlan(query=query, decode_once=device.kind == "cpu")


def prepare(plan: TorchMoePlan, weights: tuple[ExpertSlice, ...]) -> dict[str, torch.Tensor]:
    """Decode to dense [experts, out, in] matrices, or keep the slabs as they are."""
    query = plan.query
    if not plan.decode_once:
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
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """y [m, hidden] from x [m, hidden] and the routing [m, top_k]."""
    query, act = plan.query, plan.query.activation
    if plan.decode_once:
        numbers = (act.name, act.limit, act.alpha, act.beta, query.weight_on_input)
        return _run_dense(x, topk_weights, topk_ids, prepared["w13"], prepared["w2"], *numbers)
    weights = tuple(
        ExpertSlice(**{kind: prepared[f"slice{i}_{kind}"] for kind in KINDS}) for i in range(query.slices)
    )
    one = torch.empty(len(query.banks) - 1, query.intermediate, query.hidden, dtype=x.dtype, device=x.device)
    two = torch.empty(query.hidden, query.intermediate, dtype=x.dtype, device=x.device)

    def decoded(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        for matrix in MATRICES:
            for _, shard, index, decode in _modules(query, weights, matrix, expert):
                middle = slice(index * query.width, min((index + 1) * query.width, query.intermediate))
                decode((two[:, middle] if shard == "w2" else one[int(shard == "w3"), middle]).t())
        return one.flatten(0, 1), two

    return _grouped(x, topk_weights, topk_ids, query.experts, decoded, act, query.weight_on_input)


@torch.library.custom_op("vllm_exl3::dense_experts", mutates_args=())
def _run_dense(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    beta: float,
    weight_on_input: bool,
) -> torch.Tensor:
    """Opaque to compilers, because which experts run depends on the data; on a CPU vLLM traces all else around it."""
    act = Activation(name=activation, limit=limit, alpha=alpha, beta=beta)
    return _grouped(x, topk_weights, topk_ids, w2.shape[0], lambda e: (w13[e], w2[e]), act, weight_on_input)


@_run_dense.register_fake
def _(x: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(x)


def _grouped(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: int,
    weights_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
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
