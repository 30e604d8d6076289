"""Routed experts through the whole engine, against a float32 evaluation that shares no code with the overlay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine.conftest import SHARED_DATA
from tests.engine.scoring import greedy, score, score_over_http
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

# The rows of family x layout x ranks that `make test` runs: every value of each column, both styles of loader.
REPRESENTATIVE = {
    ("qwen3_moe", "ordinary", "2"),
    ("glm4_moe", "uniform K3", "1"),
    ("glm4_moe", "mixed", "2"),
    ("glm4_moe", "uniform K4", "1 on 2"),
    ("deepseek_v2", "ordinary", "1"),
    ("deepseek_v2", "mixed", "4 on 2"),
    ("deepseek_v3", "shared_h", "1"),
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_example_of_an_independent_writer(engine, ranks):
    if not MIXED.is_dir():
        pytest.skip("shared/data is not here")
    truth = load_file(MIXED / "truth.safetensors")
    llm = engine(MIXED, tensor_parallel_size=ranks)
    for text in range(sum(name.startswith("ids") for name in truth)):
        logprobs, top = score(llm, truth[f"ids{text}"].flatten().tolist())
        assert (logprobs - truth[f"logprob_next{text}"].flatten()).abs().mean() < CLOSE
        assert top == truth[f"top1_{text}"].flatten().tolist()[: len(top)]


@pytest.mark.slow
def test_over_http_on_two_ranks(make, tmp_path):
    folder = make("--family glm4_moe --layout shared_h --rates 3,4 --tp 2")
    with serve(folder, tmp_path, "--dtype", "float32", "--tensor-parallel-size", "2") as server:
        logprobs, top = score_over_http(server.post, IDS)
    expected = Oracle(folder).logprobs(IDS)
    assert (logprobs - expected[range(len(IDS) - 1), IDS[1:]]).abs().mean() < CLOSE
    assert top == expected[:-1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(engine, make, dtype):
    folder = make("--family qwen3_moe --layout per_expert --rates 3,4 --tp 2")
    logprobs, _ = score(engine(folder, dtype=dtype), IDS)
    assert (logprobs - Oracle(folder).next_logprobs(IDS)).abs().mean() < 0.2


@pytest.mark.slow
def test_compiled(engine, make):
    """vLLM compiles around the experts, whose routing no compiler can see through."""
    folder = make("--family qwen3_moe --layout per_expert --rates 3,4 --tp 2")
    llm = engine(folder, enforce_eager=False)
    assert (score(llm, IDS)[0] - Oracle(folder).next_logprobs(IDS)).abs().mean() < CLOSE
    assert greedy(llm, IDS, 6) == Oracle(folder).greedy(IDS, 6)


@pytest.mark.slow
def test_288_experts_and_uneven_tiers(engine, make):
    folder = make("--family glm4_moe --layout per_expert --rates 3,4 --tp 1 --experts 288 --layers 2")
    assert (score(engine(folder), IDS)[0] - Oracle(folder).next_logprobs(IDS)).abs().mean() < CLOSE
