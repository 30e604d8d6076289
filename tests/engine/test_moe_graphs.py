"""Which CUDA graphs vLLM captures by default, where not every number of rows has a plan that a graph can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.quantization.exl3_trellis.support import limit_graphs

NONE, PIECEWISE = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE


class Config(SimpleNamespace):
    """As much of vLLM's configuration as decides the sizes of graphs, with vLLM's own code for that."""

    _set_cudagraph_sizes = VllmConfig._set_cudagraph_sizes


def config_of(step: int, chosen: dict[str, Any], eager: bool = False, seqs: int = 64) -> Config:
    return Config(
        compilation_config=CompilationConfig(**chosen),
        model_config=SimpleNamespace(enforce_eager=eager),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=seqs),
        speculative_config=None,
        performance_mode="balanced",
        uniform_decode_query_len=step,
    )


# environment, rows of a uniform decode step, what the user chose -> mode, most rows of a graph
GRAPHS = [
    ({}, 1, {}, None, None),
    ({"PREFILL_TRELLIS": "0"}, 1, {}, None, 32),
    ({"PREFILL_TRELLIS": "0"}, 3, {}, None, 30),  # 32 would be rounded up to 33
    ({"PREFILL_TRELLIS": "0", "TRELLIS_MAX_M": "2"}, 4, {}, NONE, None),  # none could hold one request's step
    ({"PREFILL_TRELLIS": "0", "TRELLIS_MAX_M": "2"}, 4, {"cudagraph_mode": PIECEWISE}, PIECEWISE, None),
    ({"PREFILL_TRELLIS": "0"}, 4, {"cudagraph_capture_sizes": [64]}, None, None),
    ({"FUSED": "0"}, 1, {}, NONE, None),
    ({"BACKEND": "exllamav3"}, 1, {}, NONE, None),
    ({"FUSED": "0"}, 1, {"cudagraph_mode": PIECEWISE}, PIECEWISE, None),
]


@pytest.mark.parametrize(("variables", "step", "chosen", "mode", "most"), GRAPHS)
def test_default_graphs_hold_no_parity_path(monkeypatch, variables, step, chosen, mode, most):
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_EXL3_{name}", value)
    config = config_of(step, chosen)
    limit_graphs(config)
    compilation = config.compilation_config
    assert (compilation.cudagraph_mode, compilation.max_cudagraph_capture_size) == (mode, most)


WARNED = "EXL3: no CUDA graphs of {} rows: VLLM_EXL3_TRELLIS_MIN_M={} leaves them to the parity path"
# fewest rows, other variables, rows of a step, what the user chose, most requests -> mode, sizes, the warning
SHORT = [
    (1, {}, 1, {}, 8, None, [1, 2, 4, 8, 16], None),
    (2, {}, 1, {}, 8, None, [2, 4, 8, 16], WARNED.format("1", 2)),
    (5, {}, 1, {}, 8, None, [8, 16], WARNED.format("1, 2, 4", 5)),
    (5, {}, 1, {"max_cudagraph_capture_size": 8}, 8, None, [8], WARNED.format("1, 2, 4", 5)),
    (5, {}, 4, {}, 3, None, [8, 12, 16, 24], WARNED.format("1, 2, 4", 5)),
    (5, {}, 1, {"cudagraph_capture_sizes": [1, 8]}, 8, None, [1, 8], None),  # refused when it is captured
    (5, {"PREFILL_TRELLIS": "0"}, 1, {}, 64, None, [8, 16, 24, 32], WARNED.format("1, 2, 4", 5)),
    (5, {"FUSED": "0"}, 1, {}, 8, NONE, [], None),
    (32, {}, 1, {}, 8, NONE, [], "EXL3: no CUDA graphs, of at most 16 rows here: VLLM_EXL3_TRELLIS_MIN_M=32 leaves"),
    (32, {}, 1, {"cudagraph_mode": PIECEWISE}, 8, PIECEWISE, [1, 2, 4, 8, 16], None),
    (8, {}, 3, {"max_cudagraph_capture_size": 8}, 8, NONE, [], "EXL3: no CUDA graphs, of at most 8 rows here: "),
]


@pytest.mark.parametrize(("fewest", "variables", "step", "chosen", "seqs", "mode", "sizes", "warning"), SHORT)
def test_default_graphs_hold_enough_rows_for_a_plan(
    monkeypatch, caplog_vllm, fewest, variables, step, chosen, seqs, mode, sizes, warning
):
    for name, value in ({"TRELLIS_MIN_M": str(fewest)} | variables).items():
        monkeypatch.setenv(f"VLLM_EXL3_{name}", value)
    config = config_of(step, chosen, seqs=seqs)
    caplog_vllm.clear()
    limit_graphs(config)
    assert config.compilation_config.cudagraph_mode == mode
    config._set_cudagraph_sizes()  # as vLLM goes on
    assert config.compilation_config.cudagraph_capture_sizes == sizes
    assert config.compilation_config.max_cudagraph_capture_size == (sizes[-1] if sizes else 0)
    said = [line for line in caplog_vllm.messages if "TRELLIS_MIN_M" in line]
    assert [line[: len(warning or "")] for line in said] == ([warning] if warning else [])


def test_nothing_is_said_of_graphs_without_any(monkeypatch, caplog_vllm):
    monkeypatch.setenv("VLLM_EXL3_TRELLIS_MIN_M", "5")
    config = config_of(1, {}, eager=True)
    limit_graphs(config)
    assert config.compilation_config.cudagraph_capture_sizes is None
    assert not [line for line in caplog_vllm.messages if "EXL3" in line]
