"""vLLM's workspaces under EXL3 drafts: who gets a lane, and how many microbatches they are sized for.

The workers are the GPU's; what they decide here needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from validate.__main__ import main as validate

GLM = "--family glm4_moe --layers 2 --plain *.experts.* --drafts 1"
MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A GLM4-MoE with an MTP layer, EXL3 and unquantized."""
    root = tmp_path_factory.mktemp("workspaces")
    for name, more in (("exl3", ""), ("plain", "--plain *")):
        assert validate(["make-checkpoint", "moe", str(root / name), *GLM.split(), *more.split()]) == 0
    config = root / "plain" / "config.json"
    config.write_text(config.read_text().replace('"quantization_config"', '"not_quantized"'))
    return {name: root / name for name in ("exl3", "plain")}


def vllm_config(folder: Path, **options: Any) -> Any:
    """The configuration that `vllm serve FOLDER` would make."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(folder), enforce_eager=True, max_model_len=256, **options).create_engine_config()


@pytest.fixture
def workspace_manager() -> Any:
    """A function that returns vLLM's current workspace manager, which is taken down afterwards."""
    from vllm.v1.worker import workspace

    yield workspace.current_workspace_manager
    workspace.reset_workspace_manager()


def start_worker(config: Any, v2: bool = True) -> None:
    """Run the part of the GPU worker's start that makes the workspace manager."""
    from vllm.v1.worker.gpu_worker import Worker

    worker = object.__new__(Worker)
    worker.vllm_config, worker.use_v2_model_runner, worker.device, worker.rank = config, v2, torch.device("cpu"), 1
    worker._make_model_runner = lambda: None
    worker._init_workspace_and_model_runner()


def lane_of_draft(config: Any) -> int:
    """The lane that the GPU's model runner gives the draft; on a CPU the runner gets no further than deciding it."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = object.__new__(GPUModelRunner)
    with suppress(AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError):
        runner.__init__(config, torch.device("cpu"))
    return runner._draft_workspace_lane


@pytest.mark.parametrize(
    ("model", "speculation", "lane"),
    [
        ("exl3", MTP, 1),
        ("exl3", None, 0),
        ("exl3", {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}, 0),
        ("plain", MTP, 0),
    ],
    ids=["EXL3 with MTP", "EXL3 alone", "EXL3 with n-grams", "unquantized with MTP"],
)
def test_an_exl3_draft_has_its_own_lane(
    folders: dict[str, Path], workspace_manager: Callable[[], Any], model: str, speculation: dict | None, lane: int
) -> None:
    config = vllm_config(folders[model], speculative_config=speculation)
    start_worker(config)
    assert workspace_manager()._num_lanes == 2
    assert lane_of_draft(config) == lane


@pytest.mark.parametrize("v2", [True, False], ids=["runner V2", "runner V1"])
def test_a_second_engine_leaves_the_draft_its_lane(
    folders: dict[str, Path], workspace_manager: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, v2: bool
) -> None:
    from vllm.v1.worker.workspace import use_workspace_lane

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    config = vllm_config(folders["exl3"], speculative_config=MTP)
    start_worker(config)
    start_worker(vllm_config(folders["plain"]), v2)
    with use_workspace_lane(lane_of_draft(config)):
        (scratch,) = workspace_manager().get_simultaneous(((64,), torch.uint8))
    assert scratch.numel() == 64


def test_target_and_draft_do_not_share_memory(
    folders: dict[str, Path], workspace_manager: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.workspace import use_workspace_lane

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    config = vllm_config(folders["exl3"], speculative_config=MTP)
    start_worker(config)
    (target,) = workspace_manager().get_simultaneous(((64,), torch.uint8))
    with use_workspace_lane(lane_of_draft(config)):
        (draft,) = workspace_manager().get_simultaneous(((64,), torch.uint8))
    assert target.data_ptr() != draft.data_ptr()


@pytest.mark.parametrize(
    ("options", "microbatches"),
    [({}, 1), ({"enable_dbo": True}, 2), ({"ubatch_size": 3}, 3)],
    ids=["one", "dual-batch overlap", "three"],
)
def test_every_microbatch_has_its_workspaces(
    folders: dict[str, Path], workspace_manager: Callable[[], Any], options: dict, microbatches: int
) -> None:
    config = vllm_config(folders["plain"])
    for name, value in options.items():
        setattr(config.parallel_config, name, value)  # the CPU platform would refuse them
    start_worker(config)
    assert workspace_manager()._num_ubatches == microbatches


@pytest.mark.parametrize(
    ("model", "level", "tags", "said"),
    [
        ("exl3", 2, None, 1),
        ("exl3", 2, ["weights"], 1),
        ("exl3", 2, ["kv_cache"], 0),  # the weights are still away
        ("exl3", 1, None, 0),
        ("plain", 2, None, 0),
    ],
)
def test_waking_without_weights_is_said(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
    model: str,
    level: int,
    tags: list[str] | None,
    said: int,
) -> None:
    from vllm.v1.worker import gpu_worker

    for name, answer in (("synchronize", None), ("get_memory_info", (1, 1))):
        monkeypatch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    worker = object.__new__(gpu_worker.Worker)
    worker.vllm_config = vllm_config(folders[model])
    worker.model_config, worker.device = worker.vllm_config.model_config, torch.device("cpu")
    layer = torch.nn.Module()
    layer.register_buffer("cos_sin_cache", torch.ones(2))
    worker.model_runner = SimpleNamespace(model=layer, post_kv_cache_wake_up=lambda: None)
    worker._sleep_mode_backend = SimpleNamespace(suspend=lambda level: None, resume=lambda tags: None)
    worker._sleep_saved_parameters, worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = {}, {}, {}
    worker.get_draft_model = worker.synchronize_device = lambda: None
    worker.sleep(level)
    assert not caplog_vllm.text.count("EXL3: sleeping")
    worker.wake_up(tags)
    warning = "EXL3: sleeping at level 2 discarded the weights; every answer is noise until reload_weights"
    assert caplog_vllm.messages.count(warning) == said
