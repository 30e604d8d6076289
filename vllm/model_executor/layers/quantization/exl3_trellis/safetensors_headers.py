# SPDX-License-Identifier: Apache-2.0
"""What the safetensors files of a checkpoint say about themselves, without reading a weight.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
Knows files and tensors; knows nothing of EXL3.  No torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2}
DTYPE_BYTES |= {"BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}


class CheckpointError(ValueError):
    """A checkpoint cannot be served as it is; the message names file or tensor, what was found and what was wanted."""

    MOST_SHOWN = 8

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        shown = self.problems[: self.MOST_SHOWN]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - len(shown)} more")
        super().__init__("EXL3 checkpoint refused: " + "\n  ".join(shown))

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[list[str]]]:
        return type(self), (self.problems,)  # exceptions cross process boundaries


class TensorInfo(NamedTuple):
    """One stored tensor."""

    dtype: str  # as safetensors spells it: "I16", "F16", "BF16", ...
    shape: tuple[int, ...]
    file: Path | None = None  # None when only the header is at hand (a remote repository)
    offset: int = 0  # of the first byte in the file


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file, as the index in `folder` says.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is not an index.
    """
    index = folder / INDEX
    try:
        files = json.loads(index.read_text())["weight_map"]
        if not all(isinstance(name, str) for name in files.values()):
            raise TypeError("weight_map: want the name of a file for each tensor")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError([f"{index}: not a safetensors index ({error!r})"]) from None
    return dict(files)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint in `folder`.

    Those of its index; without one, `model.safetensors` alone where it is there (what lies beside it is something
    else); else all there are.

    Raises:
        CheckpointError: there is none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(read_index(folder).values()))
        missing = [f"{index}: names {name}, which is not there" for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(missing)
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files:
        raise CheckpointError([f"{folder}: no *.safetensors file"])
    return files


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file.

    Raises:
        CheckpointError: not a safetensors file, or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError([f"{path}: not a safetensors file, or cut off inside its header ({size} bytes)"])
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError([f"{path}: unreadable safetensors header ({error})"]) from None
    if not isinstance(header, dict):
        raise CheckpointError([f"{path}: safetensors header is a {type(header).__name__}, want an object"])
    header.pop("__metadata__", None)
    data = 8 + length
    tensors, problems, end = {}, [], 0
    for name, entry in header.items():
        if not _describes(entry):
            problems.append(f"{path}: {name}: header says {entry!r}, want dtype, shape and data_offsets")
            continue
        begin, stop = entry["data_offsets"]
        info = TensorInfo(entry["dtype"], tuple(entry["shape"]), path, data + begin)
        wanted = DTYPE_BYTES.get(info.dtype, 0)
        for extent in info.shape:
            wanted *= extent
        if wanted and stop - begin != wanted:
            problems.append(f"{path}: {name}: {stop - begin} bytes, want {wanted} for {info.dtype} {list(info.shape)}")
        tensors[name] = info
        end = max(end, stop)
    if size < data + end:
        problems.append(f"{path}: truncated: {size} bytes, want {data + end}")
    if problems:
        raise CheckpointError(problems)
    return tensors


def _describes(entry: Any) -> bool:
    """Whether a header's entry is what the format wants of a tensor."""
    if not (isinstance(entry, dict) and isinstance(entry.get("dtype"), str)):
        return False
    lists = entry.get("shape"), entry.get("data_offsets")
    if not all(isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers) for numbers in lists):
        return False
    return len(entry["data_offsets"]) == 2


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in `folder`.

    Raises:
        CheckpointError: with the problems of every file at once.
    """
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for path in weight_files(folder):
        try:
            found = read_header(path)
        except CheckpointError as error:
            problems += error.problems
            continue
        twice = sorted(found.keys() & tensors.keys())
        problems += [f"{path}: {name} is stored in {tensors[name].file} too" for name in twice]
        tensors |= found
    if problems:
        raise CheckpointError(problems)
    return tensors


def read_int32(info: TensorInfo) -> int | None:
    """The value of a stored int32 scalar, unsigned; None where its file is not at hand."""
    if info.file is None:
        return None
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return struct.unpack("<I", file.read(4))[0]
