# SPDX-License-Identifier: Apache-2.0
"""Fetches pinned wheels by hash with the user's own pip configuration, and keeps them inside the clone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from release.checkout import sha256_of_file
from release.errors import ReleaseError
from release.pins import Pins, UpstreamWheel

_QUIET = "--disable-pip-version-check"


def cache(root: Path, *parts: str) -> Path:
    """A folder below .cache, made if it is not there."""
    folder = root.joinpath(".cache", *parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tool_python(root: Path) -> Path:
    """The interpreter of a small venv inside the clone: a system Python may come without pip."""
    folder = root / ".cache" / f"tools-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not python.exists() or not (folder / "complete").exists():
        make_venv(folder)
        (folder / "complete").touch()
    return python


def make_venv(folder: Path) -> None:
    """A new venv with pip, in place of whatever lies there."""
    try:
        venv.create(folder, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        raise ReleaseError(
            f"{folder}: python3 -m venv fails on this machine; on Debian, install python3-venv"
        ) from None


def pip(python: Path, *arguments: str) -> None:
    """Runs pip and lets the user see its progress. Raises ReleaseError with what was asked."""
    command = [str(python), "-m", "pip", *arguments, _QUIET]
    if subprocess.run(command, check=False).returncode:
        raise ReleaseError(f"pip {' '.join(arguments)}: failed, see above")


def obtain(root: Path, pins: Pins, target: str) -> Path:
    """The upstream wheel of a target, from the cache or from pip; its SHA-256 is checked every time."""
    wheel = pins.wheels[target]
    path = cache(root, "wheels") / wheel.file
    if not path.exists():
        print(f"fetching {wheel.file}, {wheel.size / 1e6:.0f} MB", file=sys.stderr, flush=True)
        _download(root, pins, wheel, path)
    found = sha256_of_file(path)
    if found != wheel.sha256:
        wanted = f"want {wheel.sha256} (release/pins.toml); remove it to fetch it again"
        raise ReleaseError(f"{path}: sha256 {found}, {wanted}")
    return path


def _download(root: Path, pins: Pins, wheel: UpstreamWheel, path: Path) -> None:
    requirement = f"{wheel.distribution}=={pins.upstream_version} --hash=sha256:{wheel.sha256}\n"
    _, abi, platform = wheel.tag.split("-")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        listing = Path(folder, "requirements.txt")
        listing.write_text(requirement, encoding="utf-8")
        pip(
            tool_python(root), "download", "--no-deps", "--require-hashes", "--only-binary=:all:",
            "--implementation=cp", f"--abi={abi}", f"--platform={platform}",
            f"--python-version={pins.pythons[0]}", f"--dest={folder}", f"--requirement={listing}",
        )  # fmt: skip
        Path(folder, wheel.file).replace(path)


def obtain_other(root: Path, pins: Pins, target: str, version: str) -> Path | None:
    """The wheel of another upstream release, for this target's platform; None where the index has none.

    Nothing pins it yet: its hash is what the index gave, and whoever moves there locks it. Raises ReleaseError where
    the index cannot be asked.
    """
    wheel = pins.wheels[target]
    name = wheel.distribution.replace("-", "_")
    kept = cache(root, "wheels")
    if found := sorted(kept.glob(f"{name}-{version}-*x86_64.whl")):
        return found[0]
    _, abi, _ = wheel.tag.split("-")
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35)]
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        command = [
            str(tool_python(root)), "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
            "--implementation=cp", f"--abi={abi}", *platforms, f"--python-version={pins.pythons[0]}",
            f"--dest={folder}", f"{wheel.distribution}=={version}", _QUIET,
        ]  # fmt: skip
        print(f"asking the index for {wheel.distribution}=={version}", file=sys.stderr, flush=True)
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            path = next(Path(folder).glob("*.whl"))
            return path.replace(kept / path.name)
        # pip lists the versions there are, and "none" also where it could not reach the index at all.
        if "No matching distribution found" in done.stderr and "(from versions: none)" not in done.stderr:
            return None
        raise ReleaseError(f"pip download {wheel.distribution}=={version}: {done.stderr.strip()}")
