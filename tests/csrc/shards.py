"""Quantized matrices of random bits, what they mean in float64, and how results are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.model_executor.layers.quantization.exl3_trellis.codebook import tile_words
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_rotated, hadamard

CODEBOOKS = ("3inst", "mcg", "mul1")  # in the order of their numbers


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One matrix of a merged projection: y gets columns [first, first + width) of its n."""

    trellis: torch.Tensor  # [k/16, n/16, 16*K] i16
    suh: torch.Tensor  # [k] f16
    svh: torch.Tensor  # [n] f16
    book: str
    first: int
    width: int

    @property
    def rate2(self) -> int:
        """Twice the bits a weight."""
        return self.trellis.shape[2] // 8

    @property
    def k(self) -> int:
        return self.suh.shape[0]

    @property
    def n(self) -> int:
        return self.svh.shape[0]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[m, width] f64: had(fp16(had(x * suh)) @ W) * svh, all but the one rounding in float64."""
        x = torch.nn.functional.pad(x.double(), (0, self.k - x.shape[1]))
        rotated = hadamard(x * self.suh.double()).half().double()
        y = hadamard(rotated @ decode_rotated(self.trellis, self.book, torch.float64)) * self.svh.double()
        return y[:, self.first : self.first + self.width]

    def matrix(self) -> torch.Tensor:
        """[k, n] f64 in the original basis."""
        rows = hadamard(decode_rotated(self.trellis, self.book, torch.float64)) * self.svh.double()
        return hadamard(rows.t().contiguous()).t() * self.suh.double().unsqueeze(1)


def random_shard(k: int, n: int, rate: float, book: str, first: int = 0, width: int | None = None) -> Shard:
    """Random bits; scales of both signs and of sizes that differ, so that no two channels may be confused."""
    generator = torch.Generator().manual_seed(hash((k, n, round(2 * rate), CODEBOOKS.index(book))))
    words = (k // 16, n // 16, tile_words(rate))
    trellis = torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, generator=generator)
    suh, svh = (torch.randn(size, generator=generator).half() + 0.5 for size in (k, n))
    return Shard(trellis=trellis, suh=suh, svh=svh, book=book, first=first, width=n - first if width is None else width)


def random_x(m: int, k: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64; NaN if anything is."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
