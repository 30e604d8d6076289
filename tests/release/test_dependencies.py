# SPDX-License-Identifier: Apache-2.0
"""The locked packages answer every need of the composed wheels, on every Python the lock covers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from release import compose, dependencies, manifest
from release.__main__ import main
from release.pins import read_pins

ROOT = Path(__file__).resolve().parents[2]
PINS = read_pins(ROOT)
GROUPS = {"cpu": ["cpu", "torch-cpu"], "cpu on the CUDA build": ["cpu", "torch-cuda"], "cuda": ["cuda"]}
# Debian 12 has glibc 2.36, Ubuntu 22.04 has 2.35; llguidance asks for 2.31.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


@pytest.fixture(scope="module")
def locked() -> dependencies.Dependencies:
    return manifest.locked_dependencies(ROOT)


def environment(python: str) -> dict[str, str]:
    named = {"python_version": python, "python_full_version": f"{python}.5", "extra": ""}
    return {**default_environment(), "platform_machine": "x86_64", "sys_platform": "linux", **named}


def installed(locked: dependencies.Dependencies, groups: list[str], python: str) -> dict[str, str]:
    """name -> version of what pip installs from these groups on that Python."""
    found: dict[str, str] = {}
    for line in sorted({line for group in groups for line in locked.groups[group]}):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment(python)):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice on Python {python}"
            found[name] = str(requirement.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("python", PINS.pythons)
@pytest.mark.parametrize("groups", GROUPS)
def test_every_need_is_met(
    locked: dependencies.Dependencies, groups: str, python: str, upstream_wheels: object
) -> None:
    versions = installed(locked, GROUPS[groups], python)
    composition = compose.compose(ROOT, groups.split(maxsplit=1)[0], draft=True)
    head = composition.metadata.decode().partition("\n\n")[0]
    for line in re.findall(r"^Requires-Dist: (.*)$", head, re.MULTILINE):
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate(environment(python)):
            version = versions.get(canonicalize_name(need.name))
            assert version is not None, f"{line}: not locked"
            assert need.specifier.contains(version, prereleases=True), f"{line}: {version} is locked"


@pytest.mark.parametrize("python", PINS.pythons)
@pytest.mark.parametrize("group", ["cpu", "cuda", "tools", "torch-cpu", "torch-cuda"])
def test_every_package_has_a_wheel(locked: dependencies.Dependencies, group: str, python: str) -> None:
    version = tuple(int(part) for part in python.split("."))
    tags = set(cpython_tags(version, platforms=[*PLATFORMS, "any"]))
    for name, release in installed(locked, [group], python).items():
        pin = next(
            pin
            for pin in locked.files
            if canonicalize_name(pin.split("==")[0]) == name and pin.endswith(f"=={release}")
        )
        files = [parse_wheel_filename(file.name)[3] for file in locked.files[pin]]
        assert any(_fits(file, tags, version) for file in files), f"{pin}: {[file.name for file in locked.files[pin]]}"


def _fits(file: frozenset, tags: set, version: tuple[int, ...]) -> bool:  # type: ignore[type-arg]
    """Tags of any Python 3 are not among a CPython's own."""
    generic = {f"py3{minor}" for minor in range(version[1] + 1)} | {"py3"}
    return bool(file & tags) or any(
        tag.interpreter in generic and tag.abi == "none" and tag.platform in {*PLATFORMS, "any"} for tag in file
    )


def test_requirements_carry_every_hash(locked: dependencies.Dependencies) -> None:
    text = dependencies.pip_requirements(locked, ["cpu", "torch-cpu"])
    entries = text.replace(" \\\n    ", " ").splitlines()
    assert len(entries) == len({*locked.groups["cpu"], *locked.groups["torch-cpu"]})
    for entry in entries:
        pin = entry.split(" ")[0]
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)
        assert sorted(hashes) == sorted({file.sha256 for file in locked.files[pin]}), pin


def test_requirements_are_printed(locked: dependencies.Dependencies, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requirements", "cuda", "tools"]) == 0
    assert capsys.readouterr().out == dependencies.pip_requirements(locked, ["cuda", "tools"])
    assert set(locked.groups) == set(dependencies.GROUPS)


def test_the_project_that_is_resolved_is_valid(upstream_wheels: object) -> None:
    compositions = {target: compose.compose(ROOT, target, draft=True) for target in ("cpu", "cuda")}
    project = tomllib.loads(dependencies.project(PINS, compositions))
    extras = project["project"]["optional-dependencies"]
    assert "torch==2.13.0" in extras["cuda"]
    assert not [need for need in extras["cpu"] if Requirement(need).name == "torch"]
    assert all("extra" not in str(Requirement(need).marker) for need in extras["cuda"])


def test_pip_takes_the_requirements_without_any_configuration(
    locked: dependencies.Dependencies, tmp_path: Path
) -> None:
    """One small package for real, by hash, with pip's configuration switched off and with whatever there is."""
    pin = next(pin for pin in locked.files if pin.startswith("einops=="))
    hashes = " ".join(f"--hash=sha256:{file.sha256}" for file in locked.files[pin])
    listing = tmp_path / "requirements.txt"
    listing.write_text(f"{pin} {hashes}\n")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | {
        "PIP_CONFIG_FILE": os.devnull, "PIP_CERT": os.environ.get("PIP_CERT", ""),
    }  # fmt: skip
    for number, variables in enumerate((dict(os.environ), {name: value for name, value in bare.items() if value})):
        out = tmp_path / str(number)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", f"--dest={out}"]
        subprocess.run([*command, f"--requirement={listing}"], env=variables, check=True)
        assert [path.name for path in out.iterdir()] == [locked.files[pin][0].name]
