"""The audit of a server's log."""

from __future__ import annotations

import ast
import io
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from validate.__main__ import main as validate
from validate.audit_log import NEVER_READY, audit

READY = "(APIServer pid=7) INFO:     Application startup complete."
COMPILED = "WARNING [jit_monitor.py:130] Triton kernel JIT compilation during inference: fused_moe. This causes a spike"
LINES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "out of memory",
    "ValueError: No available memory for the cache blocks.": "out of memory",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "CUDA error",
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:3690": "CUDA error",
    "torch.AcceleratorError: CUDA driver error: invalid argument": "CUDA error",
    "Assertion `index out of bounds` failed. device-side assert triggered": "CUDA error",
    "Traceback (most recent call last):": "traceback",
}

# file of a package -> (how a message of it begins, what the audit calls it once the server is ready)
SOURCES = {
    "uvicorn/lifespan/on.py": [("Application startup complete", None)],
    "vllm/v1/structured_output/backend_xgrammar.py": [("Failed to advance FSM", "matcher failure")],
    "vllm/v1/structured_output/__init__.py": [("Unexpected: grammar terminated or rejected draft", "matcher failure")],
    "vllm/v1/core/sched/scheduler.py": [("Unexpected: grammar rejected tokens", "matcher failure")],
    "vllm/v1/engine/exceptions.py": [("EngineCore encountered an issue", "engine died")],
    "vllm/v1/engine/core.py": [
        ("EngineCore encountered a fatal error", "engine died"), ("EngineCore failed to start", "engine died"),
    ],
    "vllm/v1/engine/core_client.py": [("[shutdown] MPClient: engine core exited", "engine died")],
    "vllm/v1/engine/utils.py": [("Engine core initialization failed", "engine died")],
    "vllm/v1/utils.py": [("Engine core process %", "engine died"), ("Process %", "engine died")],
    "vllm/v1/executor/multiproc_executor.py": [("Worker proc ", "engine died")],
    "vllm/v1/core/kv_cache_utils.py": [("No available memory for the cache", "out of memory")],
    "vllm/utils/jit_monitor.py": [("% % during inference", "compiled after ready")],
    "vllm/compilation/monitor.py": [("%torch.compile took", "compiled after ready")],
    "vllm/compilation/backends.py": [
        ("%Cache the graph of", "compiled after ready"), ("%Compiling a graph for", "compiled after ready"),
    ],
    "vllm/v1/worker/gpu/cudagraph_utils.py": [("Capturing CUDA graph", "compiled after ready")],
}  # fmt: skip


def messages(file: str) -> list[str]:
    """Every text in a module of an installed package, with % for what is filled in."""
    package, _, place = file.partition("/")
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    found = []
    for node in ast.walk(ast.parse(Path(spec.submodule_search_locations[0], place).read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
        words = [str(part.value) if isinstance(part, ast.Constant) else "%" for part in parts]
        found.append(re.sub(r"%[-.0-9]*[sdf]", "%", "".join(words)))
    return found


@pytest.mark.parametrize(
    ("file", "begin", "kind"), [(file, *row) for file, rows in SOURCES.items() for row in rows], ids=str
)
def test_the_wordings_are_those_of_the_installed_sources(file, begin, kind):
    said = [message for message in messages(file) if message.startswith(begin)]
    assert said, f"{file}: no message begins with {begin!r}"
    for message in said:
        found = [finding.kind for finding in audit([READY, f"ERROR [x.py:1] {message}"])]
        assert found == ([kind] if kind else []), message
    if kind is None:  # what says that the server is ready
        assert all(audit([message]) == [] for message in said)


@pytest.mark.parametrize(("line", "kind"), LINES.items(), ids=LINES.values())
@pytest.mark.parametrize("place", [0, 1], ids=["before ready", "after"])
def test_trouble_is_found_wherever_it_stands(line, kind, place):
    lines = ["INFO all is well", READY]
    lines.insert(2 * place, line)
    (found,) = audit(lines)
    assert (found.line, found.kind, found.text) == (2 * place + 1, kind, line)


@pytest.mark.parametrize(
    "line",
    [COMPILED, "INFO [backends.py:399] Compiling a graph for compile range (1, 8192) takes 21.0 s",
     "DeepGEMM: JIT compiling fp8_gemm"],
)  # fmt: skip
def test_compiling_is_trouble_only_once_ready(line):
    assert audit([line, READY]) == []
    assert [found.kind for found in audit([READY, line])] == ["compiled after ready"]


def test_a_server_that_never_was_ready():
    assert [found.kind for found in audit(["INFO loading"])] == [NEVER_READY]
    assert audit(["INFO loading", "LISTENING"], ready="LISTENING") == []


def test_command(tmp_path, capsys, monkeypatch):
    log = tmp_path / "log"
    log.write_text(f"{READY}\n{COMPILED}\n")
    assert validate(["audit-log", str(log)]) == 1
    assert capsys.readouterr().out == f"2: compiled after ready: {COMPILED}\ncompiled after ready: 1\n"
    assert validate(["audit-log", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [{"line": 2, "kind": "compiled after ready", "text": COMPILED}]
    monkeypatch.setattr("sys.stdin", io.StringIO(READY))
    assert validate(["audit-log", "-"]) == 0
    assert capsys.readouterr().out == "nothing found\n"
    assert validate(["audit-log", str(tmp_path / "none")]) == 2
