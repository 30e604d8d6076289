# SPDX-License-Identifier: Apache-2.0
"""The constants of the codebooks and their legal rates."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from vllm.model_executor.layers.quantization.exl3_trellis import codebook, layout

RATES = {"3inst": (1, 2, 3, 4, 5, 6, 7, 8), "mcg": (1, 2, 3, 4, 5, 6, 7, 8)}
RATES["mul1"] = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    "name, marker, stored",
    [("3inst", None, None), ("mcg", 0xCBAC1FED, -877912083), ("mul1", 0x83DCD12D, -2082680531)],
)
def test_markers(name, marker, stored):
    book = codebook.codebook(name)
    assert (book.name, book.marker, book.marker_int32) == (name, marker, stored)


@pytest.mark.parametrize("name", RATES)
def test_rates_of_each_codebook(name):
    assert codebook.CODEBOOKS[name].rates == RATES[name]
    for rate in RATES[name]:
        assert codebook.CODEBOOKS[name].check_rate(rate) == rate


@pytest.mark.parametrize("name, rate", [("3inst", 2.5), ("mcg", 1.5), ("mul1", 4.5), ("mcg", 9), ("mul1", 0)])
def test_rate_a_codebook_lacks(name, rate):
    with pytest.raises(ValueError, match=rf"^codebook {name}: {rate} bits a weight, want one of 1, "):
        codebook.CODEBOOKS[name].check_rate(rate)


def test_unknown_codebook():
    with pytest.raises(ValueError, match=r"^codebook 'mcg2', want one of 3inst, mcg, mul1$"):
        codebook.codebook("mcg2")


def test_tile_words_and_back():
    for rate in RATES["mul1"]:
        words = codebook.tile_words(rate)
        assert words * 16 == layout.TILE_VALUES * rate, "a tile holds K bits for each of its values"
        assert codebook.rate_of_tile_words(words) == rate


@pytest.mark.parametrize("words", [0, 8, 17, 50, 72, 144])
def test_words_of_no_rate(words):
    want = f"{words} words a tile, want 16*K: K whole in 1..8, or 24, 40, 56 for K = 1.5, 2.5, 3.5"
    with pytest.raises(ValueError, match=f"^{re.escape(want)}$"):
        codebook.rate_of_tile_words(words)


def test_rate_no_codebook_has():
    with pytest.raises(ValueError, match=r"^4\.5 bits a weight, want a whole number 1\.\.8 or 1\.5, 2\.5, 3\.5$"):
        codebook.tile_words(4.5)


def test_needs_no_torch():
    """Tools that only look at headers import these two modules; they must stay light."""
    files = [module.__file__ for module in (codebook, layout)]
    script = f"""
import importlib.util, pathlib, sys
folder = pathlib.Path({files[0]!r}).parent
spec = importlib.util.spec_from_file_location("p", folder / "__init__.py", submodule_search_locations=[str(folder)])
sys.modules["p"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["p"])
import p.codebook, p.layout
heavy = {{"torch", "numpy", "vllm"}} & set(sys.modules)
sys.exit(f"imports {{heavy}}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
