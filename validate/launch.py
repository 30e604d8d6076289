# SPDX-License-Identifier: Apache-2.0
"""`python -m validate launch`: preset and variables to `vllm serve`, after a preflight; what the images start with.

Variables: PRESET, MODEL, TP, DCP, MAX_MODEL_LEN, GPU_MEMORY_UTILIZATION, KV_CACHE_DTYPE, SERVED_MODEL_NAME,
MTP_TOKENS, ENABLE_MTP, LISTEN_PORT, LISTEN_HOST. DRY_RUN=1 prints what would run. Arguments after `--` go to vllm serve
as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from . import deployment, machine, preflight
from .deployment import Deployment, DeploymentError


def main(arguments: list[str]) -> int:
    """Replaces this process by the server; returns only where there is none to start."""
    parser = argparse.ArgumentParser(prog="python -m validate launch", description=__doc__)
    default = Path(__file__).resolve().parents[1] / "docker"
    parser.add_argument("--home", type=Path, default=default, help="folder with presets/ and, in an image, build.json")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="for vllm serve, after --")
    given = parser.parse_args(arguments)
    build = _build(given.home)
    try:
        plan = deployment.resolve(os.environ, given.arguments, given.home / "presets", build)
    except DeploymentError as error:
        print(preflight.report(error.problems), file=sys.stderr)
        return 1
    if plan.environment.get("DRY_RUN") == "1":
        _show(plan)
        return 0
    found = machine.look(plan.target)
    told = preflight.problems(
        plan.model, ranks=plan.ranks, found=found, environment=plan.environment, cache=plan.cache,
        port=plan.port, utilisation=plan.utilisation,
    )  # fmt: skip
    if told:
        print(preflight.report(told), file=sys.stderr)
        return 1
    print(f"serving: {shlex.join(plan.command())}", flush=True)
    program = _program(plan)
    if program is None:
        print("launch: no vllm beside this Python nor on PATH", file=sys.stderr)
        return 1
    _replace(program, plan)
    return 0  # not reached: this process is the server by then


def _build(home: Path) -> dict[str, Any]:
    """What the image says it is; outside one, what is installed beside this Python."""
    path = home / "build.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {"target": preflight.installed_target()}


def _show(plan: Deployment) -> None:
    print(shlex.join(plan.command()))
    for line in deployment.shown(plan.environment, os.environ):
        print(line)


def _program(plan: Deployment) -> str | None:
    return shutil.which("vllm", path=f"{Path(sys.executable).parent}:{plan.environment.get('PATH', '')}")


def _replace(program: str, plan: Deployment) -> None:
    """exec, so that signals reach vLLM itself."""
    for name in deployment.CACHES:
        Path(plan.environment[name]).mkdir(parents=True, exist_ok=True)
    environment = dict(plan.environment)
    packages = Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    cuda = packages / "nvidia" / "cu13"
    if (cuda / "bin" / "nvcc").exists() and (cuda / "lib64").exists():  # as docker/link-cuda leaves it
        environment.setdefault("CUDA_HOME", str(cuda))  # where kernels that compile at run time look for a compiler
    os.execve(program, plan.command(), environment)
