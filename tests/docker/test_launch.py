# SPDX-License-Identifier: Apache-2.0
"""`validate launch` outside an image: it looks for what the installed build runs on, at the port it will listen on."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from validate import launch, preflight
from validate.__main__ import main
from validate.deployment import Deployment


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What MODEL names."""
    folder = tmp_path / "dense"
    assert main(["make-checkpoint", "dense", str(folder), "--seed", "0"]) == 0
    monkeypatch.setenv("MODEL", str(folder))
    monkeypatch.setenv("EXL3_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    """Servers that would have taken this process's place."""
    found: list[Deployment] = []
    monkeypatch.setattr(launch, "_program", lambda plan: "vllm")
    monkeypatch.setattr(launch, "_replace", lambda program, plan: found.append(plan))
    return found


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as socket_:
        socket_.bind(("0.0.0.0", 0))
        socket_.listen()
        yield socket_.getsockname()[1]


BUILDS = {"0.32.0+exl3.1.cpu": "cpu", "0.32.0+exl3.1": "cuda", None: "cuda"}


@pytest.mark.parametrize("version", BUILDS)
def test_the_build_s_version_says_what_it_runs_on(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert preflight.installed_target() == BUILDS[version]


def test_the_cpu_build_is_started_without_a_gpu(checkpoint: Path, started: list[Deployment]) -> None:
    """As docs/deployment.md writes it, with the build that the tests run in."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        free = probe.getsockname()[1]
    assert launch.main(["--", "--port", str(free)]) == 0
    [plan] = started
    assert (plan.target, plan.port) == ("cpu", free)
    assert "--enforce-eager" in plan.command()
    assert main(["preflight", str(checkpoint)]) == 0


def test_the_port_of_the_command_line_is_the_one_that_must_be_free(
    checkpoint: Path, started: list[Deployment], taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["--", "--port", str(taken)]) == 1
    assert f"  * port {taken}: Address already in use; " in capsys.readouterr().err
    assert not started


def test_the_preflight_is_told_how_much_memory_will_be_asked_for(
    checkpoint: Path, started: list[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(preflight, "problems", lambda *given, **named: asked.append(named["utilisation"]) or ["no"])
    assert launch.main(["--", "--gpu-memory-utilization", "0.5"]) == 1
    assert (asked, started) == ([0.5], [])
