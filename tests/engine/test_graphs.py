# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of dense models, as vLLM's own configuration settles them: none by default of what none should hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from validate.__main__ import main as validate
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.exl3_trellis.backends import exllamav3, native
from vllm.platforms import current_platform

NATIVE, BOTH, THEIRS, NONE = (True, False), (True, True), (False, True), (False, False)
# The default is full and piecewise graphs; here, where vLLM compiles for a CPU, no pieces are.
DEFAULT, OFF = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE

# whether native's and exllamav3's extensions are installed, environment, what the user chose -> mode, provider named
GRAPHS = [
    (NATIVE, {}, {}, DEFAULT, None),
    (BOTH, {}, {}, DEFAULT, None),
    (THEIRS, {}, {}, OFF, "exllamav3"),
    (NONE, {}, {}, OFF, "torch"),
    (BOTH, {"FUSED": "0"}, {}, OFF, "exllamav3"),
    (NATIVE, {"FUSED": "0"}, {}, DEFAULT, None),  # decoded weights and a plain product
    (BOTH, {"BACKEND": "exllamav3"}, {}, OFF, "exllamav3"),
    (NATIVE, {"BACKEND": "torch"}, {}, OFF, "torch"),
    (THEIRS, {"BACKEND": "native"}, {}, DEFAULT, None),  # refused when the model is built
    (BOTH, {"BACKEND": "exllamav3"}, {"cudagraph_mode": "FULL"}, CUDAGraphMode.FULL, None),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint."""
    made = tmp_path_factory.mktemp("graphs") / "checkpoint"
    assert validate(["make-checkpoint", "dense", str(made)]) == 0
    return made


def configure(folder: Path, **chosen: Any) -> Any:
    """The compilation part of vLLM's configuration for a checkpoint, nothing else set."""
    args = EngineArgs(model=str(folder), max_model_len=256, compilation_config={"mode": 3} | chosen)
    return args.create_engine_config().compilation_config


@pytest.mark.parametrize(("installed", "variables", "chosen", "mode", "named"), GRAPHS)
def test_default_graphs_hold_only_what_they_should(
    folder, monkeypatch, caplog_vllm, installed, variables, chosen, mode, named
):
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _self=None: True)
    for provider, there in zip((native, exllamav3), installed, strict=True):
        monkeypatch.setattr(provider, "installed", lambda there=there: there)
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_EXL3_{name}", value)
    settled = configure(folder, **chosen)
    assert settled.cudagraph_mode == mode
    said = [line for line in caplog_vllm.messages if "no CUDA graphs" in line]
    assert said == ([f"EXL3: no CUDA graphs, because {named} runs the linear layers"] if named else [])
    assert settled.mode != CompilationMode.NONE  # torch.compile stays on


def test_a_cpu_hears_nothing_of_graphs(folder, caplog_vllm):
    configure(folder)
    assert not [line for line in caplog_vllm.messages if "CUDA graphs" in line]
