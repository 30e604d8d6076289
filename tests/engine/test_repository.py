"""Where a model's headers are looked for: a download that stopped halfway, and a model that no folder holds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from validate.__main__ import main as validate
from vllm.model_executor.layers.quantization.exl3 import EXL3Config
from vllm.model_executor.layers.quantization.exl3_trellis.repository import local_folder
from vllm.model_executor.layers.quantization.exl3_trellis.safetensors_headers import (
    INDEX,
    CheckpointError,
    read_folder,
)

MODEL = "someone/sharded"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint of several files."""
    folder = tmp_path / "whole"
    assert validate(["make-checkpoint", "moe", str(folder), "--layers", "2", "--file-per-layer"]) == 0
    return folder


@pytest.fixture
def snapshot(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--sharded"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    return Path(shutil.copytree(whole, repository / "snapshots" / "0123abcd"))


def cut(snapshot: Path) -> list[str]:
    """As a download that stopped leaves it: the names of what is missing."""
    lost = sorted(path.name for path in snapshot.glob("*.safetensors"))[1:]
    for name in lost:
        (snapshot / name).unlink()
    return lost


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let upstream's reading of a hub's headers find those of a folder, without a hub."""
    found = {name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in read_folder(folder).items()}
    monkeypatch.setattr(
        "vllm.transformers_utils.config.get_safetensors_params_metadata", lambda model, revision=None: found
    )


def modules(model: str) -> tuple[set[str], set[str]]:
    config = EXL3Config.from_config({})
    config.maybe_update_config(model)
    return set(config.linears), set(config.experts)


def test_a_whole_snapshot_is_local(snapshot):
    assert local_folder(MODEL, None) == snapshot
    assert modules(MODEL) == modules(str(snapshot))


def test_of_a_stopped_download_the_hub_is_asked(whole, snapshot, monkeypatch):
    cut(snapshot)
    assert local_folder(MODEL, None) is None
    answer(monkeypatch, whole)
    assert modules(MODEL) == modules(str(whole))


@pytest.mark.parametrize("lost", ["shards", "the index", "all"])
def test_a_stopped_download_without_a_hub_says_what_is_missing(snapshot, monkeypatch, lost):
    """Upstream answers from the cache, with the part that is there, where it cannot reach the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    missing = cut(snapshot) if lost == "shards" else [f"{INDEX} or model.safetensors"]
    if lost != "shards":
        (snapshot / INDEX).unlink()
    if lost == "all":
        for path in snapshot.glob("*.safetensors"):
            path.unlink()
    wanted = f"{snapshot}: not downloaded as a whole: {', '.join(missing)} missing; download it first"
    for model in (MODEL, str(snapshot)):  # vLLM itself replaces the one by the other
        if lost == "the index":  # files by names of their own: those of the cache are all that can be known
            assert modules(model)[0]
            continue
        with pytest.raises(CheckpointError) as refusal:
            modules(model)
        assert refusal.value.problems == [wanted]


def test_a_model_in_object_storage_is_refused(whole, tmp_path, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    def pull(url: str, folder: str, allow: list[str] | None = None, ignore: list[str] | None = None) -> None:
        for path in whole.glob("*.json"):
            shutil.copy(path, folder)

    monkeypatch.setenv("VLLM_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("vllm.transformers_utils.runai_utils.runai_pull_files", pull)
    why = "the headers of a model in object storage (s3://, gs://, az://) cannot be read before it is loaded"
    with pytest.raises(Exception, match=re.escape(f"EXL3 checkpoint refused: {why}")):
        EngineArgs(model="s3://bucket/model", load_format="runai_streamer", max_model_len=256).create_engine_config()


def test_an_unreadable_index_is_named(snapshot):
    (snapshot / INDEX).write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=re.escape(f"{snapshot / INDEX}: not a safetensors index")):
        modules(MODEL)
