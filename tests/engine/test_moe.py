"""Routed experts through the whole engine, against a float32 evaluation that shares no code with the overlay."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.conftest import SHARED_DATA
from tests.engine.scoring import greedy, score
from tests.engine.server import serve

from tests.oracle import Oracle
from validate.__main__ import main as validate

IDS = [7, 3, 250, 11, 98, 402, 5, 5, 31, 77]
CLOSE = 1e-3  # mean difference of log probabilities; the requirement is 0.01
MIXED = SHARED_DATA / "glm4moe-rank-sliced-mixed-tp2"

# layout -> arguments of `make-checkpoint moe`
LAYOUTS = {
    "ordinary": "--layout ordinary --rates 3,4,2.5 --codebooks mul1",
    "uniform K3": "--layout per_expert --rates 3",
    "uniform K4": "--layout per_expert --rates 4 --no-shim",
    "mixed": "--layout per_expert --rates 3,4",
    "shared_h": "--layout shared_h --rates 3,4",
}
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")
# ranks that run, ranks stored
RANKS = {"1": (1, 2), "2": (2, 2), "4 on 2": (2, 4), "1 on 2": (2, 1)}

# The rows of family x layout x ranks that `make test` runs: every value of each column, both loader styles for each layout.
REPRESENTATIVE = {
    ("qwen3_moe", "ordinary", "2"),
    ("qwen3_moe", "shared_h", "4 on 2"),
    ("glm4_moe", "uniform K3", "1"),
    ("glm4_moe", "mixed", "2"),
    ("glm4_moe", "uniform K4", "1 on 2"),
    ("deepseek_v2", "ordinary", "1"),
    ("deepseek_v2", "mixed", "4 on 2"),
    ("deepseek_v3", "shared_h", "1"),
    ("deepseek_v3", "uniform K4", "1"),
}


def _matrix() -> list[Any]:
    rows = []
    for family in FAMILIES:
        for layout in LAYOUTS:
            for ranks in RANKS:
                if layout == "ordinary" and "on" in ranks:
                    continue
                chosen = (family, layout, ranks) in REPRESENTATIVE
                marks = () if chosen else (pytest.mark.slow,)
                rows.append(pytest.param(family, layout, ranks, marks=marks, id=f"{family}, {layout}, tp {ranks}"))
    return rows


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(arguments) -> folder of a new mixture-of-experts checkpoint."""

    def write(arguments: str, name: str = "checkpoint") -> Path:
        folder = tmp_path / name
        assert validate(["make-checkpoint", "moe", str(folder), *arguments.split()]) == 0
        return folder

    return write


@pytest.fixture(autouse=True)
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # upstream wants a NUMA node for each worker otherwise


@pytest.mark.parametrize(("family", "layout", "ranks"), _matrix())
def test_logprobs_are_those_of_the_decoded_weights(engine, make, family, layout, ranks):
    run, stored = RANKS[ranks]
    sizes = "--moe-intermediate 512 --intermediate 512 --experts 6"
    folder = make(f"--family {family} {LAYOUTS[layout]} --tp {stored} {sizes}")
    logprobs, top = score(engine(folder, tensor_parallel_size=run), IDS)
    expected = Oracle(folder).logprobs(IDS)
    assert (logprobs - expected[range(len(IDS) - 1), IDS[1:]]).abs().mean() < CLOSE
    assert top == expected[:-1].argmax(dim=-1).tolist()
