# SPDX-License-Identifier: Apache-2.0
"""From the stream of stored tensors into the slabs of a layer's routed experts: allocate, check, cut, copy, account.

Every tensor is copied once, on receipt, to where a kernel will read it; nothing of a single expert is kept.  Slabs are
handed out whole or not at all.  No vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.nn import Module, Parameter

from .checkpoint import MARKERS
from .codebook import CODEBOOKS
from .experts import ExpertsSpec
from .intake import DTYPES
from .layout import RankSlice
from .reference import unpack_signs
from .safetensors_headers import CheckpointError
from .slabs import ExpertParam, expert_params


@dataclass(kw_only=True)
class ExpertSlice:
    """One slice of every expert of a layer; the order inside is that of `slabs`.

    Whoever prepares a layer holds the only references to its slabs, and lets go of what it has converted.
    """

    w13_trellis: torch.Tensor  # flat i16
    w2_trellis: torch.Tensor  # flat i16
    w13_suh: torch.Tensor  # [experts, 2, k] f16, [experts, 1, k] without a gate; shared rotations: no first axis
    w13_svh: torch.Tensor  # [experts, 2, width] f16, or 1 for 2
    w2_suh: torch.Tensor  # [experts, width] f16
    w2_svh: torch.Tensor  # [experts, k] f16; shared rotations: [k]

    def release(self, matrix: str) -> None:
        """Drop the tensors of "w13" or "w2"."""
        for kind in ("trellis", "suh", "svh"):
            delattr(self, f"{matrix}_{kind}")


@dataclass(kw_only=True)
class Tally:
    """Which tensors of a layer have arrived."""

    filled: dict[str, set[int]] = field(default_factory=dict)  # parameter -> 3 * expert + index of the shard

    def note(self, param: ExpertParam, shard: str, expert: int) -> None:
        """The tensor is in its place."""
        self.filled.setdefault(param.name, set()).add(3 * expert + param.shards.index(shard))

    def missing(self, param: ExpertParam) -> list[tuple[str, int]]:
        """(shard, expert) of each tensor that never came."""
        here = self.filled.get(param.name, set())
        return [(s, e) for s, e in param.places() if 3 * e + param.shards.index(s) not in here]


def create_expert_params(layer: Module, spec: ExpertsSpec, parts: tuple[RankSlice, ...], prefix: str) -> None:
    """Register the parameters of `slabs`, empty, each with the loader that fills it.

    Args:
        layer: gets the parameters.
        spec: the experts.
        parts: what this rank keeps of them.
        prefix: their name in the checkpoint.
    """
    tally = Tally()
    for held in expert_params(spec, parts):
        param = Parameter(torch.empty(held.elements, dtype=DTYPES[held.suffix]), requires_grad=False)
        param.exl3_expert_param = held
        param.exl3_prefix = prefix
        param.exl3_tally = tally  # shared by all parameters of the layer
        param.weight_loader = load_expert
        layer.register_parameter(held.name, param)


def load_expert(
    param: Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str = "",
    shard_id: str = "",
    expert_id: int = 0,
    return_success: bool = False,
) -> bool | None:
    """Copy one stored tensor to its place: the weight loader of every expert parameter, for both of vLLM's styles.

    Args:
        param: a parameter of `create_expert_params`; on the meta device nothing is noted as arrived.
        loaded_weight: the whole stored tensor.
        weight_name: what the model's loader calls it, for messages.
        shard_id: "w1" (gate), "w3" (up) or "w2" (down).
        expert_id: 0 for what shared rotations store once.
        return_success: whether to say that it was loaded.

    Raises:
        CheckpointError: dtype, shape or value is not what the headers promised, or there is no place for it.
    """
    held: ExpertParam = param.exl3_expert_param
    if not held.holds(shard_id, expert_id):
        where = f"expert {expert_id}, shard {shard_id or 'unnamed'}"
        raise CheckpointError([f"{weight_name or held.name}: {where}: not among the tensors of {param.exl3_prefix}"])
    place = held.place(shard_id, expert_id)
    _check(held, shard_id, expert_id, param.exl3_prefix, place.stored, loaded_weight)
    kept = loaded_weight[place.cut] if place.cut else loaded_weight.reshape(place.shape)
    param.data[place.offset : place.offset + math.prod(place.shape)].view(place.shape).copy_(kept)
    if not param.is_meta:
        param.exl3_tally.note(held, shard_id, expert_id)
    return True if return_success else None


def _check(
    held: ExpertParam, shard: str, expert: int, prefix: str, stored: tuple[int, ...], loaded: torch.Tensor
) -> None:
    name = f"{held.tensor(shard, expert, prefix)}: expert {expert}, shard {shard}"
    dtype = DTYPES[held.suffix]
    if loaded.dtype != dtype:
        raise CheckpointError([f"{name}: dtype {loaded.dtype}, want {dtype}"])
    if tuple(loaded.shape) != stored and (stored or loaded.numel() != 1):
        raise CheckpointError([f"{name}: shape {list(loaded.shape)}, want {list(stored)}"])
    if held.suffix in MARKERS and not loaded.is_meta and int(loaded) != CODEBOOKS[held.suffix].marker_int32:
        value, want = int(loaded) & 0xFFFFFFFF, CODEBOOKS[held.suffix].marker
        raise CheckpointError([f"{name}: value 0x{value:08X}, want 0x{want:08X}"])


def held_params(layer: Module) -> list[tuple[ExpertParam, Parameter]]:
    """The parameters of `create_expert_params` that the layer still has."""
    return [(p.exl3_expert_param, p) for p in layer.parameters(recurse=False) if hasattr(p, "exl3_expert_param")]


def require_all_experts(layer: Module) -> None:
    """Raise CheckpointError unless every tensor has arrived; then forget, ready for a reload."""
    missing = []
    tally = None
    for held, param in held_params(layer):
        tally = param.exl3_tally
        for shard, expert in tally.missing(held):
            name = held.tensor(shard, expert, param.exl3_prefix)
            missing.append(f"{name}: expert {expert}, shard {shard}: never loaded")
    if missing:
        raise CheckpointError(missing)
    if tally is not None:
        tally.filled.clear()


def make_up_experts(layer: Module, spec: ExpertsSpec) -> None:
    """Fill every slab with random weights: any bit pattern is a valid trellis."""
    for held, param in held_params(layer):
        if held.suffix in ("trellis", "su", "sv"):
            param.data.random_(-(2**15), 2**15)
        elif held.suffix in ("suh", "svh"):
            inputs = spec.hidden if held.matrix == "w13" else spec.width * (spec.ranks or 1)
            param.data.fill_(inputs**-0.25)  # both sides together keep the scale of the activations


def take_slices(layer: Module, spec: ExpertsSpec, parts: tuple[RankSlice, ...]) -> tuple[ExpertSlice, ...]:
    """The layer's slabs, as they were loaded: its own storage wherever all signs are stored as vectors.

    The layer loses the parameters, so that a slab is freed once its last user lets go; a reload restores them.
    """
    params = held_params(layer)
    for held, _ in params:
        delattr(layer, held.name)
    found = []
    for part in parts:
        mine = [(held, param) for held, param in params if held.part == part]
        width = part.span[1] - part.span[0]
        found.append(
            ExpertSlice(
                w13_trellis=_find(mine, "w13", "trellis"),
                w2_trellis=_find(mine, "w2", "trellis"),
                w13_suh=_vectors(mine, spec, "w13", "suh", spec.hidden),
                w13_svh=_vectors(mine, spec, "w13", "svh", width),
                w2_suh=_vectors(mine, spec, "w2", "suh", width),
                w2_svh=_vectors(mine, spec, "w2", "svh", spec.hidden),
            )
        )
    return tuple(found)


Held = list[tuple[ExpertParam, Parameter]]


def _find(mine: Held, matrix: str, suffix: str) -> torch.Tensor:
    return next(param.data for held, param in mine if (held.matrix, held.suffix) == (matrix, suffix))


def _vectors(mine: Held, spec: ExpertsSpec, matrix: str, suffix: str, length: int) -> torch.Tensor:
    """All vectors of one kind, in expert order."""
    rows = [(held, param) for held, param in mine if held.matrix == matrix and held.suffix in (suffix, suffix[:2])]
    held, param = rows[0]
    shards = len(held.shards)
    shape = (shards, length) if matrix == "w13" else (length,)
    if held.shared:
        return param.data.view(shape)
    shape = (spec.count, *shape)
    if len(rows) == 1 and held.suffix == suffix:
        return param.data.view(shape)
    vectors = torch.empty(spec.count, shards, length, dtype=torch.float16, device=param.device)
    for held, param in rows:
        for shard, expert in held.places():
            place = held.place(shard, expert)
            stored = param.data[place.offset : place.offset + math.prod(place.shape)]
            vectors[expert, held.shards.index(shard)] = unpack_signs(stored) if held.suffix != suffix else stored
    return vectors.view(shape)
