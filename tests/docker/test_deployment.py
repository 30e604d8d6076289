# SPDX-License-Identifier: Apache-2.0
"""Preset and variables to one command, without a container."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from validate import deployment, machine, preflight
from validate.deployment import DeploymentError, resolve
from validate.preflight import Ranks

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "docker/presets"
CPU = {"target": "cpu", "build": "0.32.0+exl3.1.cpu-0123"}
GLM = "glm-5.2-exl3"


def options(*extra: str, build: dict[str, str] | None = None, **environment: str) -> dict[str, str]:
    """option -> value of the command that the variables make; a flag's value is empty."""
    command = resolve(environment, extra, PRESETS, build or {}).command()
    assert command[:2] == ["vllm", "serve"]
    found, last = {}, ""
    for word in command[3:]:
        if word.startswith("--"):
            last = word
            found[last] = ""
        else:
            found[last] = word
    return found


def test_nothing_set_serves_the_mounted_checkpoint() -> None:
    plan = resolve({}, [], PRESETS, {})
    assert plan.command() == shlex.split("vllm serve /model --host 0.0.0.0 --port 8000 --quantization exl3")


def test_the_cpu_image_compiles_nothing() -> None:
    assert "--enforce-eager" in options(build=CPU)
    assert "--enforce-eager" not in options()


SET = {
    "TP": ("2", "--tensor-parallel-size"),
    "DCP": ("4", "--decode-context-parallel-size"),
    "MAX_MODEL_LEN": ("128k", "--max-model-len"),
    "GPU_MEMORY_UTILIZATION": ("0.9", "--gpu-memory-utilization"),
    "KV_CACHE_DTYPE": ("fp8_e4m3", "--kv-cache-dtype"),
    "SERVED_MODEL_NAME": ("glm", "--served-model-name"),
}


@pytest.mark.parametrize("name", SET)
def test_a_variable_wins_over_the_preset_and_blank_means_unset(name: str) -> None:
    value, option = SET[name]
    assert options(PRESET=GLM, **{name: value})[option] == value
    assert options(PRESET=GLM, **{name: " "}) == options(PRESET=GLM)


def test_every_variable_is_tested() -> None:
    assert {variable.name for variable in deployment.VARIABLES} == set(SET)


MTP = {
    "preset": ({"PRESET": GLM}, 3),
    "changed": ({"PRESET": GLM, "MTP_TOKENS": "5"}, 5),
    "zero": ({"PRESET": GLM, "MTP_TOKENS": "0"}, None),
    "off": ({"PRESET": GLM, "ENABLE_MTP": "0"}, None),
    "off wins": ({"PRESET": GLM, "ENABLE_MTP": "0", "MTP_TOKENS": "2"}, None),
    "asked for": ({"MTP_TOKENS": "2"}, 2),
    "not asked for": ({}, None),
}


@pytest.mark.parametrize("case", MTP)
def test_drafting(case: str) -> None:
    environment, tokens = MTP[case]
    found = options(**environment).get("--speculative-config")
    wanted = None if tokens is None else {"method": "mtp", "num_speculative_tokens": tokens}
    assert (json.loads(found) if found else None) == wanted


def test_everything_wrong_is_told_at_once() -> None:
    environment = {
        "PRESET": "none", "TP": "0", "DCP": "x", "MAX_MODEL_LEN": "long", "GPU_MEMORY_UTILIZATION": "1.5",
        "KV_CACHE_DTYPE": "f p", "SERVED_MODEL_NAME": "a b", "MTP_TOKENS": "ten", "ENABLE_MTP": "yes",
        "LISTEN_PORT": "0", "DRY_RUN": "false",
    }  # fmt: skip
    with pytest.raises(DeploymentError) as error:
        resolve(environment, [], PRESETS, {})
    assert error.value.problems == [
        "PRESET=none: want one of generic, glm-5.2-exl3",
        "TP=0: want a number of GPUs, 1 or more",
        "DCP=x: want a number, 1 or more",
        "MAX_MODEL_LEN=long: want a number of tokens, say 131072 or 128k, or auto",
        "GPU_MEMORY_UTILIZATION=1.5: want a fraction of the memory, above 0 and at most 1",
        "KV_CACHE_DTYPE=f p: want a name, say fp8",
        "SERVED_MODEL_NAME=a b: want one word",
        "ENABLE_MTP=yes: want 0 or 1",
        "DRY_RUN=false: want 0 or 1",
        "MTP_TOKENS=ten: want 0 to 9",
        "LISTEN_PORT=0: want a port, 1 to 65535",
    ]


@pytest.mark.parametrize(
    "extra, size", [((), 4), (("-tp", "2"), 2), (("--tensor-parallel-size=8",), 8), (("--seed", "1"), 4)]
)
def test_the_command_line_has_the_last_word_on_ranks(extra: tuple[str, ...], size: int) -> None:
    assert resolve({"PRESET": GLM}, extra, PRESETS, {}).ranks == Ranks(tp=size)


def test_ranks_of_stages_and_machines() -> None:
    extra = ["--pipeline-parallel-size=2", "-n", "3", "-tp", "many"]  # vllm serve says what is wrong with the last
    assert resolve({}, extra, PRESETS, {}).ranks == Ranks(pp=2, nodes=3)
    assert resolve({"DCP": "2"}, [], PRESETS, {}).ranks == Ranks(dcp=2)
    assert resolve({"DCP": "2"}, ["-dcp", "4"], PRESETS, {}).ranks == Ranks(dcp=4)
    assert resolve({}, ["-dp", "4", "--data-parallel-size-local=2"], PRESETS, {}).ranks == Ranks(dp=2)
    assert (Ranks(tp=2, dp=4).here, Ranks(tp=2, pp=2, dp=2, nodes=2).here) == (8, 4)


PORTS = [((), 8100), (("--port", "9000"), 9000), (("--port=1", "--port=9000"), 9000), (("--port", "x"), 8100)]


@pytest.mark.parametrize("extra, port", PORTS)
def test_the_command_line_has_the_last_word_on_the_port(extra: tuple[str, ...], port: int) -> None:
    assert resolve({"LISTEN_PORT": "8100"}, extra, PRESETS, {}).port == port


HALF = {"GPU_MEMORY_UTILIZATION": "0.5"}
UTILISATIONS = [({}, (), 0.92), (HALF, (), 0.5), (HALF, ("--gpu-memory-utilization=0.4",), 0.4)]


@pytest.mark.parametrize("environment, extra, fraction", UTILISATIONS)
def test_memory_that_is_asked_for(environment: dict[str, str], extra: tuple[str, ...], fraction: float) -> None:
    assert resolve(environment, extra, PRESETS, {}).utilisation == fraction


def test_its_default_is_upstream_s() -> None:
    from vllm.config import CacheConfig

    assert CacheConfig().gpu_memory_utilization == preflight.UTILISATION


def test_options_may_be_spelled_with_underscores() -> None:
    assert resolve({}, ["--tensor_parallel_size=2"], PRESETS, {}).ranks == Ranks(tp=2)


def preset(folder: Path, text: str) -> Path:
    (folder / "mine.toml").write_text(f'[serve]\nquantization = "exl3"\n{text}')
    return folder


def test_a_preset_sets_variables_and_the_user_s_win(tmp_path: Path) -> None:
    presets = preset(tmp_path, "[environment]\nVLLM_EXL3_PREFILL_CAPACITY = 512\nVLLM_EXL3_FUSED = false\n")

    def knobs(**environment: str) -> tuple[str, str]:
        found = resolve({"PRESET": "mine"} | environment, [], presets, {}).environment
        assert list(machine.knob_problems(found)) == []
        return found["VLLM_EXL3_PREFILL_CAPACITY"], found["VLLM_EXL3_FUSED"]

    assert knobs(VLLM_EXL3_PREFILL_CAPACITY=" ") == ("512", "False")
    assert knobs(VLLM_EXL3_PREFILL_CAPACITY="256", VLLM_EXL3_FUSED="1") == ("256", "1")


TABLES = {
    "[environment]\nVLLM_EXL3_CAPACITY = 1\nHOME = 'x'\nVLLM_EXL3_FUSED = 1\n":
        "preset mine: [environment] sets HOME, VLLM_EXL3_CAPACITY; want VLLM_EXL3_* of the README's table",
    "[environ]\nVLLM_EXL3_FUSED = 1\n": "preset mine: [environ]; want [serve] and [environment]",
}  # fmt: skip


@pytest.mark.parametrize("text", TABLES)
def test_what_a_preset_may_not_set(tmp_path: Path, text: str) -> None:
    with pytest.raises(DeploymentError) as error:
        resolve({"PRESET": "mine"}, [], preset(tmp_path, text), {})
    assert error.value.problems == [TABLES[text]]


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_a_preset_s_variables_can_be_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By routed experts, in a step of as many rows as the preset has."""
    from vllm import exl3_envs
    from vllm.model_executor.layers.quantization.exl3_trellis.moe_plan import Limits

    plan = resolve({"PRESET": name}, [], PRESETS, {})
    for knob in exl3_envs.KNOBS:
        monkeypatch.setenv(knob.name, plan.environment.get(knob.name, ""))
    limits = Limits.read(SimpleNamespace(**{knob.name: knob.read() for knob in exl3_envs.KNOBS}))
    assert list(limits.problems(plan.options.get("max-num-batched-tokens", 2048))) == []


def test_caches_lie_below_one_folder_of_the_build() -> None:
    plan = resolve({"EXL3_CACHE": "/cache", "HOME": "/nowhere"}, [], PRESETS, CPU)
    assert {plan.environment[name] for name in deployment.CACHES} == {
        f"/cache/{CPU['build']}/{folder}" for folder in deployment.CACHES.values()
    }
    assert plan.environment["HF_HOME"] == "/cache/huggingface"
    assert plan.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "5400"


def test_dry_run_shows_no_secret() -> None:
    environment = os.environ | {"DRY_RUN": "1", "VLLM_API_KEY": "sesame", "HF_TOKEN": "open", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "validate", "launch", "--home", str(ROOT / "docker"), "--", "--seed", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vllm serve /model ")
    assert done.stdout.splitlines()[0].endswith(" --seed 7")
    assert "VLLM_API_KEY=(set, not shown)" in done.stdout.splitlines()
    assert "sesame" not in done.stdout + done.stderr
    assert "HF_TOKEN=open" not in done.stdout


def test_a_dry_run_that_is_switched_off_is_none() -> None:
    environment = os.environ | {"DRY_RUN": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "validate", "launch", "--home", str(ROOT / "docker"), "--", "--seed", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "model /model: no such folder" in done.stderr


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_upstream_knows_every_option_of_a_preset(preset: str) -> None:
    """Parsed by the fork's own parser; what an option does is not its to say."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    found = parser.parse_args(resolve({"PRESET": preset}, [], PRESETS, {}).command()[2:])
    assert found.quantization == "exl3"


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_upstream_has_the_parsers_that_a_preset_names(preset: str) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    plan = resolve({"PRESET": preset}, [], PRESETS, {})
    if name := plan.options.get("tool-call-parser"):
        assert ToolParserManager.get_tool_parser(name)
    if name := plan.options.get("reasoning-parser"):
        assert ReasoningParserManager.get_reasoning_parser(name)


def test_compose_hands_every_variable_through() -> None:
    """And nothing that nobody reads."""
    from vllm import exl3_envs

    text = (ROOT / "docker/compose.yaml").read_text()
    passed = set(re.findall(r"^      ([A-Z_0-9]+):", text.split("environment:")[1], re.MULTILINE))
    read = {variable.name for variable in deployment.VARIABLES} | set(deployment.OTHERS)
    read |= {knob.name for knob in exl3_envs.KNOBS}
    assert read - passed == {"MODEL", "EXL3_CACHE", "HF_TOKEN"}  # the container's own, and a hub is not mounted
    assert passed <= read
