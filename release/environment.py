# SPDX-License-Identifier: Apache-2.0
"""Makes .venv: the composed CPU fork with its locked dependencies and the test tools, redoing only what changed."""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from release import compose, manifest
from release.checkout import sha256, sha256_of_file
from release.dependencies import Dependencies, download_size, pip_requirements
from release.errors import ReleaseError
from release.pins import Pins, read_pins
from release.upstream import cache, make_venv, pip, tool_python

TORCH = ("auto", "cpu", "cuda")
_STAMP = "fork-stamp.json"


def make(root: Path, *, torch: str = "auto", folder: str = ".venv") -> int:
    """Brings the venv up to date. Raises ReleaseError for a machine or a Python that the lock does not cover."""
    pins = read_pins(root)
    python_version = _check_machine(pins)
    with _only_one(root):
        home = root / folder
        stamp = _read_stamp(home)
        if stamp.get("python") != platform.python_version() or not (home / "bin" / "python").exists():
            print(f"making {folder} with Python {platform.python_version()}", flush=True)
            make_venv(home)
            stamp = {"python": platform.python_version()}
        dependencies = manifest.locked_dependencies(root)
        choice = stamp.get("torch", "") if torch == "auto" else torch
        choice = choice or _choose_torch(root, pins, dependencies, python_version)
        _install_dependencies(root, home, stamp, dependencies, choice, python_version)
        _install_fork(root, home, stamp)
        _install_tools(root, home, stamp)
    return 0


def _check_machine(pins: Pins) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version not in pins.pythons:
        covered = f"the lock covers {', '.join(pins.pythons)}; make venv PYTHON=python{pins.pythons[0]}"
        raise ReleaseError(f"Python {version}: {covered}")
    found = f"{platform.system()} {platform.machine()}"
    if found != "Linux x86_64":
        raise ReleaseError(f"{found}: the upstream wheels and the lock are for Linux x86_64")
    return version


def _choose_torch(root: Path, pins: Pins, dependencies: Dependencies, python_version: str) -> str:
    """`cpu` where pip's configuration offers the CPU build of torch, else `cuda`, which the public index has."""
    tag = "cp" + python_version.replace(".", "")
    offered = [name for name in pins.torch_cpu_files if f"-{tag}-{tag}-" in name]
    listing = cache(root, "requirements") / "torch-cpu.txt"
    listing.write_text(pip_requirements(dependencies, ["torch-cpu"]), encoding="utf-8")
    wheels = cache(root, "packages-cpu")
    command = [str(tool_python(root)), "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", f"--dest={wheels}", f"--requirement={listing}"]
    command += ["--disable-pip-version-check"]
    if offered:
        print(f"asking pip for {offered[0]}", flush=True)
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return "cpu"
        print("\n".join(line for line in done.stderr.splitlines() if line.startswith("ERROR")), flush=True)
    size = download_size(dependencies, ["torch-cuda"], python_version)
    print(
        f"pip's configuration offers no CPU build of torch {pins.torch_version} for Python {python_version}: taking "
        f"the public CUDA build, up to {size / 1e9:.1f} GB to download with the CUDA libraries it links to",
        flush=True,
    )
    return "cuda"


def _install_dependencies(
    root: Path, home: Path, stamp: dict[str, str], dependencies: Dependencies, torch: str, python_version: str
) -> None:
    groups = ["cpu", "tools", f"torch-{torch}"]
    text = pip_requirements(dependencies, groups)
    if stamp.get("requirements") == sha256(text.encode()):
        return
    listing = cache(root, "requirements") / f"{home.name}.txt"
    listing.write_text(text, encoding="utf-8")
    size = download_size(dependencies, groups, python_version)
    print(f"installing the locked dependencies, up to {size / 1e6:.0f} MB to download", flush=True)
    stamp.pop("requirements", None)
    _write_stamp(home, stamp)
    packages = cache(root, f"packages-{torch}")  # one a choice: 2.13.0+cpu also answers to 2.13.0
    python = home / "bin" / "python"
    by_hash = ["--no-deps", "--require-hashes", "--only-binary=:all:", f"--requirement={listing}"]
    pip(python, "download", f"--dest={packages}", *by_hash)
    pip(python, "install", "--quiet", "--no-compile", "--no-index", f"--find-links={packages}", *by_hash)
    stamp |= {"requirements": sha256(text.encode()), "torch": torch}
    _write_stamp(home, stamp)


def _install_fork(root: Path, home: Path, stamp: dict[str, str]) -> None:
    """Composes from the checkout as it is, locked or not: this is where the overlay is worked on."""
    composition = compose.compose(root, "cpu", draft=True)
    digest = manifest.wheel_sha256(composition)
    if stamp.get("fork") == digest:
        return
    wheel = compose.write_file(composition, cache(root, "fork"))
    if digest != manifest.read_lock(root)["composed"]["cpu"]["sha256"]:
        print("the checkout differs from release/manifest.lock; python -m release lock brings that up to date")
    print(f"installing {wheel.name}", flush=True)
    stamp.pop("fork", None)
    _write_stamp(home, stamp)
    listing = cache(root, "requirements") / f"{home.name}-fork.txt"
    listing.write_text(f"{wheel.as_uri()} --hash=sha256:{digest}\n", encoding="utf-8")
    pip(
        home / "bin" / "python", "install", "--quiet", "--no-index", "--no-deps", "--require-hashes", "--no-compile",
        "--force-reinstall", f"--requirement={listing}",
    )  # fmt: skip
    stamp["fork"] = digest
    _write_stamp(home, stamp)


def _install_tools(root: Path, home: Path, stamp: dict[str, str]) -> None:
    """Our own commands (release, validate, bench), editable: the checkout's files are what runs."""
    packages = [name for name in ("release", "validate", "bench") if (root / name / "__init__.py").is_file()]
    digest = sha256((sha256_of_file(root / "pyproject.toml") + " ".join(packages)).encode())
    if stamp.get("tools") == digest:
        return
    python = home / "bin" / "python"
    pip(python, "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", f"--editable={root}")
    pip(python, "check")
    stamp["tools"] = digest
    _write_stamp(home, stamp)


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """Two `make` at once take turns."""
    with (cache(root) / "venv.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another command that is making the venv", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _read_stamp(home: Path) -> dict[str, str]:
    try:
        return dict(json.loads((home / _STAMP).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write_stamp(home: Path, stamp: dict[str, str]) -> None:
    (home / _STAMP).write_text(json.dumps(stamp, indent=1, sort_keys=True) + "\n", encoding="utf-8")
