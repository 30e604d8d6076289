# SPDX-License-Identifier: Apache-2.0
"""From config and tensor headers to specs: what each EXL3 module of a checkpoint is, and every refusal metadata allows.

    stored names, dtypes, shapes  ->  {module name: LinearSpec}

Names are those of the checkpoint.  The tensors are the truth: no rate or codebook is taken from a config.
Knows nothing of tensor parallelism or of the model's classes.  No torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .codebook import CODEBOOKS, rate_of_tile_words
from .layout import BLOCK, TILE, trellis_shape
from .safetensors_headers import CheckpointError, TensorInfo, read_folder, read_int32

MARKERS = tuple(book.name for book in CODEBOOKS.values() if book.marker is not None)
SUFFIXES = ("trellis", "suh", "svh", "su", "sv", *MARKERS)
DTYPES = {"trellis": "I16", "suh": "F16", "svh": "F16", "su": "I16", "sv": "I16"} | dict.fromkeys(MARKERS, "I32")


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """One EXL3 linear as it is stored."""

    k: int  # inputs, a multiple of 128
    n: int  # outputs, a multiple of 128
    rate: float  # bits per weight
    codebook: str  # "3inst", "mcg" or "mul1"
    suffixes: tuple[str, ...]  # the tensors stored beside the trellis, in the order of SUFFIXES

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Shape of the tensor `suffix`, as stored."""
        return {
            "trellis": trellis_shape(self.k, self.n, self.rate),
            "suh": (self.k,),
            "svh": (self.n,),
            "su": (self.k // TILE,),
            "sv": (self.n // TILE,),
        }.get(suffix, ())


def read_linears(tensors: Mapping[str, TensorInfo]) -> dict[str, LinearSpec]:
    """The EXL3 linears among `tensors`, by module name.

    Raises:
        CheckpointError: with every fault found, tensor by tensor.
    """
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in SUFFIXES:
            modules[module][suffix] = info
    linears: dict[str, LinearSpec] = {}
    problems: list[str] = []
    for module, stored in modules.items():
        spec, found = read_linear(module, stored)
        problems += found
        if spec is not None:
            linears[module] = spec
    if problems:
        raise CheckpointError(problems)
    return linears


def read_linear(module: str, stored: Mapping[str, TensorInfo]) -> tuple[LinearSpec | None, list[str]]:
    """Spec and faults of one module from its tensors by suffix; no spec where the trellis itself is at fault."""
    problems = [
        f"{module}.{suffix}: dtype {info.dtype}, want {DTYPES[suffix]}"
        for suffix, info in stored.items()
        if info.dtype != DTYPES[suffix]
    ]
    trellis = stored.get("trellis")
    if trellis is None:
        return None, [*problems, f"{module}: has {', '.join(stored)} but no trellis"]
    if len(trellis.shape) == 2:
        why = "a rank 2 trellis belongs to the embedding codec, which is not supported"
        return None, [*problems, f"{module}.trellis: shape {list(trellis.shape)}; {why}"]
    if len(trellis.shape) != 3 or 0 in trellis.shape:
        return None, [*problems, f"{module}.trellis: shape {list(trellis.shape)}, want [k/16, n/16, 16*K]"]
    k, n = (extent * TILE for extent in trellis.shape[:2])
    problems += [
        f"{module}.trellis: {extent} {side}, want a multiple of {BLOCK}"
        for extent, side in ((k, "inputs"), (n, "outputs"))
        if extent % BLOCK
    ]
    codebook, found = _read_codebook(module, stored)
    problems += found
    try:
        rate = CODEBOOKS[codebook].check_rate(rate_of_tile_words(trellis.shape[2]))
    except ValueError as error:
        return None, [*problems, f"{module}.trellis: {error}"]
    spec = LinearSpec(k=k, n=n, rate=rate, codebook=codebook, suffixes=tuple(s for s in SUFFIXES if s in stored))
    return spec, problems + _check_vectors(module, stored, spec)


def _read_codebook(module: str, stored: Mapping[str, TensorInfo]) -> tuple[str, list[str]]:
    """Name of the codebook that the markers pick, and what is wrong with them."""
    present = [marker for marker in MARKERS if marker in stored]
    problems = []
    if len(present) > 1:
        problems.append(f"{module}: has both {' and '.join(present)}, want one codebook marker or none")
    for marker in present:
        info = stored[marker]
        if info.shape not in ((), (1,)):
            problems.append(f"{module}.{marker}: shape {list(info.shape)}, want a scalar")
        elif info.dtype == DTYPES[marker]:
            value, wanted = read_int32(info), CODEBOOKS[marker].marker
            if value is not None and value != wanted:
                problems.append(f"{module}.{marker}: value 0x{value:08X}, want 0x{wanted:08X}")
    return (present[0] if present else "3inst"), problems


def _check_vectors(module: str, stored: Mapping[str, TensorInfo], spec: LinearSpec) -> list[str]:
    """Faults of the sign and scale vectors: one of each side, of the right length."""
    problems = []
    for new, legacy in (("suh", "su"), ("svh", "sv")):
        present = [suffix for suffix in (new, legacy) if suffix in stored]
        if not present:
            problems.append(f"{module}.{new}: missing, and no {legacy} either")
        elif len(present) == 2:
            problems.append(f"{module}: has both {new} and {legacy}, want one")
        problems += [
            f"{module}.{suffix}: shape {list(stored[suffix].shape)}, want {list(spec.shape(suffix))}"
            for suffix in present
            if stored[suffix].shape != spec.shape(suffix)
        ]
    return problems


def read_checkpoint(folder: Path) -> dict[str, LinearSpec]:
    """The EXL3 linears of the checkpoint in `folder`, from headers alone.

    Raises:
        CheckpointError: a file or tensor is at fault, or there is no EXL3 tensor at all.
    """
    return require_linears(read_linears(read_folder(folder)), str(folder))


def require_linears(linears: dict[str, LinearSpec], where: str) -> dict[str, LinearSpec]:
    """`linears`, unless there are none."""
    if not linears:
        raise CheckpointError([f"{where}: the config says exl3, but no tensor named *.trellis is there"])
    return linears


def storage_disagreements(folder: Path, linears: Mapping[str, LinearSpec]) -> list[str]:
    """Where quantization_config.json says something else of a module than its tensors do.  The tensors win.

    A file that is missing, or has no `tensor_storage`, says nothing.
    """
    path = folder / "quantization_config.json"
    try:
        storage = json.loads(path.read_text())["tensor_storage"]
        stored = {module: entry.get("stored_tensors", {}) for module, entry in storage.items()}
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return [f"{path.name}: unreadable tensor_storage ({error!r})"]
    found = []
    for module, spec in linears.items():
        if module not in stored:
            found.append(f"{module}: not listed")
            continue
        shape = stored[module].get(f"{module}.trellis", {}).get("shape")
        if shape is None or tuple(shape) != spec.shape("trellis"):
            found.append(f"{module}.trellis: says {shape}, stored {list(spec.shape('trellis'))}")
    return found


def find_module(linears: Mapping[str, LinearSpec] | Mapping[str, str], name: str) -> str | None:
    """The key of `linears` that the model's module `name` loads from: itself, or the name that checkpoints give it.

    A multimodal wrapper asks for `language_model.lm_head` where the checkpoint stores `lm_head`.  An MTP layer asks for
    `model.layers.N.head` where it stores `model.layers.N.shared_head.head`, and may put its block into a `mtp_block`.
    """
    parent, _, last = name.rpartition(".")
    aliases = [name, name.replace(".mtp_block.", ".")]
    aliases += {"lm_head": ["lm_head"], "head": [f"{parent}.shared_head.head"]}.get(last, [])
    return next((key for key in aliases if key in linears), None)
