# SPDX-License-Identifier: Apache-2.0
"""Does a text look like a model that has come apart: nothing, one thing over and over, loops, broken characters?

Knows no language and no tokenizer. A text that passes may still be nonsense.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

# Words, characters of scripts without spaces, rules and leaders as a whole, other signs.
UNIT = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+|[-=_.*#~]+|[^\w\s]")
RUN = 8  # times that no text says a word in a row
CHARACTER_RUN = re.compile(r"([^\s\-=_.*#~])\1{15,}")  # rules and leaders are drawn with the others
WINDOWS, GRAM = (48, 192), 4  # units looked at together: a loop shows if it comes twice or more in one
FEWEST_DIFFERENT = 0.5  # of the n-grams in a window; prose has over 0.9, a table or a list of steps about 0.7
WRONG = ("Cc", "Cn", "Co", "Cs")  # control, unassigned, private, surrogate


def degenerate(text: str) -> str | None:
    """What is wrong with the text; None if nothing is seen."""
    if not text.strip():
        return "empty"
    for char in text:
        if char == "\ufffd" or (unicodedata.category(char) in WRONG and char not in "\n\r\t"):
            return f"wrong character U+{ord(char):04X}"
    if found := CHARACTER_RUN.search(text):
        return f"{found[1]!r} {len(found[0])} times in a row"
    units = UNIT.findall(text.lower())
    return _run(units) or _loop(units)


def _run(units: Sequence[str]) -> str | None:
    length = 1
    for before, unit in pairwise(units):
        length = length + 1 if unit == before and unit.isalnum() else 1
        if length >= RUN:
            return f"{unit!r} {RUN} times in a row or more"
    return None


def _loop(units: Sequence[str]) -> str | None:
    """The share of different n-grams, in windows: a good beginning does not hide a loop at the end."""
    for window in WINDOWS:
        last = max(len(units) - window, 0)
        for start in [*range(0, last, window // 2), last]:
            part = units[start : start + window]
            grams = [tuple(part[i : i + GRAM]) for i in range(len(part) - GRAM + 1)]
            if len(grams) >= 2 * RUN and len(set(grams)) < FEWEST_DIFFERENT * len(grams):
                return f"{len(set(grams))} different of {len(grams)} runs of {GRAM} words: it repeats itself"
    return None
