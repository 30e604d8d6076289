# SPDX-License-Identifier: Apache-2.0
"""What this machine has: memory, shared memory, GPUs as nvidia-smi tells them. Standard library only."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from . import trellis

if TYPE_CHECKING:
    from .check_checkpoint import Audit

_QUERY = ("index", "name", "compute_cap", "memory.total", "memory.free", "driver_version")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int | None  # None: it shares the machine's main memory
    free_bytes: int | None
    driver: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    target: str  # what is to run here, "cpu" or "cuda"
    free_bytes: int  # of main memory
    shm_bytes: int  # size of /dev/shm
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = field(default="")  # why there are none


def look(target: str) -> Machine:
    gpus, error = _gpus() if target == "cuda" else ((), "")
    shm = os.statvfs("/dev/shm")
    return Machine(
        target=target, free_bytes=_free(), shm_bytes=shm.f_frsize * shm.f_blocks, gpus=gpus, gpu_error=error
    )  # fmt: skip


def _free() -> int:
    """Bytes that a process can have without swapping, of the machine and of the container's limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # an older kernel, or "max": no limit
        return free
    return min(free, limit - used)


def nvidia_smi(*query: str) -> tuple[str, str]:
    """Its rows of comma-separated values without units, or none and why there are none."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return "", "there is no nvidia-smi here, so the driver has not been handed in"
    except subprocess.TimeoutExpired:
        return "", "nvidia-smi does not answer"
    if done.returncode:
        return "", f"nvidia-smi says: {(done.stdout + done.stderr).strip()}"
    return done.stdout, ""


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    rows, error = nvidia_smi(f"--query-gpu={','.join(_QUERY)}")
    try:
        return read_gpus(rows), error or "nvidia-smi lists none"
    except ValueError as unreadable:
        return (), str(unreadable)


def read_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's rows, in the order of _QUERY.

    Raises:
        ValueError: naming a row that does not say what was asked.
    """
    gpus = []
    for line in text.splitlines():
        try:
            index, name, capability, total, free, driver = (part.strip() for part in line.split(","))
            major, minor = map(int, capability.split("."))
            gpus.append(Gpu(
                index=int(index), name=name, capability=(major, minor), total_bytes=_bytes(total),
                free_bytes=_bytes(free), driver=_driver(driver),
            ))  # fmt: skip
        except ValueError:
            raise ValueError(f"nvidia-smi says {line!r}, want {', '.join(_QUERY)}") from None
    return tuple(gpus)


def _driver(version: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
    if not numbers:
        raise ValueError
    return numbers


def _bytes(mebibytes: str) -> int | None:
    """nvidia-smi has no number for a card without memory of its own."""
    return None if mebibytes == "[N/A]" else int(mebibytes) * MIB


def seen(found: Machine, visible: str) -> Machine:
    """The machine as CUDA shows it with this CUDA_VISIBLE_DEVICES; names other than numbers hide nothing."""
    words = [word.strip() for word in visible.split(",")]
    if not all(word.removeprefix("-").isdecimal() for word in words):
        return found
    here = {str(gpu.index): gpu for gpu in found.gpus}
    kept = list(itertools.takewhile(here.__contains__, words))  # CUDA stops at the first that is not there
    error = f"CUDA_VISIBLE_DEVICES={visible}, and nvidia-smi lists {', '.join(here) or 'none'}"
    return replace(found, gpus=tuple(here[word] for word in kept), gpu_error=error if here else found.gpu_error)


def decoded_bytes(audit: Audit) -> int:
    """Bytes of a model on a CPU: every EXL3 weight as a 16-bit number, every other tensor as stored."""
    linears = sum(spec.k * spec.n for spec in audit.linears.values())
    experts = sum(3 * spec.count * spec.hidden * spec.width * (spec.ranks or 1) for spec in audit.experts.values())
    stored = trellis.load("safetensors_headers").DTYPE_BYTES
    others = sum(
        stored.get(info.dtype, 0) * math.prod(info.shape)
        for name, info in audit.tensors.items()
        if not name.endswith(".trellis")
    )
    return 2 * (linears + experts) + others


def knob_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with VLLM_EXL3_* variables whose value does not parse."""
    yield from load_envs().bad_values(environment)


def load_envs() -> ModuleType:
    """The table of variables, without importing vLLM around it."""
    path = trellis.folder().parents[3] / "exl3_envs.py"
    spec = importlib.util.spec_from_file_location("exl3_envs", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not loadable")
    module = importlib.util.module_from_spec(spec)
    sys.modules["exl3_envs"] = module
    spec.loader.exec_module(module)
    return module
