# SPDX-License-Identifier: Apache-2.0
"""Whole engines on a card, graphs on: right answers, and the same ones after sleeping, waking and reloading.

Needs vLLM composed with the overlay, which `make test-gpu` alone does not bring: skipped without it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT.parent / "shared" / "data" / "smollm2-135m-instruct-exl3-3.0bpw"
IDS = [7, 3, 250, 11, 98, 402, 5, 5, 31, 77]

pytestmark = pytest.mark.skipif(
    not any((Path(path) / "vllm" / "exl3_envs.py").is_file() and (Path(path) / "vllm" / "__init__.py").is_file()
            for path in sys.path),
    reason="vLLM with the overlay is not installed",
)  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """engine(folder, **options) -> vllm.LLM in this process, shut down at the end."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    started = []

    def start(model: Path, **options: Any) -> Any:
        defaults = {"dtype": "float16", "max_model_len": 1024, "gpu_memory_utilization": 0.3, "seed": 0}
        started.append(LLM(str(model), **(defaults | options)))
        return started[-1]

    yield start
    while started:
        started.pop().llm_engine.engine_core.shutdown()
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small dense checkpoint that mixes rates and has a head of its own."""
    sys.path.insert(0, str(ROOT))
    from validate.__main__ import main as validate

    folder = tmp_path / "checkpoint"
    options = "--hidden 512 --heads 8 --kv-heads 2 --head-dim 64 --intermediate 1024 --rates 2,3,4 --vocab 1024"
    assert validate(["make-checkpoint", "dense", str(folder), *options.split()]) == 0
    return folder


def greedy(llm: Any, tokens: int = 24) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": IDS}, params, use_tqdm=False)[0].outputs[0].token_ids)


def score(llm: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Log probability of each next token, and the likeliest one at each place."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    places = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs[1:]
    following = torch.tensor([place[token].logprob for place, token in zip(places, ids[1:], strict=True)])
    return following, [next(token for token, entry in place.items() if entry.rank == 1) for place in places]


def test_real_checkpoint_agrees_with_exllamav3(engine):
    if not SMOLLM2.is_dir():
        pytest.skip("shared/data is not here")
    from safetensors.torch import load_file

    reference = load_file(SMOLLM2 / "exllamav3_reference.safetensors")
    llm = engine(SMOLLM2)
    worst, equal, places = 0.0, 0, 0
    for text in range(3):
        ids = reference[f"ids{text}"].flatten().tolist()
        logprobs, top = score(llm, ids)
        worst = max(worst, (logprobs - reference[f"logprob_next{text}"]).abs().mean().item())
        equal += int((torch.tensor(top) == reference[f"top1_{text}"][: len(top)]).sum())
        places += len(top)
    print(f"worst mean |Δ logprob| {worst:.4f}, top tokens equal {equal}/{places}")
    assert worst <= 0.02
    assert equal >= 0.98 * places


def test_graphs_change_nothing(engine, checkpoint):
    with_graphs = greedy(engine(checkpoint))
    assert with_graphs == greedy(engine(checkpoint, enforce_eager=True))


def test_native_agrees_with_the_torch_provider(engine, checkpoint, monkeypatch):
    ours = score(engine(checkpoint), IDS)[0]
    monkeypatch.setenv("VLLM_EXL3_BACKEND", "torch")
    theirs = score(engine(checkpoint, enforce_eager=True), IDS)[0]
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_wake_and_reload_keep_the_answers(engine, checkpoint, level):
    llm = engine(checkpoint, enable_sleep_mode=True)
    before = greedy(llm)
    free = torch.cuda.mem_get_info()[0]
    llm.sleep(level=level)
    assert torch.cuda.mem_get_info()[0] > free
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    assert greedy(llm) == before


def test_two_engines_one_after_the_other(engine, checkpoint):
    first = greedy(engine(checkpoint))
    assert greedy(engine(checkpoint)) == first
