"""EXL3 modules that a model holds as plain layers: the projection of an MTP layer, heads built without a method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.scoring import greedy
from tests.oracle import Oracle, dense_weight
from validate.__main__ import main as validate
from vllm.model_executor.layers.quantization.exl3 import EXL3Config

IDS = [7, 3, 250, 11, 98, 402, 5, 5, 31, 77]
PROJECTION = "model.layers.2.eh_proj"
HIDDEN = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GLM4-MoE with two layers and an MTP layer."""
    arguments = "--family glm4_moe --layers 2 --drafts 1 --agreeing"
    assert validate(["make-checkpoint", "moe", str(tmp_path / "model"), *arguments.split()]) == 0
    return tmp_path / "model"


@pytest.fixture
def draft_of(engine: Callable[..., Any]) -> Callable[..., Any]:
    """draft_of(folder) -> (the engine, its draft)."""

    def start(folder: Path) -> tuple[Any, torch.nn.Module]:
        llm = engine(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        return llm, worker.get_draft_model()

    return start


def store_as_exl3(folder: Path, marker: str, value: int, packed: bool) -> np.ndarray:
    """Replace the MTP layer's projection by random EXL3 tensors; returns the weight [outputs, inputs] they mean."""
    random = np.random.default_rng(0)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{PROJECTION}.weight"]
    trellis = random.integers(-(2**15), 2**15, (2 * HIDDEN // 16, HIDDEN // 16, 16 * 4), dtype=np.int16)
    sides = {"suh": 2 * HIDDEN, "svh": HIDDEN}
    if packed:
        signs = {name[:2]: random.integers(-(2**15), 2**15, size // 16, dtype=np.int16) for name, size in sides.items()}
        bits = {name: np.unpackbits(words.view(np.uint8), bitorder="little") for name, words in signs.items()}
        vectors = {name: (1 - 2.0 * bits[name[:2]]).astype(np.float16) for name in sides}
        stored = signs
    else:
        vectors = {name: random.normal(0, 0.05, size).astype(np.float16) for name, size in sides.items()}
        stored = vectors
    tensors |= {f"{PROJECTION}.{name}": torch.from_numpy(vector) for name, vector in stored.items()}
    tensors[f"{PROJECTION}.trellis"] = torch.from_numpy(trellis)
    if marker != "3inst":
        tensors[f"{PROJECTION}.{marker}"] = torch.tensor(value - 2**32, dtype=torch.int32)
    save_file(tensors, path, metadata={"format": "pt"})
    return dense_weight(trellis, vectors["suh"], vectors["svh"], marker).T


@pytest.mark.parametrize(
    ("marker", "value", "packed"), [("mcg", 0xCBAC1FED, False), ("3inst", 0, True)], ids=["mcg", "3inst, legacy signs"]
)
def test_projection_of_an_mtp_layer_is_decoded(draft_of, folder, marker, value, packed):
    expected = torch.from_numpy(store_as_exl3(folder, marker, value, packed).copy())
    llm, draft = draft_of(folder)
    weight = draft.get_parameter(f"{PROJECTION}.weight")
    torch.testing.assert_close(weight.data, expected, atol=1e-3 * float(expected.std()), rtol=1e-3)
    assert greedy(llm, IDS, 8) == Oracle(folder).greedy(IDS, 8)
    weight.data.zero_()
    llm.collective_rpc("reload_weights")
    torch.testing.assert_close(weight.data, expected, atol=1e-3 * float(expected.std()), rtol=1e-3)


@pytest.fixture
def without_method(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """without_method(name): a layer called so is built as by a model that hands it no quantization configuration."""
    ask = EXL3Config.get_quant_method

    def forget(forgotten: str) -> None:
        monkeypatch.setattr(
            EXL3Config,
            "get_quant_method",
            lambda self, layer, prefix: None if prefix == forgotten else ask(self, layer, prefix),
        )

    return forget


def test_head_of_a_target_is_decoded(engine, folder, without_method):
    without_method("lm_head")
    llm = engine(folder)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert not hasattr(worker.get_model().lm_head, "exl3_owner")
    assert greedy(llm, IDS, 8) == Oracle(folder).greedy(IDS, 8)


def test_head_that_a_draft_is_lent_is_not_decoded(draft_of, folder, without_method, monkeypatch):
    from vllm.model_executor.layers.quantization.exl3_trellis import plain_layers

    decoded = []
    decode = plain_layers._decode
    monkeypatch.setattr(plain_layers, "_decode", lambda module, *rest: decoded.append(module) or decode(module, *rest))
    without_method("model.layers.2.head")
    llm, draft = draft_of(folder)
    assert decoded == []
    head = draft.get_submodule("model.layers.2.shared_head.head")
    target = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()
    assert head is target.lm_head
    assert greedy(llm, IDS, 8) == Oracle(folder).greedy(IDS, 8)
