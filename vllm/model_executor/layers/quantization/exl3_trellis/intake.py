# SPDX-License-Identifier: Apache-2.0
"""From the stream of stored tensors into a layer's parameters: allocate, check, slice, copy, and know what is missing.

Every parameter is flat and holds the pieces of a layer end to end, so that what a kernel gets later is what was
loaded, at the same address.  No vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import Module, Parameter

from .checkpoint import MARKERS
from .codebook import CODEBOOKS
from .layout import window
from .placement import Piece, Source
from .reference import unpack_signs
from .safetensors_headers import CheckpointError

PLAIN = "weight"  # the parameter of an unquantized sibling
DTYPES = {"trellis": torch.int16, "suh": torch.float16, "svh": torch.float16, "su": torch.int16, "sv": torch.int16}
DTYPES |= dict.fromkeys(MARKERS, torch.int32)
SHARD_IDS = {"q": 0, "k": 1, "v": 2, "index_q": 3, "index_k": 4}  # outputs that vLLM names instead of counting


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one stored tensor of one piece lies in a parameter."""

    piece: Piece
    suffix: str
    stored: tuple[int, ...]  # shape on disk
    cut: tuple[slice, ...]  # of it, what this rank keeps
    shape: tuple[int, ...]  # of what it keeps
    offset: int  # first element in the parameter

    @property
    def tensor(self) -> str:
        """Name in the checkpoint, for messages."""
        return f"{self.piece.source.module}.{self.suffix}"

    def view(self, param: torch.Tensor) -> torch.Tensor:
        """This slot's elements of its parameter, in shape."""
        return param.data[self.offset : self.offset + math.prod(self.shape)].view(self.shape)


def param_name(source: Source, suffix: str) -> str:
    """Name of the parameter that holds `suffix`; slices of a wide module have their own."""
    return suffix if source.part is None else f"slice{source.part}_{suffix}"


def _suffixes(source: Source) -> tuple[str, ...]:
    return source.spec.suffixes if source.spec else (PLAIN,)


def create_params(layer: Module, sources: Iterable[Source], pieces: Iterable[Piece], plain_dtype: torch.dtype) -> None:
    """Register one flat parameter per stored tensor kind, each with the slots and the loader that fill it.

    A source that this rank keeps nothing of has empty parameters: its tensors are in the stream all the same.
    """
    names = ((param_name(source, suffix), suffix) for source in sources for suffix in _suffixes(source))
    slots: dict[tuple[str, str], list[Slot]] = {name: [] for name in names}
    for piece in pieces:
        for suffix in _suffixes(piece.source):
            row = slots[param_name(piece.source, suffix), suffix]
            offset = row[-1].offset + math.prod(row[-1].shape) if row else 0
            row.append(_slot(piece, suffix, offset))
    filled: set[tuple[str, int]] = set()
    for (name, suffix), row in slots.items():
        elements = row[-1].offset + math.prod(row[-1].shape) if row else 0
        param = Parameter(torch.empty(elements, dtype=DTYPES.get(suffix, plain_dtype)), requires_grad=False)
        param.exl3_slots = tuple(row)
        param.exl3_filled = filled  # shared by all parameters of the layer
        param.weight_loader = load_tensor
        layer.register_parameter(name, param)


def _slot(piece: Piece, suffix: str, offset: int) -> Slot:
    spec = piece.source.spec
    if spec is None:
        cut: tuple[slice, ...] = (slice(*piece.columns), slice(*piece.rows))
        return Slot(piece=piece, suffix=suffix, stored=(), cut=cut, shape=(piece.width, piece.x_width), offset=offset)
    stored = spec.shape(suffix)
    cut = window(suffix, piece.rows, piece.columns) if stored else ()
    shape = tuple(len(range(*part.indices(extent))) for part, extent in zip(cut, stored, strict=False))
    shape += stored[len(cut) :]
    return Slot(piece=piece, suffix=suffix, stored=stored, cut=cut, shape=shape or (1,), offset=offset)


def load_tensor(
    param: Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str | int | tuple[int, ...] | None = None
) -> None:
    """Copy one stored tensor into the slots it feeds: vLLM's weight loader for every EXL3 parameter.

    Args:
        param: a parameter of `create_params`; on the meta device nothing is marked as filled.
        loaded_weight: the whole stored tensor.
        loaded_shard_id: which outputs of the layer it feeds, None for all.

    Raises:
        CheckpointError: dtype, shape or value is not what the headers promised.
    """
    outputs = output_indices(loaded_shard_id)
    slots = [slot for slot in param.exl3_slots if outputs is None or slot.piece.output in outputs]
    for slot in slots:
        _check(slot, loaded_weight)
        kept = loaded_weight[slot.cut] if slot.cut else loaded_weight.reshape(slot.shape)
        slot.view(param).copy_(kept)
        if not param.is_meta:
            param.exl3_filled.add((slot.tensor, slot.piece.output))


def output_indices(shard_id: str | int | tuple[int, ...] | None) -> set[int] | None:
    """The outputs of a layer that vLLM's shard id means; None is all of them."""
    if shard_id is None:
        return None
    ids = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    return {SHARD_IDS[i] if isinstance(i, str) else i for i in ids}


def _check(slot: Slot, loaded: torch.Tensor) -> None:
    if slot.suffix == PLAIN:
        rows, columns = slot.piece.rows[1], slot.piece.columns[1]
        if loaded.dim() != 2 or loaded.shape[0] < columns or loaded.shape[1] < rows:
            want = f"at least [{columns}, {rows}]"
            raise CheckpointError([f"{slot.tensor}: shape {list(loaded.shape)}, want {want}"])
        return
    if loaded.dtype != DTYPES[slot.suffix]:
        raise CheckpointError([f"{slot.tensor}: dtype {loaded.dtype}, want {DTYPES[slot.suffix]}"])
    if tuple(loaded.shape) != slot.stored and loaded.numel() != 1:
        raise CheckpointError([f"{slot.tensor}: shape {list(loaded.shape)}, want {list(slot.stored)}"])
    if slot.suffix in MARKERS and not loaded.is_meta and int(loaded) != CODEBOOKS[slot.suffix].marker_int32:
        found = int(loaded) & 0xFFFFFFFF
        raise CheckpointError([f"{slot.tensor}: value 0x{found:08X}, want 0x{CODEBOOKS[slot.suffix].marker:08X}"])


def require_complete(layer: Module) -> None:
    """Raise CheckpointError unless every slot of the layer has been filled; then forget, ready for a reload."""
    slots = [slot for param in layer.parameters() for slot in getattr(param, "exl3_slots", ())]
    filled: set[tuple[str, int]] = next(p.exl3_filled for p in layer.parameters() if hasattr(p, "exl3_filled"))
    missing = {(slot.tensor, slot.piece.output) for slot in slots} - filled
    if missing:
        raise CheckpointError([f"{name}: never loaded" for name in sorted({name for name, _ in missing})])
    filled.clear()


def make_up(layer: Module) -> None:
    """Fill every slot with random weights: any bit pattern is a valid trellis."""
    for param in layer.parameters():
        for slot in getattr(param, "exl3_slots", ()):
            view = slot.view(param)
            if slot.suffix in ("trellis", "su", "sv"):
                view.random_(-(2**15), 2**15)
            elif slot.suffix in ("suh", "svh"):
                view.fill_(slot.piece.source.stored.k**-0.25)  # both together keep the scale of the activations


def gather(layer: Module, pieces: Iterable[Piece], suffix: str) -> torch.Tensor:
    """The tensors `suffix` of some pieces, flat and end to end: the parameter itself where it holds just these.

    Args:
        layer: holds the parameters.
        pieces: which, in which order.
        suffix: "trellis", "suh" or "svh"; legacy signs are unpacked.
    """
    found = [_find(layer, piece, suffix) for piece in pieces]
    slots = tuple(slot for slot, _ in found)
    param = found[0][1]
    if slots == param.exl3_slots and slots[0].suffix == suffix:
        return param.data
    views = [slot.view(p) if slot.suffix == suffix else unpack_signs(slot.view(p)) for slot, p in found]
    return torch.cat([view.reshape(-1) for view in views])


def _find(layer: Module, piece: Piece, suffix: str) -> tuple[Slot, Parameter]:
    for kind in (suffix, suffix[:2]):  # suh or the legacy su
        param = getattr(layer, param_name(piece.source, kind), None)
        for slot in getattr(param, "exl3_slots", ()):
            if slot.piece == piece:
                return slot, param
    raise KeyError(f"{piece.source.module}.{suffix}")
