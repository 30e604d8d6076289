# SPDX-License-Identifier: Apache-2.0
"""From a preset and a handful of variables to one `vllm serve` command and its environment.

    preset (TOML)  <  variables (TP, MAX_MODEL_LEN, ...)  <  arguments given on the command line

A preset's [serve] are options of `vllm serve`, its [environment] our variables, which the user's own replace. Blank
means unset, everywhere. Knows neither the machine nor the checkpoint: preflight does.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine
from .preflight import UTILISATION, Ranks

PORT = 8000  # inside the container
SECRETS = ("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Read here besides VARIABLES, or handed through by compose: blank means unset for all of them.
OTHERS = (
    "PRESET", "MODEL", "MTP_TOKENS", "ENABLE_MTP", "DRY_RUN", "LISTEN_PORT", "LISTEN_HOST", "EXL3_CACHE", "HF_TOKEN",
    "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENGINE_READY_TIMEOUT_S",
    "VLLM_LOGGING_LEVEL",
)  # fmt: skip
SWITCHES = ("ENABLE_MTP", "DRY_RUN")
# What a runtime writes, by the variable that says where; all of it below one folder of the build.
CACHES = {
    "HOME": "home", "XDG_CACHE_HOME": "xdg", "VLLM_CACHE_ROOT": "vllm", "VLLM_CONFIG_ROOT": "vllm-config",
    "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep-gemm", "CUTE_DSL_CACHE_DIR": "cute", "CUDA_CACHE_PATH": "cuda",
    "PYTHONPYCACHEPREFIX": "pyc",
}  # fmt: skip
# Upstream gives up on an engine after ten minutes; a large checkpoint takes most of an hour.
READY_SECONDS = 90 * 60


class DeploymentError(Exception):
    """What is wrong with the variables, all of it: `problems`, one message each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable that becomes an option of `vllm serve`."""

    name: str
    option: str
    accepts: Callable[[str], bool]
    wanted: str  # completes "want ..."


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _fraction(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


_COUNT = _matches(r"[1-9]\d*")
VARIABLES = (
    Variable(name="TP", option="tensor-parallel-size", accepts=_COUNT, wanted="a number of GPUs, 1 or more"),
    Variable(name="DCP", option="decode-context-parallel-size", accepts=_COUNT, wanted="a number, 1 or more"),
    Variable(
        name="MAX_MODEL_LEN", option="max-model-len", accepts=_matches(r"auto|-1|[1-9]\d*[kKmM]?"),
        wanted="a number of tokens, say 131072 or 128k, or auto",
    ),
    Variable(
        name="GPU_MEMORY_UTILIZATION", option="gpu-memory-utilization", accepts=_fraction,
        wanted="a fraction of the memory, above 0 and at most 1",
    ),
    Variable(name="KV_CACHE_DTYPE", option="kv-cache-dtype", accepts=_matches(r"[a-z0-9_]+"), wanted="a name, say fp8"),
    Variable(name="SERVED_MODEL_NAME", option="served-model-name", accepts=_matches(r"\S+"), wanted="one word"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What will be run."""

    model: Path
    options: Mapping[str, Any]  # option without dashes -> value; True: a flag by itself, tables become JSON
    extra: tuple[str, ...]  # arguments of the command line, after all others
    environment: Mapping[str, str]  # the whole of it
    listen_port: int  # the variable's; `port` is what will be listened on
    cache: Path
    target: str  # "cpu" or "cuda"

    @property
    def port(self) -> int:
        """The command line's, else the variable's; what is no number is left to `vllm serve`."""
        text = self._option("port") or ""
        return int(text) if text.isdecimal() else self.listen_port

    @property
    def utilisation(self) -> float:
        """Of a GPU's memory; as with the port."""
        text = self._option("gpu-memory-utilization") or ""
        return float(text) if _fraction(text) else UTILISATION

    @property
    def ranks(self) -> Ranks:
        """As the options share the model out; what is no number is left to `vllm serve`, which says so."""
        options = {
            "tp": ("tensor-parallel-size", "-tp"), "dcp": ("decode-context-parallel-size", "-dcp"),
            "pp": ("pipeline-parallel-size", "-pp"), "nodes": ("nnodes", "-n"), "dp": ("data-parallel-size", "-dp"),
        }  # fmt: skip
        found = {name: self._option(*option) or "" for name, option in options.items()}
        found["dp"] = self._option("data-parallel-size-local", "-dpl") or found["dp"]
        return Ranks(**{name: max(1, int(text)) for name, text in found.items() if text.isdecimal()})

    def _option(self, name: str, short: str | None = None) -> str | None:
        """The last word on an option: the command line's, else the preset's or the variable's."""
        for index in reversed(range(len(self.extra))):
            word, equals, value = self.extra[index].partition("=")
            if word.replace("_", "-") == f"--{name}" or word == short:  # vLLM takes both spellings
                return value if equals else (self.extra[index + 1] if index + 1 < len(self.extra) else None)
        chosen = self.options.get(name)
        return None if chosen is None else str(chosen)

    def command(self) -> list[str]:
        words = ["vllm", "serve", str(self.model), "--host", self.environment.get("LISTEN_HOST", "0.0.0.0")]
        words += ["--port", str(self.listen_port)]
        for name, value in self.options.items():
            if value is False:
                continue
            words.append(f"--{name}")
            if value is not True:
                words.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
        return [*words, *self.extra]


def resolve(
    environment: Mapping[str, str], extra: Sequence[str], presets: Path, build: Mapping[str, Any]
) -> Deployment:
    """Raises DeploymentError with everything that is wrong with the variables."""
    given = {name: value for name, value in environment.items() if value.strip() or not _means_unset(name)}
    problems: list[str] = []
    options, knobs = _preset(given.get("PRESET", "generic"), presets, problems)
    given = knobs | given
    for variable in VARIABLES:
        if (value := given.get(variable.name)) is not None:
            if not variable.accepts(value):
                problems.append(f"{variable.name}={value}: want {variable.wanted}")
            options[variable.option] = value
    for name in SWITCHES:
        if (value := given.get(name, "0")) not in ("0", "1"):
            problems.append(f"{name}={value}: want 0 or 1")
    _speculate(given, options, problems)
    if build.get("target") == "cpu":
        options.setdefault("enforce-eager", True)  # the CPU image has no compiler
    port = given.get("LISTEN_PORT", str(PORT))
    if not (port.isdecimal() and 0 < int(port) < 65536):
        problems.append(f"LISTEN_PORT={port}: want a port, 1 to 65535")
        port = str(PORT)
    cache = Path(given.get("EXL3_CACHE", "cache")) / str(build.get("build", "development"))
    if problems:
        raise DeploymentError(problems)
    return Deployment(
        model=Path(given.get("MODEL", "/model")), options=options, extra=tuple(extra), listen_port=int(port),
        cache=cache, environment=_environment(given, cache), target=str(build.get("target", "cuda")),
    )  # fmt: skip


def _means_unset(name: str) -> bool:
    """Compose renders a variable that is not set as a blank one; a few of others' mean something when blank."""
    return name in {variable.name for variable in VARIABLES} | set(OTHERS) or name.startswith(
        ("VLLM_EXL3_", "NCCL_", "CUDA_VISIBLE_DEVICES")  # the last two from compose.gpu.yaml
    )


def _preset(name: str, presets: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Its options of `vllm serve`, and its variables."""
    known = sorted(path.stem for path in presets.glob("*.toml"))
    if name not in known:
        problems.append(f"PRESET={name}: want one of {', '.join(known)}")
        return {}, {}
    tables = tomllib.loads((presets / f"{name}.toml").read_text(encoding="utf-8"))
    if unknown := sorted(tables.keys() - {"serve", "environment"}):
        problems.append(f"preset {name}: [{'], ['.join(unknown)}]; want [serve] and [environment]")
    knobs = {knob: str(value) for knob, value in tables.get("environment", {}).items()}
    if unknown := sorted(knobs.keys() - {knob.name for knob in machine.load_envs().KNOBS}):
        wanted = "want VLLM_EXL3_* of the README's table"
        problems.append(f"preset {name}: [environment] sets {', '.join(unknown)}; {wanted}")
    return dict(tables["serve"]), knobs


def _speculate(given: Mapping[str, str], options: dict[str, Any], problems: list[str]) -> None:
    """MTP_TOKENS draft tokens a step; 0, or ENABLE_MTP=0, turns a preset's drafting off."""
    enabled, tokens = given.get("ENABLE_MTP", "1"), given.get("MTP_TOKENS")
    if tokens is not None and not re.fullmatch(r"\d", tokens):
        problems.append(f"MTP_TOKENS={tokens}: want 0 to 9")
        return
    if enabled == "0" or tokens == "0":
        options.pop("speculative-config", None)
    elif tokens is not None:
        options["speculative-config"] = {
            "method": "mtp", **options.get("speculative-config", {}), "num_speculative_tokens": int(tokens)
        }  # fmt: skip


def _environment(given: Mapping[str, str], cache: Path) -> dict[str, str]:
    """The server's: caches in the build's folder, a user name where the number has none, time to load."""
    environment = dict(given)
    environment |= {name: str(cache / folder) for name, folder in CACHES.items()}
    environment.setdefault("HF_HOME", str(cache.parent / "huggingface"))  # downloads outlive a build
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts, so that preflight means the same
    environment.setdefault("USER", "exl3")  # torch asks for it, and an arbitrary --user has no entry in passwd
    environment.setdefault("LOGNAME", environment["USER"])
    environment.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(READY_SECONDS))
    return environment


def shown(environment: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """`NAME=value` of what matters or was changed, for people; secrets are masked."""
    prefixes = ("VLLM_", "NCCL_", "CUDA_", "HF_", "EXL3_")
    lines = []
    for name, value in sorted(environment.items()):
        if name.startswith(prefixes) or before.get(name) != value:
            lines.append(f"{name}={'(set, not shown)' if name in SECRETS else value}")
    return lines
