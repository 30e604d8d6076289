# SPDX-License-Identifier: Apache-2.0
"""GLM-5.2-shaped rank-sliced models with an MTP layer, in whole engines on a card, nothing set: what they say, what
they load, how fast a long prompt is with and without the prefill plan, and what sleeping frees.

Sparse attention needs a Hopper or newer card and DeepGEMM.  Skipped without the composed vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import checkpoints
from tests.gpu.life import Life, Plan, Step, composed, differences, live, numbered
from tests.gpu.loads import late

LAYOUTS = ("uniform", "mixed")
# Lengths on both sides of the decode plan's 32 rows.
PROMPTS = [numbered(length, seed=length) for length in (1, 4, 10, 31, 33, 150, 700)]
TEXTS = PROMPTS[2:6]
SAY: Step = ("say", {"prompts": PROMPTS, "tokens": 48})
WATCH: Step = ("watch", {"rows": [1, 2, 5, 8, 9], "prompt": 3000})
PREFILL: Step = ("prefill", {"tokens": 2048})
NAPS: list[Step] = [("sleep", {"level": 1}), ("wake", {"reload": False}), SAY,
                    ("sleep", {"level": 2}), ("wake", {"reload": True}), SAY]  # fmt: skip
# vLLM's own, for sparse attention and for verifying drafts: its warm-up misses them, and the first answers wait.
UPSTREAM = {
    "BuildPrefillChunkMetadataKernel.kernel",
    "_fused_q_kernel",
    "_compute_local_logits_stats_kernel",
    "_rejection_kernel",
    "_resample_kernel",
}
TIE = 0.06  # two log probabilities this close may change places by the rounding of bfloat16

pytestmark = [
    pytest.mark.skipif(not composed(), reason="vLLM with the overlay is not installed"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no sparse attention here"
    ),
]


def drafting(drafts: int) -> dict[str, Any]:
    """Engine options for so many draft tokens of the MTP layer."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints."""
    return checkpoints.make([*LAYOUTS, "tiny"], tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def lives(made: dict[str, Path], truths: Future, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    """All engines of this file."""
    plans = {"truth": Plan(model=made["tiny"], steps=[("score", {"texts": TEXTS}), ("facts", {})])}
    for layout in LAYOUTS:
        says = ("say", SAY[1] | {"margins": True})
        plans[f"{layout} 0"] = Plan(model=made[layout], steps=[says, ("facts", {})])
        plans[f"{layout} 1"] = Plan(model=made[layout], steps=[SAY, ("facts", {})], options=drafting(1))
        steps = [SAY, WATCH, PREFILL, *NAPS, ("facts", {})]
        plans[f"{layout} 3"] = Plan(model=made[layout], steps=steps, options=drafting(3) | {"enable_sleep_mode": True})
    switch = {"VLLM_EXL3_PREFILL_TRELLIS": "0"}
    plans["parity"] = Plan(model=made["mixed"], steps=[SAY, PREFILL, ("facts", {})], options=drafting(3), env=switch)
    for capacity in ("", "512"):
        env = {"VLLM_EXL3_PREFILL_CAPACITY": capacity}
        options = drafting(3) | {"enforce_eager": True}
        plans[f"capacity {capacity}"] = Plan(
            model=made["mixed"], steps=[SAY, ("facts", {})], options=options, env=env, alone=True
        )
    return live(plans, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def truths(made: dict[str, Path]) -> Iterator[Future]:
    """Log probabilities after each prefix of TEXTS by the tiny model's weights, worked out while engines start."""
    from tests.oracle import Oracle

    def work_out() -> list[torch.Tensor]:
        oracle = Oracle(made["tiny"])
        return [oracle.logprobs(ids)[:-1] for ids in TEXTS]

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work_out)


def test_the_target_says_what_its_weights_say(lives, truths):
    errors, equal, places = [], 0, 0
    scored = lives["truth"][0]
    for truth, ids, logprobs, top in zip(truths.result(), TEXTS, scored["logprobs"], scored["top"], strict=True):
        following = truth.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        errors.append((torch.tensor(logprobs) - following).abs())
        equal += int((truth.argmax(-1) == torch.tensor(top)).sum())
        places += len(top)
    error = torch.cat(errors).mean().item()
    print(f"mean |Δ logprob| {error:.4f}, top tokens equal {equal}/{places}")
    assert error <= 0.1
    assert equal >= 0.9 * places


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_do_not_change_what_is_said(lives, layout, drafts):
    life = lives[f"{layout} {drafts}"]
    same, margins = differences(life, lives[f"{layout} 0"])
    taken, drafted = life[0]["accepted_tokens"], life[0]["draft_tokens"]
    print(f"{same} tokens the same, differences at margins {margins}; {taken} of {drafted} drafted tokens taken")
    assert max(margins, default=0.0) <= TIE
    assert taken >= drafted // 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_compiled_or_loaded_once_ready(lives, layout):
    life = lives[f"{layout} 3"]
    print(f"loaded late, by libraries: {len(life[1]['seen'])}")
    assert late(life[1]["seen"]) == []
    compiled = set(re.findall(r"during inference: ([\w.]+)\. This", life.after_ready))  # so vLLM reports it
    print(f"compiled late, by vLLM itself: {sorted(compiled)}")
    assert compiled <= UPSTREAM


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sleeping_frees_the_arenas_and_keeps_the_answers(lives, layout):
    life = lives[f"{layout} 3"]
    for nap in (3, 6):
        pools, freed = life[nap]["pools"], life[nap]["freed"]
        print(f"sleeping freed {freed >> 20} MiB of { {name: size >> 20 for name, size in pools.items()} }")
        assert pools["workspace"] > 0
        assert freed >= 0.9 * sum(pools.values())
        assert max(differences(life, lives[f"{layout} 0"], step=nap + 2)[1], default=0.0) <= TIE
        assert abs(life[nap + 2]["accepted_tokens"] - life[0]["accepted_tokens"]) <= life[0]["accepted_tokens"] // 10


def test_the_prefill_plan_is_faster_and_changes_no_acceptance(lives):
    planned, parity = lives["mixed 3"], lives["parity"]
    ratio = parity[1]["seconds"] / planned[2]["seconds"]
    rates = [life[0]["accepted_tokens"] / life[0]["draft_tokens"] for life in (planned, parity)]
    print(f"a prompt of {PREFILL[1]['tokens']}: {ratio:.2f} times as fast as by parity; acceptance {rates}")
    assert max(differences(parity, lives["mixed 0"])[1], default=0.0) <= TIE
    assert ratio > 1
    assert abs(rates[0] - rates[1]) <= 0.05


def arenas(life: Life) -> dict[str, float]:
    """MiB of the arena of the target and of the draft, as the engine says."""
    said = re.findall(r"EXL3 experts of the (\w+), .* of the arena's ([\d.]+) MiB", life.log)
    return {role: float(size) for role, size in said}


def test_a_smaller_capacity_leaves_more_for_the_cache(lives):
    unset, small = (lives[f"capacity {capacity}"] for capacity in ("", "512"))
    assert arenas(unset).keys() == arenas(small).keys() == {"target", "draft"}
    before, after = (life[1]["kv_bytes"] / 2**20 for life in (unset, small))
    large, little = (sum(arenas(life).values()) for life in (unset, small))
    print(f"KV cache {before:.0f} MiB beside arenas of {large:.0f}, with capacity 512 {after:.0f} beside {little:.0f}")
    assert little < 0.1 * large
    assert after - before == pytest.approx(large - little, rel=0.05)
    assert max(differences(small, lives["mixed 0"])[1], default=0.0) <= TIE


def test_says_what_it_plans(lives):
    for layout in LAYOUTS:
        planned = re.findall(r"EXL3.*(?:MiB|bytes).*", lives[f"{layout} 3"].log)
        print(*planned, sep="\n")
        assert planned
