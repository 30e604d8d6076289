# SPDX-License-Identifier: Apache-2.0
"""Random weights of one module, EXL3 or plain.

Every int16 pattern is a valid trellis whose decoded values have the codebook's standard deviation, so no encoder is
needed. Scales are chosen so that a linear keeps the size of its input: W[in, out] = diag(suh) H Wr H diag(svh) has
entries of std * |suh| * |svh|, and an output sums k of them.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from ..trellis import codebook, layout
from .files import Folder, bfloat16

SIGNS = ("float", "packed", "packed-inputs", "packed-outputs")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How an EXL3 linear is stored.

    codebook  a name of codebook.CODEBOOKS
    rate      bits a weight
    signs     "float": suh and svh; "packed": legacy su and sv, which carry no scale; or packed on one side only
    """

    codebook: str
    rate: float
    signs: str = "float"

    def __post_init__(self) -> None:
        codebook.codebook(self.codebook).check_rate(self.rate)
        if self.signs not in SIGNS:
            raise ValueError(f"signs {self.signs!r}, want one of {', '.join(SIGNS)}")


class Weights:
    """Adds random modules to a folder.

    Each tensor has a stream of its own, from the seed and its name: a tensor keeps its bytes whatever else the model
    has, and `copies`, {module: the module it repeats}, makes one module equal to another.
    """

    def __init__(self, folder: Folder, seed: int):
        self.folder = folder
        self.seed = seed
        self.copies: dict[str, str] = {}

    def original(self, key: str) -> str:
        """The module whose random values `key` has: itself, unless it is a copy."""
        return self.copies.get(key, key)

    def random(self, name: str) -> np.random.Generator:
        """The stream of one tensor."""
        key, _, kind = name.rpartition(".")
        return np.random.default_rng([self.seed, zlib.crc32(f"{self.original(key)}.{kind}".encode())])

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: str = "BF16") -> None:
        """A plain tensor of normal values."""
        values = self.random(name).standard_normal(shape, dtype=np.float32) * np.float32(std) + np.float32(mean)
        self.folder.add(name, dtype, bfloat16(values) if dtype == "BF16" else values)

    def plain(self, key: str, k: int, n: int, *, gain: float = 1.0, bias: bool = False) -> None:
        """An unquantized linear: `key.weight` [n, k] and, if asked, `key.bias` [n], bfloat16."""
        self.normal(f"{key}.weight", (n, k), gain / math.sqrt(k))
        if bias:
            self.normal(f"{key}.bias", (n,), 0.1)

    def trellis(self, key: str, k: int, n: int, encoding: Encoding) -> None:
        """`key.trellis` and the marker of its codebook."""
        shape = layout.trellis_shape(k, n, encoding.rate)
        words = self.random(f"{key}.trellis").integers(-(1 << 15), 1 << 15, size=shape, dtype=np.int16)
        self.folder.add(f"{key}.trellis", "I16", words)
        marker = codebook.codebook(encoding.codebook).marker_int32
        if marker is not None:
            self.folder.add(f"{key}.{encoding.codebook}", "I32", np.array(marker, dtype=np.int32))

    def side(self, name: str, channels: int, scale: float, zeros: bool = False) -> None:
        """A vector of fp16 signs and scales, [padded(channels)]: random signs, sizes within a quarter of `scale`."""
        size, random = layout.padded(channels), self.random(name)
        values = random.choice([-1.0, 1.0], size) * scale * random.uniform(0.8, 1.25, size)
        if zeros:  # converters store 0 for an output whose weights are all zero
            values[random.integers(0, size, max(1, size // 256))] = 0
        self.folder.add(name, "F16", values.astype(np.float16))

    def packed_signs(self, name: str, channels: int) -> None:
        """Legacy packed signs: int16 [padded(channels) / 16], bit b of word j for channel 16 j + b."""
        words = self.random(name).integers(-(1 << 15), 1 << 15, size=layout.tiles(channels), dtype=np.int16)
        self.folder.add(name, "I16", words)

    def inputs(self, key: str, k: int, encoding: Encoding) -> None:
        """`key.suh`, or `key.su` where signs are packed."""
        if encoding.signs in ("packed", "packed-inputs"):
            self.packed_signs(f"{key}.su", k)
        else:
            self.side(f"{key}.suh", k, 1.0)

    def outputs(self, key: str, n: int, encoding: Encoding, scale: float, zeros: bool = False) -> None:
        """`key.svh`, or `key.sv` where signs are packed."""
        if encoding.signs in ("packed", "packed-outputs"):
            self.packed_signs(f"{key}.sv", n)
        else:
            self.side(f"{key}.svh", n, scale, zeros)

    def scale(self, k: int, encoding: Encoding, gain: float = 1.0) -> float:
        """Size of the output scales with which k inputs give outputs of `gain` times their size."""
        return gain / (codebook.codebook(encoding.codebook).std * math.sqrt(k))

    def exl3(
        self,
        key: str,
        k: int,
        n: int,
        encoding: Encoding,
        *,
        gain: float = 1.0,
        bias: bool = False,
        zeros: bool = False,
    ) -> None:
        """An EXL3 linear of k true inputs and n true outputs that scales the size of its input by `gain`."""
        self.inputs(key, k, encoding)
        self.outputs(key, n, encoding, self.scale(k, encoding, gain), zeros)
        self.trellis(key, k, n, encoding)
        if bias:
            values = self.random(f"{key}.bias").standard_normal(layout.padded(n)) * 0.1
            self.folder.add(f"{key}.bias", "F16", values.astype(np.float16))
