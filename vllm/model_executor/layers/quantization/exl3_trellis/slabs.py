# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a layer's routed experts lie on one rank: offsets in flat parameters, cuts of stored tensors.

A rank holds one or several slices of every expert; each slice has parameters of its own, and w13 and w2 are vLLM's
names for the projections into the middle and out of it (w1 gate, w3 up, w2 down):

    w13_trellis  # for each rate, ascending: [w1 experts of that rate, k/16, n/16, 16*K], then the same for w3
    w2_trellis   # for each rate, ascending: [experts of that rate, k/16, n/16, 16*K]
    w13_suh      # [experts, w1 and w3, hidden]      shared rotations: [w1 and w3, hidden]
    w13_svh      # [experts, w1 and w3, width]
    w2_suh       # [experts, width]
    w2_svh       # [experts, hidden]                 shared rotations: [hidden]

So all experts of one (projection, rate) are one contiguous slab; within a rate the order is shard-major (w1, then w3),
then the expert's offset in its group, experts ascending.  What a kernel reads is what was loaded, at the same address.
Counts of experts a rate are data: no two layers need agree.  Numbers only: no torch, no vLLM.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoint import MARKERS, SUFFIXES
from .experts import HIDDEN_SIDE, ExpertsSpec
from .layout import RankSlice, Span, legal_shards, padded, rank_slices, shard_span, trellis_shape, window
from .safetensors_headers import CheckpointError

MATRICES = {"w13": ("w1", "w3"), "w2": ("w2",)}  # parameter name -> shards it holds
MATRIX = {shard: matrix for matrix, shards in MATRICES.items() for shard in shards}


@dataclass(frozen=True, kw_only=True)
class Slab:
    """The experts of one projection that have one rate, end to end in their parameter."""

    shard: str  # "w1", "w3" or "w2"
    rate: float
    experts: tuple[int, ...]  # ascending
    start: int  # first element in the parameter
    shape: tuple[int, int, int, int]  # [experts, k/16, n/16, 16*K]

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + math.prod(self.shape)

    def places(self) -> Iterator[tuple[int, int]]:
        """(expert, first element of its tiles in the parameter) of each."""
        return zip(self.experts, range(self.start, self.stop, math.prod(self.shape[1:])), strict=True)


def slabs(matrix: str, rates: dict[str, tuple[float, ...]], sizes: dict[str, tuple[int, int]]) -> tuple[Slab, ...]:
    """The slabs of the parameter `w13_trellis` or `w2_trellis`, in order.

    Args:
        matrix: "w13" or "w2".
        rates: shard -> rate of each expert.
        sizes: shard -> (inputs, outputs) of one expert on this rank.
    """
    shards = [shard for shard in MATRICES[matrix] if shard in rates]
    found: list[Slab] = []
    start = 0
    for rate in sorted({rate for shard in shards for rate in rates[shard]}):
        for shard in shards:
            experts = tuple(expert for expert, one in enumerate(rates[shard]) if one == rate)
            if experts:
                shape = (len(experts), *trellis_shape(*sizes[shard], rate))
                found.append(Slab(shard=shard, rate=rate, experts=experts, start=start, shape=shape))
                start = found[-1].stop
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one stored tensor goes."""

    offset: int  # first element in the parameter
    stored: tuple[int, ...]  # shape on disk
    cut: tuple[slice, ...]  # of it, what this rank keeps
    shape: tuple[int, ...]  # of what it keeps


class ExpertParam:
    """One parameter: which tensors of which experts it holds, and where.

    Args:
        suffix: tensor kind, as in SUFFIXES.
        matrix: "w13" or "w2".
        spec: the experts.
        part: the slice of each expert that it belongs to.
        shared: holds what shared rotations store once, which arrives as expert 0's.
    """

    def __init__(self, suffix: str, matrix: str, spec: ExpertsSpec, part: RankSlice, shared: bool = False) -> None:
        self.suffix, self.matrix, self.part, self.shared = suffix, matrix, part, shared
        self.shards = tuple(shard for shard in MATRICES[matrix] if shard in spec.projections)
        self.spec = spec
        infix = (f"{'shared_h_' if shared else ''}rank{part.stored_rank}_") if spec.ranks is not None else ""
        self.name = f"{matrix}_{infix}{suffix}"
        self._offsets: dict[str, list[int]] = {shard: [-1] * spec.count for shard in self.shards}
        self.elements = self._lay_out()

    def _lay_out(self) -> int:
        """Give every tensor its offset; return the elements of all."""
        if self.suffix == "trellis":
            end = 0
            for slab in slabs(self.matrix, self._rates(), {shard: self._kept(shard) for shard in self.shards}):
                for expert, first in slab.places():
                    self._offsets[slab.shard][expert] = first
                end = slab.stop
            return end
        end = 0
        for expert in range(1 if self.shared else self.spec.count):
            for shard in self.shards:
                if self.shared or self.spec.projections[shard].has(expert, self.suffix):
                    self._offsets[shard][expert] = end
                    end += math.prod(self._shape(shard, expert))
        return end

    def _rates(self) -> dict[str, tuple[float, ...]]:
        experts = range(self.spec.count)
        return {shard: tuple(self.spec.projections[shard].rate(expert) for expert in experts) for shard in self.shards}

    def _spans(self, shard: str) -> tuple[Span, Span]:
        """(inputs, outputs) that this rank keeps of a stored module."""
        hidden = (0, self.spec.hidden)
        return (self.part.span, hidden) if shard == "w2" else (hidden, self.part.span)

    def _kept(self, shard: str) -> tuple[int, int]:
        (top, bottom), (left, right) = self._spans(shard)
        return bottom - top, right - left

    def _stored(self, shard: str, expert: int, sizes: tuple[int, int]) -> tuple[int, ...]:
        k, n = sizes
        if self.suffix == "trellis":
            return trellis_shape(k, n, self.spec.projections[shard].rate(expert))
        return {"suh": (k,), "svh": (n,), "su": (k // 16,), "sv": (n // 16,)}.get(self.suffix, ())

    def _shape(self, shard: str, expert: int) -> tuple[int, ...]:
        return self._stored(shard, expert, self._kept(shard)) or (1,)

    def holds(self, shard: str, expert: int) -> bool:
        """Whether this parameter has a place for the tensor."""
        return shard in self._offsets and 0 <= expert < self.spec.count and self._offsets[shard][expert] >= 0

    def place(self, shard: str, expert: int) -> Place:
        """Where the tensor of one expert goes."""
        cut = window(self.suffix, *self._spans(shard)) if self.suffix not in MARKERS else ()
        stored = self._stored(shard, expert, self.spec.sizes(shard))
        return Place(offset=self._offsets[shard][expert], stored=stored, cut=cut, shape=self._shape(shard, expert))

    def places(self) -> Iterator[tuple[str, int]]:
        """Every (shard, expert) that it holds, in the order of `_lay_out` for vectors."""
        for expert in range(self.spec.count):
            for shard in self.shards:
                if self._offsets[shard][expert] >= 0:
                    yield shard, expert

    def tensor(self, shard: str, expert: int, prefix: str) -> str:
        """Name of the tensor in the checkpoint, for messages."""
        who = "shared_h" if self.shared else str(expert)
        rank = f".rank{self.part.stored_rank}" if self.spec.ranks is not None else ""
        return f"{prefix}.{who}.{self.spec.projections[shard].name}{rank}.{self.suffix}"


def expert_params(spec: ExpertsSpec, parts: tuple[RankSlice, ...]) -> list[ExpertParam]:
    """The parameters that hold a rank's slices of a layer's experts."""
    params = []
    for part in parts:
        for matrix, shards in MATRICES.items():
            held = [spec.projections[shard] for shard in shards if shard in spec.projections]
            stored = functools.reduce(operator.or_, itertools.chain(*(projection.stored for projection in held)))
            kinds = [suffix for bit, suffix in enumerate(SUFFIXES) if stored >> bit & 1]
            params += [ExpertParam(suffix, matrix, spec, part) for suffix in kinds]
            if spec.shared_h:
                params.append(ExpertParam(HIDDEN_SIDE[shards[0]], matrix, spec, part, shared=True))
    return params


def local_parts(spec: ExpertsSpec, intermediate: int, tp: int, rank: int, prefix: str) -> tuple[RankSlice, ...]:
    """The slices that one rank runs, each with the channels of it that are this rank's.

    Args:
        spec: the experts.
        intermediate: the model's true intermediate size, all ranks together.
        tp: ranks that share the experts.
        rank: this one.
        prefix: the experts' name, for messages.

    Raises:
        CheckpointError: the sizes do not fit, or `tp` cannot be served; the message names the values that can.
    """
    stored = spec.ranks or 1
    if padded(intermediate) != stored * spec.width:
        held = f"{stored} x {spec.width}" if spec.ranks else str(spec.width)
        raise CheckpointError([f"{prefix}: intermediate size {held} stored, want {intermediate} as the model says"])
    if tp not in legal_tp(spec, intermediate):
        raise CheckpointError([tp_refusal(spec, intermediate, tp, prefix)])
    if spec.ranks is None:
        return (RankSlice(stored_rank=0, span=shard_span(intermediate, tp, rank)),)
    return rank_slices(stored, spec.width, tp, rank)


def legal_tp(spec: ExpertsSpec, intermediate: int) -> tuple[int, ...]:
    """Tensor parallel sizes that the stored slices can serve."""
    if spec.ranks is None:
        return legal_shards(1, intermediate)
    return legal_shards(spec.ranks, spec.width)


def tp_refusal(spec: ExpertsSpec, intermediate: int, tp: int, prefix: str) -> str:
    """Why `tp` ranks cannot share the experts, and which numbers can."""
    legal = ", ".join(map(str, legal_tp(spec, intermediate)))
    if spec.ranks is None:
        held = f"intermediate size {intermediate}, cut between Hadamard blocks of 128"
    else:
        held = f"{spec.ranks} stored ranks of {spec.width} channels"
    return f"{prefix}: tensor parallel size {tp} for experts with {held}: want one of {legal}"
