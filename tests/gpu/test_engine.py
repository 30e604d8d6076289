# SPDX-License-Identifier: Apache-2.0
"""Dense models in whole engines on a card, graphs on: right answers, nothing loaded late, the same after sleeping.

Needs vLLM composed with the overlay, which `make test-gpu` alone does not bring: skipped without it.
"""

from __future__ import annotations

import importlib.util
import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from bench.decode import variant_of
from tests.gpu import checkpoints
from tests.gpu.life import Life, Plan, composed, differences, live
from tests.gpu.loads import late

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT.parent / "shared" / "data" / "smollm2-135m-instruct-exl3-3.0bpw"
REFERENCE = "exllamav3_reference.safetensors"
WIDE_BY_CPU = ROOT / "tests" / "data" / "wide_dense.json"

PROMPTS = [[7, 3, 250, 11, 98, 402, 5, 5, 31, 77], [9, 9, 1, 44], [500]]
WATCH = ("watch", {"rows": [1, 2, 5, 8, 9], "prompt": 3000})
SAY = ("say", {"prompts": PROMPTS})
NAPS = [
    ("sleep", {"level": 1}),
    ("wake", {"reload": False}),
    SAY,
    ("sleep", {"level": 2}),
    ("wake", {"reload": True}),
    SAY,
]
CLOSE = 0.02  # log probabilities of the same token by different ways to multiply
# Graphs that the user asks for; all of the scored texts' 13 rows fit into the largest.
CAPTURED = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}

pytestmark = pytest.mark.skipif(not composed(), reason="vLLM with the overlay is not installed")


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    """All engines of this file."""
    folder = tmp_path_factory.mktemp("dense")
    made = checkpoints.make(["small", "wide"], folder)
    half = {"dtype": "float16"}
    eager = half | {"enforce_eager": True}
    plans = {
        name: Plan(model=made["small"], steps=[SAY, ("score", {"texts": PROMPTS[:2]})], options=options)
        for name, options in (("graphs", half), ("eager", eager))
    }
    score = ("score", {"texts": PROMPTS[:2]})
    plans["torch"] = Plan(
        model=made["small"],
        steps=[("say", SAY[1] | {"margins": True}), score, *NAPS[3:]],
        options=half | {"enable_sleep_mode": True},
        env={"VLLM_EXL3_BACKEND": "torch"},
    )
    plans["torch in graphs"] = Plan(
        model=made["small"],
        steps=[SAY, score],
        options=half | {"compilation_config": CAPTURED},
        env={"VLLM_EXL3_BACKEND": "torch"},
    )
    if importlib.util.find_spec("exllamav3_ext") is not None:
        env = {"VLLM_EXL3_BACKEND": "exllamav3"}
        plans["exllamav3"] = Plan(model=made["small"], steps=[SAY, score], options=half, env=env)
    texts = json.loads(WIDE_BY_CPU.read_text())["texts"]
    plans["wide"] = Plan(
        model=made["wide"],
        steps=[SAY, WATCH, *NAPS, ("score", {"texts": texts}), ("facts", {})],
        options={"enable_sleep_mode": True},
    )
    if SMOLLM2.is_dir():
        steps = [SAY, WATCH, *NAPS, ("score", {"texts": reference_texts()}), ("facts", {})]
        plans["real"] = Plan(model=SMOLLM2, steps=steps, options=half | {"enable_sleep_mode": True})
    with variant_of(made["wide"], "bf16") as (plain, _):
        plans["plain"] = Plan(model=plain, steps=[WATCH], options={"load_format": "dummy"})
        return live(plans, folder / "logs")


def reference_texts() -> list[list[int]]:
    """The texts that exllamav3 was asked about."""
    from safetensors.torch import load_file

    reference = load_file(SMOLLM2 / REFERENCE)
    return [reference[f"ids{text}"].flatten().tolist() for text in range(3)]


def test_an_unquantized_model_loads_the_kernels_of_libraries_late_too(lives):
    seen = lives["plain"][0]["seen"]
    print(f"loaded late, by libraries: {len(seen)}")
    assert seen
    assert late(seen) == []


@pytest.fixture(params=["real", "wide"])
def life(lives: dict[str, Life], request: pytest.FixtureRequest) -> Life:
    """Of each large model in turn."""
    if request.param not in lives:
        pytest.skip("shared/data is not here")
    return lives[request.param]


def test_real_checkpoint_agrees_with_exllamav3(lives):
    if "real" not in lives:
        pytest.skip("shared/data is not here")
    from safetensors.torch import load_file

    reference = load_file(SMOLLM2 / REFERENCE)
    scored = lives["real"][-2]
    worst, equal, places = 0.0, 0, 0
    for text, (logprobs, top) in enumerate(zip(scored["logprobs"], scored["top"], strict=True)):
        worst = max(worst, (torch.tensor(logprobs) - reference[f"logprob_next{text}"]).abs().mean().item())
        equal += int((torch.tensor(top) == reference[f"top1_{text}"][: len(top)]).sum())
        places += len(top)
    print(f"worst mean |Δ logprob| {worst:.4f}, top tokens equal {equal}/{places}")
    assert worst <= 0.02
    assert equal >= 0.98 * places


def flat(lists: list[list]) -> list:
    """One list of all their entries."""
    return list(chain.from_iterable(lists))


def test_wide_model_says_what_the_cpu_says(lives):
    expected, scored = json.loads(WIDE_BY_CPU.read_text()), lives["wide"][-2]
    ours, theirs = (torch.tensor(flat(each["logprobs"])) for each in (scored, expected))
    error = (ours - theirs).abs().mean().item()
    tops = list(zip(flat(scored["top"]), flat(expected["top"]), strict=True))
    equal = sum(one == other for one, other in tops)
    print(f"mean |Δ logprob| {error:.4f}, top tokens equal {equal}/{len(tops)}")
    assert error <= 0.05
    assert equal >= 0.95 * len(tops)


def test_graphs_change_nothing(lives):
    assert lives["graphs"][0]["said"] == lives["eager"][0]["said"]


@pytest.mark.parametrize("provider", ["torch", "torch in graphs", "exllamav3"])
def test_native_agrees_with_other_providers(lives, provider):
    if provider not in lives:
        pytest.skip("exllamav3_ext is not installed")
    ours, theirs = (torch.tensor(flat(lives[name][1]["logprobs"])) for name in ("graphs", provider))
    print(f"largest |Δ logprob| {(ours - theirs).abs().max().item():.4f}")
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)


def test_other_providers_are_captured_only_if_asked(lives):
    for name in sorted({"torch", "exllamav3"} & lives.keys()):
        assert f"EXL3: no CUDA graphs, because {name} runs the linear layers" in lives[name].log
    assert "EXL3: no CUDA graphs" not in lives["torch in graphs"].log
    same, margins = differences(lives["torch in graphs"], lives["torch"])
    print(f"{same} tokens the same, differences at margins {margins}")
    assert max(margins, default=0.0) <= CLOSE  # graphs pad rows, and cuBLAS rounds by their number


def test_the_torch_provider_says_the_same_after_losing_the_weights(lives):
    assert lives["torch"][-1]["said"] == lives["torch"][0]["said"]


def test_nothing_is_compiled_or_loaded_once_ready(life):
    print(f"loaded late, by libraries: {len(life[1]['seen'])}")
    assert late(life[1]["seen"]) == []
    assert "during inference" not in life.after_ready  # so vLLM reports what is compiled late


def test_sleeping_frees_memory_and_keeps_the_answers(life):
    for nap in (2, 5):
        held = sum(life[nap]["pools"].values())
        print(f"sleeping freed {life[nap]['freed'] >> 20} MiB of {held >> 20}")
        assert life[nap]["freed"] >= 0.9 * held
        assert life[nap + 2]["said"] == life[0]["said"]
