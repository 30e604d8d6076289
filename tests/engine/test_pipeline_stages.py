"""What each stage of a pipeline loads, without a pipeline: upstream's CPU engine cannot run one.

The models and the loader are real; only the group that says which stage this is does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.conftest import LATENT_ATTENTION
from tests.engine.server import free_port
from validate.__main__ import main as validate

LAYERS = 5  # and an MTP layer
SHAPE = f"--layers {LAYERS} --first-dense 1 --drafts 1 --experts 4"
CHECKPOINTS = {
    "GLM4-MoE, ordinary": f"--family glm4_moe {SHAPE} --rates 3,4",
    "GLM4-MoE, shared rotations": f"--family glm4_moe {SHAPE} --layout shared_h --rates 3,4 --tp 2",
    "DeepSeek-V3, mixed": f"--family deepseek_v3 {SHAPE} --layout per_expert --rates 3,4 --tp 2",
}
STAGES = 2
OWN = ({0, 1, 2}, {3, 4})  # layers of each stage: the odd one goes to the first of two


@pytest.fixture(scope="module", params=CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "model"
    assert validate(["make-checkpoint", "moe", str(folder), *request.param.split()]) == 0
    return folder


@pytest.fixture
def one_process() -> Iterator[None]:
    """vLLM's groups of processes, all of this one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def load(one_process: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.nn.Module]:
    """load(folder, stage, stages, draft=False) -> the target of that stage, or the draft, loaded and prepared."""
    from vllm.compilation.backends import set_model_tag
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models import utils

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as the CPU's worker does
    speculation = {"method": "mtp", "num_speculative_tokens": 1}

    def run(folder: Path, stage: int, stages: int, draft: bool = False) -> torch.nn.Module:
        group = SimpleNamespace(
            rank_in_group=stage, world_size=stages, is_first_rank=stage == 0, is_last_rank=stage == stages - 1
        )
        monkeypatch.setattr(parallel_state, "_PP", group)
        # Missing layers are remembered by the model's address, which the model of another stage may have had.
        monkeypatch.setattr(utils, "_model_to_pp_missing_layer_names", {})
        config = EngineArgs(
            model=str(folder), dtype="float32", enforce_eager=True, max_model_len=256, speculative_config=speculation,
            attention_backend=LATENT_ATTENTION,
        ).create_engine_config()  # fmt: skip
        model_config = config.speculative_config.draft_model_config if draft else config.model_config
        with set_current_vllm_config(config), set_model_tag("eagle_head") if draft else nullcontext():
            return get_model(vllm_config=config, model_config=model_config)

    return run


def layers_of(names: Any) -> set[int]:
    """Numbers of the layers that the names belong to."""
    found = (re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in names)
    return {int(match[1]) for match in found if match}


def test_each_stage_has_its_layers_and_nothing_else(folder, load, read):
    whole = dict(load(folder, 0, 1).named_parameters())
    experts = {name for name in load_file(folder / "model.safetensors") if ".experts." in name}
    together: dict[str, torch.Tensor] = {}
    for stage in range(STAGES):
        read.clear()
        model = load(folder, stage, STAGES)
        parameters = dict(model.named_parameters())
        assert layers_of(parameters) == OWN[stage]
        assert {name for name in read if ".experts." in name} == {n for n in experts if layers_of([n]) <= OWN[stage]}
        assert {owner.role for m in model.modules() if (owner := getattr(m, "exl3_owner", None))} == {"target"}
        assert not together.keys() & parameters.keys()
        together |= parameters
    assert together.keys() == whole.keys()
    for name, parameter in whole.items():
        assert torch.equal(parameter, together[name]), name


def test_draft_is_whole_on_the_last_stage(folder, load, read):
    whole = dict(load(folder, 0, 1, draft=True).named_parameters())
    read.clear()
    draft = load(folder, STAGES - 1, STAGES, draft=True)
    parameters = dict(draft.named_parameters())
    assert layers_of(parameters) == layers_of(n for n in read if ".experts." in n) == {LAYERS}
    assert {owner.role for m in draft.modules() if (owner := getattr(m, "exl3_owner", None))} == {"draft"}
    assert parameters.keys() == whole.keys()
    for name, parameter in whole.items():
        assert torch.equal(parameter, parameters[name]), name
