"""The audit of a server's log."""

from __future__ import annotations

import io
import json

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
    "ERROR [backend_xgrammar.py:202] Failed to advance FSM for request r1 for tokens 5.": "matcher failure",
    "Traceback (most recent call last):": "traceback",
}


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
