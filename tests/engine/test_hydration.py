"""How a draft gets its quantization configuration: from files that are there, once, and never from the network."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.engine.scoring import greedy
from tests.oracle import Oracle
from validate.__main__ import main as validate
from vllm.model_executor.layers.quantization.exl3 import EXL3Config
from vllm.model_executor.layers.quantization.exl3_trellis import repository

IDS = [7, 3, 250, 11, 98, 402, 5, 5, 31, 77]


def make(folder: Path, arguments: str) -> Path:
    """A new checkpoint."""
    form, *rest = arguments.split()
    assert validate(["make-checkpoint", form, str(folder), *rest]) == 0
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose headers were read, as it happens."""
    repository._read_unchanged.cache_clear()
    seen: list[Path] = []
    read = repository.read_folder
    monkeypatch.setattr(repository, "read_folder", lambda folder: seen.append(folder) or read(folder))
    return seen


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses outside this machine that anything tried to reach; it is told that there is no network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # nothing but the code keeps it from asking
    tried: list[Any] = []
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
            return connect(self, address)
        tried.append(address)
        raise OSError(f"{address}: no network in this test")

    def look_up(host: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(host, str) and "hugging" in host:
            tried.append(host)
            raise socket.gaierror(f"{host}: no network in this test")
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return tried


def test_mtp_draft_asks_nothing_that_its_target_has_read(engine, tmp_path, reads, no_network):
    folder = make(tmp_path / "model", "moe --family glm4_moe --layers 2 --drafts 1 --layout shared_h --rates 3,4")
    llm = engine(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    assert greedy(llm, IDS, 8) == Oracle(folder).greedy(IDS, 8)
    assert reads == [folder]
    assert no_network == []


def test_dense_draft_in_a_folder_of_its_own(engine, tmp_path, reads, no_network):
    target = make(tmp_path / "target", "dense --layers 2")
    draft = make(tmp_path / "draft", "dense --layers 2 --rates 6 --codebooks mul1")
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    llm = engine(target, speculative_config=speculation)
    assert greedy(llm, IDS, 8) == Oracle(target).greedy(IDS, 8)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = [layer for layer in worker.get_draft_model().modules() if hasattr(layer, "exl3_owner")]
    assert {layer.exl3_owner.role for layer in layers} == {"draft"}
    assert reads == [target, draft]
    assert no_network == []


def test_hub_model_in_the_cache_is_read_there(tmp_path, reads, no_network, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository_folder = tmp_path / "models--someone--draft"
    snapshot = make(repository_folder / "snapshots" / "0123abcd", "dense --layers 1")
    (repository_folder / "refs").mkdir()
    (repository_folder / "refs" / "main").write_text("0123abcd")
    config = EXL3Config.from_config({})
    config.maybe_update_config("someone/draft")
    assert len(config.linears) == 8
    assert reads == [snapshot]
    assert no_network == []


def test_what_was_read_is_read_again_when_files_change(tmp_path, reads):
    folder = make(tmp_path / "model", "dense --layers 1 --rates 3")
    rates = []
    for _ in range(2):
        config = EXL3Config.from_config({})
        config.maybe_update_config(str(folder))
        rates.append(config.linears["model.layers.0.mlp.up_proj"].rate)
    assert reads == [folder]
    shutil.copy(make(tmp_path / "other", "dense --layers 1 --rates 5") / "model.safetensors", folder)
    config = EXL3Config.from_config({})
    config.maybe_update_config(str(folder))
    rates.append(config.linears["model.layers.0.mlp.up_proj"].rate)
    assert rates == [3, 3, 5]
    assert reads == [folder, folder]
