# SPDX-License-Identifier: Apache-2.0
"""How the venv comes about: which machine, which torch, and the wheel of our own commands."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from release import environment, manifest
from release.__main__ import main
from release.checkout import find_root
from release.errors import ReleaseError
from release.pins import read_pins

ROOT = Path(__file__).resolve().parents[2]


def test_a_python_outside_the_lock() -> None:
    pins = dataclasses.replace(read_pins(ROOT), pythons=("3.9",))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    message = f"Python {version}: the lock covers 3.9; make venv PYTHON=python3.9"
    with pytest.raises(ReleaseError, match=re.escape(message)):
        environment._check_machine(pins)


def test_a_machine_outside_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    with pytest.raises(ReleaseError, match="Linux aarch64: the upstream wheels and the lock are for Linux x86_64"):
        environment._check_machine(read_pins(ROOT))


def test_torch_falls_back_to_the_cuda_build(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a pip that offers no CPU build, the size of the other one is said before anything is fetched."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    pins, locked = read_pins(checkout), manifest.locked_dependencies(checkout)
    assert environment._choose_torch(checkout, pins, locked, "3.12") == "cuda"
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "asking pip for torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl"
    assert re.fullmatch(
        r"pip's configuration offers no CPU build of torch 2\.13\.0 for Python 3\.12: taking the public CUDA build, "
        r"up to 2\.\d GB to download with the CUDA libraries it links to",
        said[-1],
    )


def test_our_commands_are_one_small_wheel(checkout: Path) -> None:
    for name in ("validate", "bench"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, f"--wheel-dir={checkout / 'out'}", str(checkout)], check=True)
    (wheel,) = (checkout / "out").iterdir()
    assert wheel.name.startswith("vllm_exl3_tools-")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" not in name}
        assert folders == {name for name in ("release", "validate", "bench") if (checkout / name).is_dir()}
        assert "release/pins.toml" not in archive.namelist(), "an installed tool would take itself for a checkout"


@pytest.mark.slow
def test_resolving_again_gives_a_lock_that_holds(checkout: Path) -> None:
    """Asks the public index; versions may have moved on, what is written must be consistent."""
    assert main(["lock", "--resolve"]) == 0
    assert main(["lock", "--check"]) == 0


@pytest.mark.parametrize("command", ["", "lock", "compose", "verify", "requirements", "venv"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*([command] if command else []), "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m release {command}" in capsys.readouterr().out


def test_outside_any_checkout_the_tool_takes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_root() == ROOT
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "pins.toml").touch()
    (tmp_path / "deeper").mkdir()
    assert find_root(tmp_path / "deeper") == tmp_path
