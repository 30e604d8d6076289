# SPDX-License-Identifier: Apache-2.0
"""`python -m validate preflight DIR`: can this machine serve that checkpoint? Answered in seconds, before any load.

Looks at headers, at /proc and at what nvidia-smi says; imports neither torch nor vLLM. Reports everything at once.
Does not know what a deployment's KV cache needs: vLLM measures that once the weights are in.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import check_checkpoint, gpu_holders, machine, trellis
from .machine import Machine

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.exl3_trellis import sparse_attention
else:
    sparse_attention = trellis.load("sparse_attention")

GIB = 1 << 30
SHM_PER_RANK = GIB // 4  # NCCL's and vLLM's queues between ranks; Docker's 64 MiB fails at two
DRIVER = (580, 65)  # of CUDA 13.0, which torch's wheels are built with
CAPABILITY = (8, 0)
UTILISATION = 0.92  # upstream's default of --gpu-memory-utilization


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How the model is shared out: parallel sizes, over so many machines like this one."""

    tp: int = 1
    dcp: int = 1  # decode context parallel size: among the tensor parallel ranks
    pp: int = 1
    dp: int = 1  # data parallel replicas on this machine, each of them whole
    nodes: int = 1

    @property
    def here(self) -> int:
        """Ranks on this machine."""
        return self.dp * -(-self.tp * self.pp // self.nodes)

    def __str__(self) -> str:
        pipeline = f", pipeline parallel size {self.pp}" if self.pp > 1 else ""
        replicas = f", {self.dp} data parallel replicas" if self.dp > 1 else ""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"tensor parallel size {self.tp}{pipeline}{replicas}{nodes}"


def problems(
    folder: Path,
    *,
    ranks: Ranks,
    found: Machine,
    environment: Mapping[str, str],
    cache: Path | None,
    port: int | None,
    utilisation: float = UTILISATION,
) -> list[str]:
    """Everything that would stop this checkpoint on this machine, one message each; empty where nothing would."""
    told = [*_environment(environment), *_cache(cache), *_port(port), *_shm(found, ranks.here)]
    audit, faults = _checkpoint(folder, ranks.tp)
    told += faults
    if found.target == "cuda":
        if visible := environment.get("CUDA_VISIBLE_DEVICES", "").strip():
            found = machine.seen(found, visible)
        told += _gpus(found, ranks, audit)
    full = list(_memory(found, ranks, audit)) if audit is not None and not faults else []
    return [*told, *(full or _utilisation(found, ranks, utilisation))]


def _environment(environment: Mapping[str, str]) -> Iterator[str]:
    yield from machine.knob_problems(environment)
    port = environment.get("VLLM_PORT", "")
    if port and not port.isdecimal():
        why = "Kubernetes sets it for a service named vllm; give the service another name"
        yield f"VLLM_PORT={port}: want a number. {why}"
    for path in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if "compat" in Path(path).parts:
            yield f"LD_LIBRARY_PATH: {path} hides the driver's own libcuda behind an older one; take it out"


def _cache(cache: Path | None) -> Iterator[str]:
    if cache is None:
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
        probe = cache / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        who = f"user {os.getuid()}:{os.getgid()}"
        yield f"cache {cache}: {error.strerror} for {who}; want a folder it may write (CACHE_DIR, RUN_AS)"


def _port(port: int | None) -> Iterator[str]:
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is not busy
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            yield f"port {port}: {error.strerror}; stop what listens there, or choose another"


def _shm(found: Machine, ranks: int) -> Iterator[str]:
    want = ranks * SHM_PER_RANK
    if ranks > 1 and found.shm_bytes < want:
        have, need = (f"{size / (1 << 20):.0f} MiB" for size in (found.shm_bytes, want))
        yield f"/dev/shm: {have}, want {need} for {ranks} ranks (SHM_SIZE, or docker run --shm-size)"


def _checkpoint(folder: Path, tp: int) -> tuple[check_checkpoint.Audit | None, list[str]]:
    if not folder.is_dir():
        return None, [f"model {folder}: no such folder; want one with an EXL3 checkpoint (MODEL_DIR)"]
    if not (folder / "config.json").is_file():
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:4]) or "nothing"
        wanted = "want a folder with an EXL3 checkpoint (MODEL_DIR)"
        return None, [f"model {folder}: no config.json, found {inside}; {wanted}"]
    audit = check_checkpoint.Audit(folder, tp)
    faults = [f"model {fault}" for fault in audit.faults]
    if audit.heads is not None and audit.heads % tp:
        sizes = ", ".join(map(str, audit.legal_tp())) or "none"
        faults.append(f"tensor parallel size {tp}: {audit.heads} attention heads; this model takes {sizes} (TP)")
    return audit, faults


def _gpus(found: Machine, ranks: Ranks, audit: check_checkpoint.Audit | None) -> Iterator[str]:
    if not found.gpus:
        yield f"no GPU: {found.gpu_error}; want {ranks.here} (docker/compose.gpu.yaml hands them over)"
        return
    if ranks.here > len(found.gpus):
        yield f"{ranks}: {len(found.gpus)} GPUs are visible (TP)"
    driver = found.gpus[0].driver
    if driver < DRIVER:
        yield f"driver {'.'.join(map(str, driver))}: want {'.'.join(map(str, DRIVER))} or newer, for CUDA 13"
    for gpu in found.gpus:
        if gpu.capability < CAPABILITY:
            have, want = (".".join(map(str, pair)) for pair in (gpu.capability, CAPABILITY))
            yield f"GPU {gpu.index} ({gpu.name}): compute capability {have}, want {want} or newer"
    names = audit.config.get("architectures") if audit else None
    for gpu in found.gpus:
        for problem in sparse_attention.sparse_problems(names or (), gpu.capability, ranks.dcp):
            yield f"GPU {gpu.index} ({gpu.name}): {problem}"


def _memory(found: Machine, ranks: Ranks, audit: check_checkpoint.Audit) -> Iterator[str]:
    """Weights only, of an average stage. On a GPU they stay as stored; a CPU decodes them to two bytes each."""
    if found.target == "cpu":
        want = machine.decoded_bytes(audit)
        if found.free_bytes < want:
            yield f"memory: {found.free_bytes / GIB:.1f} GiB free, the decoded weights take {want / GIB:.1f} GiB"
        return
    held = audit.rank_bytes()
    want = (held["experts"] + held["other_tensors_of_all_ranks"] // ranks.tp) // ranks.pp
    for gpu in found.gpus[: ranks.here]:
        free = found.free_bytes if gpu.free_bytes is None else gpu.free_bytes
        if free < want:
            whole = "GiB of main memory" if gpu.total_bytes is None else f"of {gpu.total_bytes / GIB:.1f} GiB"
            have = f"{free / GIB:.1f} {whole} free"
            yield f"GPU {gpu.index} ({gpu.name}): {have}, the weights of a rank take {want / GIB:.1f} GiB"


def _utilisation(found: Machine, ranks: Ranks, utilisation: float) -> Iterator[str]:
    """Upstream compares the same two numbers once an engine has started, when CUDA has taken some of the first."""
    for gpu in found.gpus[: ranks.here]:
        free, total = gpu.free_bytes or 0, gpu.total_bytes or 0
        want = utilisation * total
        if free < want:
            have = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, utilisation {utilisation} is {want / GIB:.1f} GiB"
            holders = ", ".join(gpu_holders.look(gpu.index)) or "the driver or others, nvidia-smi does not say which"
            remedy = "stop them, or lower GPU_MEMORY_UTILIZATION"
            yield f"GPU {gpu.index} ({gpu.name}): {have}; memory is held by {holders}: {remedy}"


def installed_target() -> str:
    """What the fork beside this Python is built for, as its version says; "cuda" where there is none."""
    try:
        return "cpu" if importlib.metadata.version("vllm").endswith("cpu") else "cuda"
    except importlib.metadata.PackageNotFoundError:
        return "cuda"


def report(told: Sequence[str]) -> str:
    """One message with everything."""
    if not told:
        return "preflight: nothing stands in the way"
    return "\n".join([f"preflight: {len(told)} {'thing' if len(told) == 1 else 'things'} to put right", *(
        f"  * {line}" for line in told
    )])  # fmt: skip


def main(arguments: list[str]) -> int:
    """Checks one checkpoint against this machine. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m validate preflight", description=__doc__)
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--dcp", type=int, default=1, help="decode context parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--dp", type=int, default=1, help="data parallel replicas on this machine")
    parser.add_argument("--target", choices=("cpu", "cuda"), default=installed_target(), help="where it is to run")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=UTILISATION, help="fraction of each GPU that the server takes"
    )
    parser.add_argument("--port", type=int, help="also check that this port is free")
    given = parser.parse_args(arguments)
    for name in ("tp", "dcp", "pp", "dp"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}, want 1 or more")
    found = machine.look(given.target)
    ranks = Ranks(tp=given.tp, dcp=given.dcp, pp=given.pp, dp=given.dp)
    told = problems(
        given.folder, ranks=ranks, found=found, environment=os.environ, cache=None, port=given.port,
        utilisation=given.gpu_memory_utilization,
    )  # fmt: skip
    print(report(told), file=sys.stderr if told else sys.stdout)
    return 1 if told else 0
