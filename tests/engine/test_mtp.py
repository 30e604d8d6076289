"""MTP drafts: a draft changes how fast the target speaks, never what it says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.server import serve
from tests.oracle import Checkpoint, Oracle
from validate.__main__ import main as validate
from vllm.model_executor.layers.quantization.exl3_trellis.scratch import scratch

GLM = "--family glm4_moe --drafts 1 --seed 3"
PROMPTS = [[7, 3, 250, 11, 98, 402, 5, 5, 31, 77], [9, 9, 1, 44], [500]]
TOKENS = 32


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    """make(arguments) -> folder of a new mixture-of-experts checkpoint."""

    def write(arguments: str, name: str = "checkpoint") -> Path:
        folder = tmp_path / name
        assert validate(["make-checkpoint", "moe", str(folder), *arguments.split()]) == 0
        return folder

    return write


@pytest.fixture
def speak(engine: Callable[..., Any]) -> Callable[..., Any]:
    """speak(folder, drafts=k) -> (tokens said to each prompt, tokens accepted of those drafted, the engine)."""

    def run(folder: Path, drafts: int = 0, **options: Any) -> tuple[list[list[int]], int, Any]:
        speculation = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
        llm = engine(folder, speculative_config=speculation, disable_log_stats=False, **options)
        return (*continue_prompts(llm), llm)

    return run


def continue_prompts(llm: Any) -> tuple[list[list[int]], int]:
    """What the engine says to PROMPTS, greedily, and how many drafted tokens it accepted for that."""
    from vllm import SamplingParams

    before = accepted(llm)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers], accepted(llm) - before


def accepted(llm: Any) -> int:
    """Drafted tokens that the engine has accepted so far."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


def draft_of(llm: Any) -> torch.nn.Module:
    """The draft that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_draft_model()


def target_of(llm: Any) -> torch.nn.Module:
    """The target that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()


def said_by_oracle(folder: Path) -> list[list[int]]:
    """What the model of `folder` says to PROMPTS."""
    oracle = Oracle(folder)
    return [oracle.greedy(ids, TOKENS) for ids in PROMPTS]


def spoil(draft: torch.nn.Module) -> None:
    """Overwrite what is the draft's own, not its target's, with noise."""
    torch.manual_seed(0)
    for name, parameter in draft.named_parameters():
        if "mtp_block" in name or "eh_proj" in name:
            parameter.data.normal_()


def replace_module(folder: Path, module: str, tensors: dict[str, torch.Tensor]) -> None:
    """Store `tensors` instead of those of `module`."""
    stored = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(f"{module}.")}
    assert len(kept) < len(stored)
    save_file(kept | tensors, folder / "model.safetensors", metadata={"format": "pt"})


def store_plain(folder: Path, module: str) -> None:
    """Store the decoded weight of `module` instead of its EXL3 tensors."""
    weight = torch.from_numpy(Checkpoint(folder).linear(module).T.copy())
    replace_module(folder, module, {f"{module}.weight": weight.bfloat16()})


DRAFT_HEAD = "model.layers.2.shared_head.head"
HEADS: dict[str, Callable[[Path], None]] = {
    "stored as EXL3": lambda folder: None,
    "unquantized": lambda folder: store_plain(folder, DRAFT_HEAD),
    "EXL3 beside an unquantized lm_head": lambda folder: store_plain(folder, "lm_head"),
    "not stored": lambda folder: replace_module(folder, DRAFT_HEAD, {}),
}
LAYOUTS = {
    "ordinary": "--rates 3,4,2",
    "rank-sliced, mixed": "--layout per_expert --tp 2 --rates 3,4",
    "rank-sliced, shared rotations": "--layout shared_h --tp 2 --rates 3,4",
}
MORE_LAYOUTS = {
    "unquantized experts": "--plain *.experts.*",
    "rank-sliced, uniform": "--layout per_expert --tp 2 --rates 4",
}


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(arguments, id=name) for name, arguments in LAYOUTS.items()),
        *(pytest.param(arguments, id=name, marks=pytest.mark.slow) for name, arguments in MORE_LAYOUTS.items()),
    ],
)
def test_drafts_do_not_change_what_is_said(make, speak, layout):
    folder = make(f"{GLM} {layout} --agreeing")
    expected = said_by_oracle(folder)
    for drafts in (1, 3):
        said, taken, llm = speak(folder, drafts)
        assert said == expected
        assert taken > len(PROMPTS) * TOKENS // 10
    spoil(draft_of(llm))
    said, taken_from_noise = continue_prompts(llm)
    assert said == expected
    assert taken_from_noise < taken // 2


@pytest.mark.slow
def test_an_untrained_draft_as_stored(make, speak):
    folder = make(f"{GLM} --layout per_expert --tp 2 --rates 3,4")
    said, _, _ = speak(folder)
    assert said == said_by_oracle(folder)
    for drafts in (1, 3):
        assert speak(folder, drafts)[0] == said


def test_acceptance_shows_in_metrics(make, tmp_path):
    folder = make(f"{GLM} --agreeing")
    speculation = '{"method": "mtp", "num_speculative_tokens": 3}'
    with serve(folder, tmp_path, "--dtype", "float32", "--speculative-config", speculation) as server:
        body = {
            "prompt": PROMPTS[0],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = server.post("/v1/completions", body)
        metrics = server.get("/metrics")
    assert answer["choices"][0]["token_ids"] == Oracle(folder).greedy(PROMPTS[0], TOKENS)
    values = {}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        values[name] = float(re.search(rf"^vllm:spec_decode_{name}_total\S* (\S+)$", metrics, re.MULTILINE)[1])
    assert values["num_draft_tokens"] == 3 * values["num_drafts"]
    assert 0 < values["num_accepted_tokens"] < values["num_draft_tokens"]
    # Every step says what it accepted and one token more.
    assert TOKENS <= 1 + values["num_drafts"] + values["num_accepted_tokens"] <= TOKENS + 3


@pytest.mark.parametrize("store", ["stored as EXL3", "unquantized"])
def test_reload_brings_back_the_draft_too(make, speak, store):
    folder = make(f"{GLM} --layers 2 --agreeing")
    HEADS[store](folder)
    said, taken, llm = speak(folder, 3, enable_prefix_caching=False)
    spoil(draft_of(llm))
    assert continue_prompts(llm)[1] < taken
    llm.collective_rpc("reload_weights")
    assert continue_prompts(llm) == (said, taken)


def test_reload_takes_the_weights_that_are_there_now(make, speak):
    folder = make(f"{GLM} --agreeing", "served")
    other = make(f"{GLM.replace('--seed 3', '--seed 4')} --agreeing", "other")
    expected, taken, _ = speak(other, 3, enable_prefix_caching=False)
    said, _, llm = speak(folder, 3, enable_prefix_caching=False)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    llm.collective_rpc("reload_weights")
    assert said != expected
    assert continue_prompts(llm) == (expected, taken)


def stamped(model: torch.nn.Module) -> dict[str, Any]:
    """The owners of the EXL3 layers of a model, by name."""
    return {name: layer.exl3_owner for name, layer in model.named_modules() if hasattr(layer, "exl3_owner")}


def test_target_and_draft_are_told_apart(make, speak):
    _, _, llm = speak(make(f"{GLM} --layout per_expert --tp 2 --rates 3"), 1)
    target, draft = stamped(target_of(llm)), stamped(draft_of(llm))
    lent = [name for name in draft if name.endswith("head")]  # the target's, once loaded
    assert {owner.role for owner in target.values()} == {"target"}
    assert {owner.role for name, owner in draft.items() if name not in lent} == {"draft"}
    experts = [next(owner for name, owner in model.items() if name.endswith("experts")) for model in (target, draft)]
    # One configuration built both, with layers of the same shapes: all that differs is the role.
    assert experts[0].model is experts[1].model
    rows = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert experts[0].capacity == experts[1].capacity == rows
    assert scratch(experts[0], "arena", object) is not scratch(experts[1], "arena", object)


def test_two_engines_at_once_share_no_scratch(make, speak):
    folder = make(f"{GLM} --layers 2 --layout per_expert --tp 2 --rates 3")
    engines = [speak(folder, 1)[2] for _ in range(2)]
    owners = {id(owner.model) for llm in engines for owner in stamped(target_of(llm)).values()}
    assert len(owners) == 2


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(store, id=name, marks=pytest.mark.slow if name == "unquantized" else ())
        for name, store in HEADS.items()
    ],
)
def test_head_of_the_draft(make, speak, store):
    folder = make(f"{GLM} --layers 2 --agreeing")
    store(folder)
    said, taken, _ = speak(folder, 2)
    assert said == said_by_oracle(folder)
    assert taken > len(PROMPTS) * TOKENS // 10


def test_draft_of_a_latent_attention_family(make, speak):
    folder = make("--family deepseek_v3 --layers 2 --drafts 1 --agreeing --layout shared_h --tp 2 --rates 3,4")
    said, taken, _ = speak(folder, 2)
    assert said == said_by_oracle(folder)
    assert taken > len(PROMPTS) * TOKENS // 10


def test_several_mtp_layers(make, speak):
    folder = make("--family glm4_moe --layers 2 --drafts 2 --agreeing --rates 4 --seed 3")
    said, taken, llm = speak(folder, 2)
    assert said == said_by_oracle(folder)
    assert taken > len(PROMPTS) * TOKENS // 10
    assert {re.search(r"layers\.(\d+)", name)[1] for name in stamped(draft_of(llm))} == {"2", "3"}


def test_ranks_of_a_draft_keep_their_own_slices(make, engine, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # upstream wants a NUMA node for each worker otherwise
    folder = make(f"{GLM} --layers 2 --layout shared_h --tp 2 --rates 3,4 --agreeing")
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    llm = engine(folder, speculative_config=speculation, disable_log_stats=False, tensor_parallel_size=2)
    said, taken = continue_prompts(llm)
    assert said == said_by_oracle(folder)
    assert taken > len(PROMPTS) * TOKENS // 10


@pytest.mark.parametrize("drafts", [0, 2], ids=["alone", "with MTP"])
def test_unquantized_model_loads_as_before(make, speak, drafts):
    folder = make(f"{GLM} --layers 2 --plain * --agreeing")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantization_config.json").unlink()
    said, _, llm = speak(folder, drafts)
    assert said == said_by_oracle(folder)
    assert llm.llm_engine.vllm_config.quant_config is None
    assert stamped(target_of(llm)) == {}
