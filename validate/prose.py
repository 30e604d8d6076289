# SPDX-License-Identifier: Apache-2.0
"""Text to fill prompts with: plain sentences in endless variety, and beginnings that no prompt has had before."""

from __future__ import annotations

import random
import secrets

# What follows "The" in a sentence, part by part.
PARTS = [part.split(",") for part in (
    "ferry,baker,clock,garden,teacher,river,engine,painter,bridge,market,sailor,window",
    "passes,follows,leaves,watches,crosses,remembers,carries,paints,measures,finds",
    "the old,the quiet,the northern,the green,the narrow,the careful,the early,the distant,the heavy,the small",
    "harbour,street,letter,orchard,station,mountain,library,kitchen,lantern,island",
    "in spring.,at noon.,after the rain.,before supper.,every other week.,on a cold morning.",
)]  # fmt: skip


def sentences(words: int) -> list[str]:
    """About that many words, cut inside the last sentence; always the same ones, so that more words only add."""
    draw, made, left = random.Random(0), [], words
    while left > 0:
        sentence = " ".join(["The", *(draw.choice(part) for part in PARTS)]).split()
        made.append(" ".join(sentence[:left]))
        left -= len(sentence)
    return made


def beginning() -> str:
    """A line whose first words are random: no block of the prefix cache after it was ever filled before."""
    return f"Notes, volume {secrets.randbelow(9 * 10**11) + 10**11}.\n"


class Ruler:
    """How many words make a prompt of so many tokens, from prompts that a server has counted."""

    def __init__(self) -> None:
        self.points: dict[int, int] = {}  # words -> tokens

    def learn(self, words: int, tokens: int) -> None:
        self.points[words] = tokens

    def words(self, tokens: int) -> int:
        """From the counted prompt nearest to that size, along the line from the smallest to it; never below 1."""
        (w0, t0), *others = sorted(self.points.items())
        w1, t1 = min(others, key=lambda point: abs(tokens - point[1]))
        return max(1, round(w1 + (tokens - t1) * (w1 - w0) / max(t1 - t0, 1)))
