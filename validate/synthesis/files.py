# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder, written a tensor at a time: safetensors shards, their index, and the JSON beside them.

Memory stays at one shard. Knows nothing of models: names, arrays and dictionaries come in, files go out.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I16": np.int16, "I32": np.int32}
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I16": "int16", "I32": "int32"}


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float values rounded to nearest-even bfloat16, as the uint16 bit patterns that stand for it here."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Folder:
    """A checkpoint folder being written.

    path        created if absent; must be empty
    shard_size  bytes of tensors a file, roughly: a file is closed before it would grow past this; None: no limit
    by_layer    a file ends with each layer, as converters of very large models write them
    """

    def __init__(self, path: Path, shard_size: int | None = None, by_layer: bool = False):
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError(f"{path}: not empty; want a new or empty folder")
        self.path = path
        self.shard_size = shard_size
        self.by_layer = by_layer
        self.headers: dict[str, tuple[str, tuple[int, ...], int]] = {}  # name -> dtype, shape, bytes
        self._pending: dict[str, tuple[str, np.ndarray]] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, dtype: str, values: np.ndarray) -> None:
        """Store one tensor; `dtype` is its safetensors name, and `values` has the numpy type DTYPES gives for it."""
        if name in self.headers:
            raise ValueError(f"{name}: added twice")
        if values.dtype != DTYPES[dtype]:
            raise TypeError(f"{name}: array of {values.dtype}, want {np.dtype(DTYPES[dtype])} for {dtype}")
        if self.shard_size and self._pending and self._pending_bytes + values.nbytes > self.shard_size:
            self.close_shard()
        self.headers[name] = (dtype, values.shape, values.nbytes)
        self._pending[name] = (dtype, values)
        self._pending_bytes += values.nbytes

    def end_layer(self) -> None:
        """A layer of the model is complete."""
        if self.by_layer:
            self.close_shard()

    def close_shard(self) -> None:
        """End the current safetensors file; the next tensor starts another."""
        if not self._pending:
            return
        self._shards.append(list(self._pending))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, values) in self._pending.items():
            end = offset + values.nbytes
            header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # data starts on 8 bytes, as the safetensors library aligns it
        with open(self._draft(len(self._shards)), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, values in self._pending.values():
                file.write(np.ascontiguousarray(values).tobytes())
        self._pending, self._pending_bytes = {}, 0

    def add_json(self, name: str, value: object) -> None:
        """Write a JSON file beside the weights."""
        (self.path / name).write_text(json.dumps(value, indent=2) + "\n")

    def finish(self) -> int:
        """Close the last file and give all their final names, with an index if there are several. Returns bytes."""
        self.close_shard()
        total = len(self._shards)
        names = (
            ["model.safetensors"]
            if total == 1
            else [f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)]
        )
        for number, name in enumerate(names, 1):
            self._draft(number).rename(self.path / name)
        size = sum(header[2] for header in self.headers.values())
        if total > 1:
            where = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
            self.add_json("model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})
        return size

    def _draft(self, number: int) -> Path:
        return self.path / f"shard-{number}.unfinished"
