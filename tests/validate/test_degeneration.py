# SPDX-License-Identifier: Apache-2.0
"""Texts of models that have come apart, and texts that only look a little like it."""

from __future__ import annotations

import pytest

from validate.degeneration import degenerate
from validate.prose import sentences

PROSE = " ".join(sentences(400))
BROKEN = {
    "nothing": (" \n", "empty"),
    "undecodable": ("The number is \ufffd", "wrong character U+FFFD"),
    "control": ("The\x00number", "wrong character U+0000"),
    "private": ("\ue000", "wrong character U+E000"),
    "one sign": ("!" * 16, "'!' 16 times in a row"),
    "one word": ("well " * 8, "'well' 8 times in a row or more"),
    "one character of Chinese": ("好的" + "的 " * 8, "'的' 8 times in a row or more"),
    "a phrase": ("the red locker is " * 12, "4 different of 45 runs of 4 words: it repeats itself"),
    "a loop after a good beginning": (PROSE + " and so it goes on" * 12, None),
    "a paragraph again and again": (" ".join(sentences(60)) * 6, None),
}
SOUND = {
    "a number": "4830217",
    "prose": PROSE,
    "a rule and a table": f"a | b\n{'-' * 40}\n" + "\n".join(f"item {n} | value {n * 7}" for n in range(30)),
    "another script": "答案是四百八十三万零二百一十七。",
    "an emoji": "Here you are 👍🏽",
    "laughter": "ha ha ha ha ha",
    "arguments": '{"city": "Paris", "days": 3}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_says_what_is_broken(name):
    text, why = BROKEN[name]
    assert degenerate(text) == why if why else "repeats itself" in degenerate(text)


@pytest.mark.parametrize("name", SOUND)
def test_lets_sound_texts_pass(name):
    assert degenerate(SOUND[name]) is None
