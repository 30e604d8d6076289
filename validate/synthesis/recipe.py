# SPDX-License-Identifier: Apache-2.0
"""Which module is stored how: one decision for every linear of a synthetic model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ..trellis import codebook
from .linears import Encoding, Weights

LOGIT_GAIN = 2.0  # logits of about this standard deviation: the best token stands out of rounding noise


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the linears of a model are stored.

    rates      bits a weight; several are dealt out module by module, in turn
    codebooks  likewise
    head_rate  of lm_head; None: dealt like the others
    signs      see Encoding
    plain      glob patterns of module names that stay unquantized ("*.k_proj", "lm_head")
    bias       linears that the architecture lets have a bias have one
    residual   gain of the linears that add to the residual stream: small makes a token's own embedding decide the next
    """

    rates: tuple[float, ...] = (3.0,)
    codebooks: tuple[str, ...] = ("mcg",)
    head_rate: float | None = None
    signs: str = "float"
    plain: tuple[str, ...] = ()
    bias: bool = False
    residual: float = 1.0

    def __post_init__(self) -> None:
        """Refuses, before anything is written, a rate that its codebook lacks."""
        for dealt in range(math.lcm(len(self.rates), len(self.codebooks))):
            self.deal(dealt)
        if self.head_rate is not None:
            for book in self.codebooks:
                Encoding(codebook=book, rate=self.head_rate, signs=self.signs)

    def deal(self, number: int) -> Encoding:
        """The encoding of the module with this number."""
        return Encoding(
            codebook=self.codebooks[number % len(self.codebooks)],
            rate=self.rates[number % len(self.rates)],
            signs=self.signs,
        )


class Linears:
    """Adds linears and norms by `recipe`; remembers how it has stored each."""

    def __init__(self, weights: Weights, recipe: Recipe):
        self.weights = weights
        self.recipe = recipe
        self._dealt: dict[str, Encoding] = {}

    def encoding(self, key: str) -> Encoding | None:
        """How `key`, a module or a group of modules stored alike, is stored; None: unquantized."""
        key = self.weights.original(key)
        if any(fnmatchcase(key, pattern) for pattern in self.recipe.plain):
            return None
        if key not in self._dealt:
            encoding = self.recipe.deal(len(self._dealt))
            if key.endswith("lm_head") and self.recipe.head_rate is not None:
                encoding = replace(encoding, rate=self.recipe.head_rate)
            self._dealt[key] = encoding
        return self._dealt[key]

    def linear(self, key: str, k: int, n: int, *, gain: float = 1.0, bias: bool = False, zeros: bool = False) -> None:
        """One linear of k inputs and n outputs that scales the size of its input by `gain`, as the recipe stores it."""
        self.store(key, k, n, self.encoding(key), gain=gain, bias=bias, zeros=zeros)

    def store(
        self,
        key: str,
        k: int,
        n: int,
        encoding: Encoding | None,
        *,
        gain: float = 1.0,
        bias: bool = False,
        zeros: bool = False,
    ) -> None:
        """The same, the encoding being decided already."""
        if encoding is None:
            self.weights.plain(key, k, n, gain=gain, bias=bias)
        else:
            self.weights.exl3(key, k, n, encoding, gain=gain, bias=bias, zeros=zeros)

    def norm(self, key: str, size: int, feeds_linears: bool = False) -> None:
        """`key.weight` of an RMS norm, around 1; legacy output signs carry no scale, so norms before them are small."""
        unscaled = feeds_linears and self.recipe.signs in ("packed", "packed-outputs")
        mean = 1 / (codebook.codebook(self.recipe.codebooks[0]).std * math.sqrt(size)) if unscaled else 1.0
        self.weights.normal(f"{key}.weight", (size,), 0.1 * mean, mean)

    def embedding(self, key: str, vocabulary: int, hidden: int) -> None:
        """`key.weight` [vocabulary, hidden], never quantized."""
        self.weights.normal(f"{key}.weight", (vocabulary, hidden), 1.0)
