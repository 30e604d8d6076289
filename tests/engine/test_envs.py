"""The fork's environment variables as vLLM sees them."""

from __future__ import annotations

import re

import pytest

from tests.engine.server import serve_and_fail
from validate.__main__ import main as validate
from vllm import envs, exl3_envs

NAMES = [knob.name for knob in exl3_envs.KNOBS]


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_is_known_to_vllm(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    assert name in envs.environment_variables
    assert getattr(envs, name) == exl3_envs.environment_variables[name]()


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize("knob", exl3_envs.KNOBS, ids=NAMES)
def test_blank_is_unset(monkeypatch, knob, blank):
    monkeypatch.setenv(knob.name, blank)
    assert getattr(envs, knob.name) == knob.default


@pytest.mark.parametrize("knob", exl3_envs.KNOBS, ids=NAMES)
def test_bad_value_names_its_variable(monkeypatch, knob):
    monkeypatch.setenv(knob.name, "nonsense")
    with pytest.raises(ValueError, match=f"^{knob.name}='nonsense': want {knob.wanted}$"):
        getattr(envs, knob.name)


def test_bad_values_are_refused_at_once_by_the_front_end(monkeypatch, tmp_path):
    """Making the configuration is all that runs before a worker starts."""
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path / "checkpoint"
    assert validate(["make-checkpoint", "dense", str(folder)]) == 0
    for knob in exl3_envs.KNOBS:
        monkeypatch.setenv(knob.name, "nonsense")
    messages = [f"{knob.name}='nonsense': want {knob.wanted}" for knob in exl3_envs.KNOBS]
    with pytest.raises(ValueError, match=re.escape("; ".join(messages))):
        EngineArgs(model=str(folder), max_model_len=256).create_engine_config()


@pytest.mark.slow
def test_a_server_refuses_a_bad_value_before_a_worker_starts(tmp_path):
    folder = tmp_path / "checkpoint"
    assert validate(["make-checkpoint", "dense", str(folder)]) == 0
    code, log, _ = serve_and_fail(folder, tmp_path, VLLM_EXL3_LOG_PATH_SELECTION="yes")
    assert code != 0
    assert "VLLM_EXL3_LOG_PATH_SELECTION='yes': want 0 or 1" in log
    assert "EngineCore" not in log


VALUES = {
    ("VLLM_EXL3_BACKEND", "Torch"): "torch",
    ("VLLM_EXL3_FUSED", "0"): False,
    ("VLLM_EXL3_TRELLIS_MIN_M", "4"): 4,
    ("VLLM_EXL3_TRELLIS_BLOCK_M", "16"): 16,
    ("VLLM_EXL3_PREFILL_CAPACITY", " 1024 "): 1024,
}


@pytest.mark.parametrize(("variable", "value"), VALUES.items(), ids=lambda item: str(item))
def test_values_are_typed(monkeypatch, variable, value):
    monkeypatch.setenv(*variable)
    assert getattr(envs, variable[0]) == value


def test_cache_key_holds_what_changes_the_graph_and_nothing_else():
    factors = envs.compile_factors()
    assert {name for name in NAMES if name in factors} == {"VLLM_EXL3_BACKEND", "VLLM_EXL3_FUSED"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("native", "no EXL3 kernel for linear .*native: runs on CUDA, not on cpu"),
        ("b12x", "VLLM_EXL3_BACKEND=b12x: it runs routed experts only, and this checkpoint has none"),
    ],
)
def test_forced_provider_that_cannot_run_is_an_error(engine, tmp_path, monkeypatch, name, why):
    folder = tmp_path / "checkpoint"
    assert validate(["make-checkpoint", "dense", str(folder)]) == 0
    monkeypatch.setenv("VLLM_EXL3_BACKEND", name)
    with pytest.raises(Exception, match=why):
        engine(folder)
