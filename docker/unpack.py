# SPDX-License-Identifier: Apache-2.0
"""Composes the wheel inside the build and unpacks it into two folders that become two layers of the image.

    OUT/upstream/   files that are upstream's, byte for byte: large, the same until the next rebase
    OUT/fork/       patched files, the overlay, the extension, metadata, commands: small, all that an edit changes

Files are dated 1980-01-01, so the layers are the same whenever they are made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import zipfile
from pathlib import Path

from release import compose, verify
from release.archive import WheelReader
from release.checkout import find_root

DATE = 315532800  # seconds: 1980-01-01
# Guarded, because spawned workers import it again.
SCRIPT = """#!{python}
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""
HOME_FILES = ("entrypoint", "healthcheck", "handshake.py", "presets")  # from docker/


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--extension", type=Path, required=True, help="folder with the compiled library, or empty")
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    root = find_root()
    libraries = sorted(given.extension.glob("*.so"))
    extension = libraries[0].read_bytes() if libraries else None
    composition = compose.compose(root, given.target, extension=extension)
    verify.require_locked(root, composition)
    wheel = compose.write_file(composition, Path("/dist"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = given.venv.relative_to("/") / "lib" / version / "site-packages"
    upstream, fork = given.out / "upstream", given.out / "fork"
    with WheelReader(composition.source) as reader:
        same = reader.record()
    _unpack(wheel, same, upstream / packages, fork / packages)
    shutil.copytree(root / "validate", fork / packages / "validate", ignore=shutil.ignore_patterns("__pycache__"))
    script = fork / given.venv.relative_to("/") / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.format(python=given.venv / "bin" / "python3"))
    script.chmod(0o755)
    _home(root, fork / given.home.relative_to("/"))
    for path in (given.out, *given.out.rglob("*")):
        os.utime(path, (DATE, DATE))
    return 0


def _unpack(wheel: Path, same: dict[str, tuple[str, int]], upstream: Path, fork: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, WheelReader(wheel) as composed:
        record = composed.record()
        for name in archive.namelist():
            folder = upstream if name in same and same[name] == record.get(name) else fork
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _home(root: Path, home: Path) -> None:
    home.mkdir(parents=True)
    for name in HOME_FILES:
        source = root / "docker" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, home / name)
    shutil.copy(root / "build.json", home / "build.json")
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(root / name, home / name)


if __name__ == "__main__":
    sys.exit(main())
