# SPDX-License-Identifier: Apache-2.0
"""`fetch`: everything that an image is built from, gathered by hash into one folder, so that building asks no index.

    build/image/
      wheels/             every locked Python package, for the Python of the image, and the requirements files for pip
      upstream/           the upstream wheel
      build.json          what the image is made of; the labels, and the name of its cache folder
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from release import manifest
from release.checkout import sha256_of_file
from release.dependencies import Dependencies, pip_requirements
from release.errors import ReleaseError
from release.pins import Pins, read_pins
from release.upstream import cache, obtain, pip, tool_python

STAGING = "build/image"
COMPILE_REQUIREMENTS = "docker/compile-requirements.txt"
EXLLAMAV3_REQUIREMENTS = "docker/exllamav3-requirements.txt"
# glibc versions up to that of the image's Debian, in the three ways in which wheels name them.
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)),
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64",
)  # fmt: skip


def groups_of(target: str, torch: str) -> list[str]:
    """Groups of the lock that an image holds. The CPU wheel runs on either build of torch."""
    return ["cuda"] if target == "cuda" else ["cpu", f"torch-{torch}"]


def fetch(
    root: Path, target: str, python: str, torch: str, *, only_compile: bool = False, exllamav3: bool = False
) -> Iterator[str]:
    """Fills the folder; with `only_compile`, with no more than the CUDA extension needs.

    Raises ReleaseError for a Python that the lock does not cover, or what no index offers.
    """
    pins = read_pins(root)
    if python not in pins.pythons:
        raise ReleaseError(f"--python {python}: the lock covers {', '.join(pins.pythons)}")
    dependencies = manifest.locked_dependencies(root)
    folder = root / STAGING
    kept = cache(root, f"image-{target}-{python}")
    texts = {} if only_compile else {"requirements.txt": pip_requirements(dependencies, groups_of(target, torch))}
    if target == "cuda":
        texts["compile-requirements.txt"] = _compile_requirements(root, pins, dependencies)
    if exllamav3:
        texts["exllamav3-requirements.txt"] = (root / EXLLAMAV3_REQUIREMENTS).read_text(encoding="utf-8")
    for name, text in texts.items():
        requirements = cache(root, "requirements") / f"image-{target}-{name}"
        requirements.write_text(text, encoding="utf-8")
        _download(root, requirements, kept, python)
    words = " ".join(texts.values()).split()
    digests = {word.removeprefix("--hash=sha256:") for word in words if word.startswith("--hash=")}
    _only_these(kept, folder / "wheels", digests)
    for name, text in texts.items():
        (folder / "wheels" / name).write_text(text, encoding="utf-8")
    wheel = obtain(root, pins, target)
    _only_these(wheel.parent, folder / "upstream", {pins.wheels[target].sha256}, names={wheel.name})
    record = describe(root, pins, target, python, exllamav3=exllamav3)
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    packages = sorted((folder / "wheels").glob("*.whl"))
    yield f"{folder}: {len(packages)} packages, {sum(path.stat().st_size for path in packages) / 1e6:.0f} MB"


def _download(root: Path, requirements: Path, kept: Path, python: str) -> None:
    platforms = [f"--platform={platform}" for platform in _PLATFORMS]
    pip(
        tool_python(root), "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
        "--implementation=cp", f"--abi=cp{python.replace('.', '')}", "--abi=abi3", "--abi=none", *platforms,
        f"--python-version={python}", f"--find-links={kept}", f"--dest={kept}", f"--requirement={requirements}",
    )  # fmt: skip


def _compile_requirements(root: Path, pins: Pins, dependencies: Dependencies) -> str:
    """What docker/ pins for compiling alone, and the locked packages that it is compiled with."""
    lines = [line for line in dependencies.groups["cuda"] if line.partition("==")[0] in pins.image_compile]
    if len(lines) != len(pins.image_compile):
        found = ", ".join(lines)
        wanted = ", ".join(pins.image_compile)
        raise ReleaseError(f"release/pins.toml: [image] compile names {wanted}; the lock has {found}")
    chosen = replace(dependencies, groups={"compile": tuple(lines)})
    return (root / COMPILE_REQUIREMENTS).read_text(encoding="utf-8") + pip_requirements(chosen, ["compile"])


def _only_these(source: Path, folder: Path, digests: set[str], names: set[str] | None = None) -> None:
    """Links files of `source` that have one of the hashes into `folder`, and leaves nothing else there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if (names is None or path.name in names) and path.is_file() and sha256_of_file(path) in digests:
            try:
                os.link(path.resolve(), folder / path.name)
            except OSError:  # another file system
                shutil.copyfile(path, folder / path.name)


def describe(root: Path, pins: Pins, target: str, python: str, *, exllamav3: bool = False) -> dict[str, Any]:
    """What an image of this checkout is made of. `build`, of one lock and one target, names its cache folder."""
    lock = manifest.read_lock(root)
    digest = sha256_of_file(root / manifest.LOCK)
    return {
        "build": f"{lock['composed'][target]['version']}-{digest[:12]}",
        "version": lock["composed"][target]["version"],
        "target": target,
        "python": python,
        "torch": pins.torch_version,
        "exllamav3": exllamav3_version(root) if exllamav3 else "",
        "upstream": lock["upstream"]["version"],
        "upstream_commit": lock["upstream"]["commit"],
        "lock_sha256": digest,
        "tree": lock["composed"][target]["tree"],
        "dependencies": lock["dependencies"]["digest"],
    }


def exllamav3_version(root: Path) -> str:
    """Version of the pinned source of exllamav3's extension."""
    text = (root / EXLLAMAV3_REQUIREMENTS).read_text(encoding="utf-8")
    found = re.search(r"^exllamav3==(\S+) ", text, re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{EXLLAMAV3_REQUIREMENTS}: no line exllamav3==VERSION")
    return found[1]
