# SPDX-License-Identifier: Apache-2.0
"""The three codebooks of EXL3: how a 16-bit trellis state becomes an fp16 value, and which rates each may have.

    3inst  x = s * 89226354 + 64248484;  x = (x & 0x8fff8fff) ^ 0x3b603b60;  fp16(low half) + fp16(high half)
    mcg    x = s * 0xCBAC1FED;           the same mask, xor and add
    mul1   x = s * 0x83DCD12D;           fp16 fma((1024 + sum of the four bytes of x), fp16(0x1eee), fp16(0xc931))

s and x are uint32. A checkpoint says which one a module uses by the presence of a scalar tensor, `.mcg` or `.mul1`,
that holds the multiplier; neither means 3inst. This module knows numbers only: no tensors, no names of modules.
"""

from __future__ import annotations

from dataclasses import dataclass

WORDS_PER_BIT = 16  # a tile has 256 values, so each bit of rate costs 256 bits = 16 int16 words

WHOLE_RATES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)  # bits a weight
HALF_RATES = (1.5, 2.5, 3.5)  # only mul1 has decoders for these

HALVES_MASK = 0x8FFF8FFF  # keeps both fp16 signs and every exponent bit but the highest
HALVES_XOR = 0x3B603B60  # moves both exponents to just below one
BYTES_BIAS = 1024  # the fp16 integers from 1024 to 2047 are exact
BYTES_SCALE_BITS = 0x1EEE  # fp16 bits of the multiplier
BYTES_SHIFT_BITS = 0xC931  # fp16 bits of the addend


@dataclass(frozen=True, kw_only=True)
class Codebook:
    """One map from a 16-bit state to an fp16 value.

    name        "3inst", "mcg" or "mul1": also the suffix of its marker tensor, if it has one
    multiplier  uint32, x = state * multiplier + addend modulo 2**32
    addend      uint32
    combine     "halves": sum of x's two masked fp16 halves; "bytes": scaled sum of x's four bytes
    marker      uint32 that the marker tensor holds, None if the codebook has no marker tensor
    rates       legal bits a weight
    std         standard deviation of the values over all 65,536 states
    """

    name: str
    multiplier: int
    addend: int
    combine: str
    marker: int | None
    rates: tuple[float, ...]
    std: float

    @property
    def marker_int32(self) -> int | None:
        """The marker as the signed int32 that safetensors stores."""
        if self.marker is None or self.marker < 1 << 31:
            return self.marker
        return self.marker - (1 << 32)

    def check_rate(self, rate: float) -> float:
        """Return `rate` as a float, or raise ValueError if this codebook has no such rate."""
        if float(rate) not in self.rates:
            legal = ", ".join(f"{r:g}" for r in self.rates)
            raise ValueError(f"codebook {self.name}: {rate:g} bits a weight, want one of {legal}")
        return float(rate)


CODEBOOKS: dict[str, Codebook] = {
    book.name: book
    for book in (
        Codebook(
            name="3inst",
            multiplier=89226354,
            addend=64248484,
            combine="halves",
            marker=None,
            rates=WHOLE_RATES,
            std=1.2437,
        ),
        Codebook(
            name="mcg",
            multiplier=0xCBAC1FED,
            addend=0,
            combine="halves",
            marker=0xCBAC1FED,
            rates=WHOLE_RATES,
            std=1.2441,
        ),
        Codebook(
            name="mul1",
            multiplier=0x83DCD12D,
            addend=0,
            combine="bytes",
            marker=0x83DCD12D,
            rates=tuple(sorted(WHOLE_RATES + HALF_RATES)),
            std=1.0003,
        ),
    )
}


def codebook(name: str) -> Codebook:
    """The codebook called `name`; ValueError lists the known ones."""
    if name not in CODEBOOKS:
        raise ValueError(f"codebook {name!r}, want one of {', '.join(CODEBOOKS)}")
    return CODEBOOKS[name]


def tile_words(rate: float) -> int:
    """int16 words of one 16x16 tile at `rate` bits a weight; ValueError for a rate no codebook has."""
    if float(rate) not in WHOLE_RATES + HALF_RATES:
        raise ValueError(f"{rate:g} bits a weight, want a whole number 1..8 or 1.5, 2.5, 3.5")
    return round(WORDS_PER_BIT * rate)


def rate_of_tile_words(words: int) -> float:
    """Bits a weight of a tile of `words` int16 words: the inverse of `tile_words`, with ValueError for the rest."""
    rate = words / WORDS_PER_BIT
    if rate not in WHOLE_RATES + HALF_RATES:
        raise ValueError(f"{words} words a tile, want 16*K: K whole in 1..8, or 24, 40, 56 for K = 1.5, 2.5, 3.5")
    return rate
