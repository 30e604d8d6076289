# SPDX-License-Identifier: Apache-2.0
"""A private copy of the checkout for each test to spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from release.__main__ import main
from release.pins import TARGETS, read_pins
from release.upstream import obtain

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("release", "patches", "vllm", "csrc", "docker", "tests")
_LEAVE = shutil.ignore_patterns("__pycache__", "data")


@pytest.fixture(scope="session")
def upstream_wheels() -> dict[str, Path]:
    """Both upstream wheels, fetched once into the clone."""
    return {target: obtain(ROOT, read_pins(ROOT), target) for target in TARGETS}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upstream_wheels: dict[str, Path]) -> Path:
    """A copy that has the upstream wheels in its cache; the working folder for the test."""
    copy = copy_checkout(tmp_path, upstream_wheels)
    monkeypatch.chdir(copy)
    return copy


def copy_checkout(folder: Path, upstream_wheels: dict[str, Path]) -> Path:
    copy = folder / "checkout"
    copy.mkdir()
    for name in (*_PARTS, "NOTICE", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=_LEAVE)
        elif source.is_file():
            shutil.copy(source, copy / name)
    wheels = copy / ".cache" / "wheels"
    wheels.mkdir(parents=True)
    for path in upstream_wheels.values():
        (wheels / path.name).symlink_to(path)
    return copy


Refusal = Callable[..., str]


@pytest.fixture
def refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a release command that must fail: returns its one message, after checking that nothing was written."""

    def run(*arguments: str) -> str:
        before = sorted((checkout / "dist").glob("*")) if (checkout / "dist").exists() else []
        capsys.readouterr()
        assert main(arguments) == 1
        after = sorted((checkout / "dist").glob("*")) if (checkout / "dist").exists() else []
        assert after == before, "a refused command left output"
        printed = capsys.readouterr()
        assert printed.out == ""
        prefix = f"release {arguments[0]}: "
        assert printed.err.startswith(prefix)
        return printed.err.removeprefix(prefix).rstrip("\n")

    return run


COMPOSE = ("compose", "--target", "cpu", "--unlocked")
HEADER = """\
From: EXL3 fork of vLLM <fork@exl3.invalid>
Subject: Say hello from the version check

The first line that says why.
The second line that says why.

Reason: divergent
Origin: none
Base: v0.32.0
Remove-when: never
Test: tests/release/test_stack.py::test_the_stack_is_applied_in_order

"""


def write_patch(checkout: Path, name: str, text: str) -> None:
    """Appends a patch to a copy's series."""
    path = checkout / "patches" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    with (checkout / "patches" / "series").open("a", encoding="utf-8") as series:
        series.write(f"{name}\n")
