# SPDX-License-Identifier: Apache-2.0
"""`make demo`, run as a user runs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "validate.demo"]


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**variables: object) -> dict[str, str]:
    """The folder the demo runs in is the test's own; our commands come from the checkout."""
    return (
        os.environ | {"PYTHONPATH": str(ROOT), "DEMO_ONCE": "1"} | {key: str(value) for key, value in variables.items()}
    )


def demo(folder: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        COMMAND, cwd=folder, env=environment(**variables), capture_output=True, text=True, check=False
    )


def test_busy_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        done = demo(tmp_path, PORT=number)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"demo: port {number} on 127.0.0.1: Address already in use; choose another with PORT=...\n"


@pytest.mark.parametrize("text", ["x", "0", "65536", "-1"])
def test_port_that_is_none(tmp_path: Path, text: str) -> None:
    done = demo(tmp_path, PORT=text)
    assert (done.returncode, done.stderr) == (1, f"demo: PORT={text}: want a number from 1 to 65535\n")


def test_model_that_is_none(tmp_path: Path, port: int) -> None:
    done = demo(tmp_path, PORT=port, MODEL=tmp_path / "none")
    message = f"demo: MODEL {tmp_path}/none: no config.json there, want a folder with an EXL3 checkpoint\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.engine
def test_a_server_that_fails_shows_why(tmp_path: Path, port: int) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["None"], "model_type": "nothing"}')
    done = demo(tmp_path, PORT=port, MODEL="model")
    assert done.returncode == 1
    assert done.stderr.startswith("demo: the server stopped with exit code 1; the end of demo/server.log:\n")
    assert "nothing" in done.stderr


@pytest.mark.engine
def test_demo_serves_until_interrupted(tmp_path: Path, port: int) -> None:
    """Answers over HTTP, says that the text is nonsense, and ^C ends it with nothing left running."""
    variables = environment(PORT=port, DEMO_ONCE="")
    with subprocess.Popen(COMMAND, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("serving on"):
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    text = "".join(lines)
    assert process.returncode == 0, text + rest
    assert "\nprompt:     The capital of France is\ncompletion: '" in text
    assert "weights are random" in text
    assert f"serving on http://127.0.0.1:{port}/v1" in text
    assert rest == "\ndemo: stopped\n"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    assert running_from(tmp_path) == []


def running_from(folder: Path) -> list[str]:
    """Command lines of processes whose working folder is `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
        except OSError:  # it ended, or is another user's
            continue
    return found
