# SPDX-License-Identifier: Apache-2.0
"""The locked Python packages: what they were resolved from, and how pip is told about them.

Groups: `cpu` and `cuda`, what the composed wheels need; `torch-cpu` and `torch-cuda`, the two choices of torch for the
CPU wheel with what each needs besides; `tools`, what tests and lint need.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from release.checkout import sha256
from release.compose import Composition, requirement_name
from release.errors import ReleaseError
from release.pins import Pins

GROUPS = ("cpu", "cuda", "tools", "torch-cpu", "torch-cuda")


@dataclass(frozen=True, kw_only=True)
class File:
    """One published file of a package."""

    name: str
    sha256: str
    size: int  # bytes; 0 where unknown


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """`groups`: group -> requirement lines `name==version` or `name==version ; marker`; `files`: by `name==version`."""

    inputs: str  # SHA-256 of what was resolved
    groups: Mapping[str, tuple[str, ...]]
    files: Mapping[str, tuple[File, ...]]

    def as_table(self) -> dict[str, Any]:
        """For the lock, with a digest over all of it: a plain `lock` keeps these, so it must notice an edit."""
        table = self._table()
        return {"inputs": table["inputs"], "digest": _digest(table)} | table

    def _table(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "groups": {group: list(self.groups[group]) for group in sorted(self.groups)},
            "files": {pin: [_render_file(file) for file in self.files[pin]] for pin in sorted(self.files)},
        }


def from_table(table: Mapping[str, Any]) -> Dependencies:
    """Raises KeyError or ValueError for a table of another form, ReleaseError for one whose digest is another."""
    found, locked = _digest({key: value for key, value in table.items() if key != "digest"}), table["digest"]
    if found != locked:
        raise ReleaseError(
            f"release/manifest.lock: its dependencies were changed by hand (digest {found}, want {locked}); "
            "python -m release lock --resolve writes them anew"
        )
    return Dependencies(
        inputs=table["inputs"],
        groups={group: tuple(lines) for group, lines in table["groups"].items()},
        files={pin: tuple(_parse_file(line) for line in lines) for pin, lines in table["files"].items()},
    )


def _digest(table: Mapping[str, Any]) -> str:
    return sha256(json.dumps(table, sort_keys=True).encode())


def _render_file(file: File) -> str:
    return f"sha256:{file.sha256} {file.size} {file.name}"


def _parse_file(line: str) -> File:
    digest, size, name = line.split(" ", 2)
    return File(name=name, sha256=digest.removeprefix("sha256:"), size=int(size))


def project(pins: Pins, compositions: Mapping[str, Composition]) -> str:
    """What is resolved, as a pyproject file: the needs of both composed wheels as extras, and those of the tools."""
    cuda = _requirements(compositions["cuda"].metadata)
    extras = {
        "cuda": sorted([*cuda, *pins.extra["cuda"]]),
        "tools": sorted([*pins.tools, pins.resolver]),
        "torch-cuda": [f"torch=={pins.torch_version}"],
    }
    if "cpu" in compositions:
        without_torch = [
            line for line in _requirements(compositions["cpu"].metadata) if requirement_name(line) != "torch"
        ]
        extras = {"cpu": sorted([*without_torch, *pins.torch_requires, *pins.extra["cpu"]])} | extras
    oldest, newest = pins.pythons[0], pins.pythons[-1]
    major, minor = newest.split(".")
    lines = ["[project]", 'name = "fork"', 'version = "0"']
    lines += [f'requires-python = ">={oldest},<{major}.{int(minor) + 1}"', "[project.optional-dependencies]"]
    lines += [f"{name} = [{', '.join(_quote(line) for line in needs)}]" for name, needs in extras.items()]
    lines += ["[tool.uv]", "package = false"]
    lines += ["environments = [\"sys_platform == 'linux' and platform_machine == 'x86_64'\"]"]
    return "\n".join(lines) + "\n"


def inputs_hash(text: str) -> str:
    return sha256(text.encode())


def _quote(text: str) -> str:
    return "'" + text.replace("'", '"') + "'"


def _requirements(metadata: bytes) -> list[str]:
    head = metadata.decode().partition("\n\n")[0]
    lines = [line.removeprefix("Requires-Dist: ") for line in head.split("\n") if line.startswith("Requires-Dist: ")]
    return [line for line in lines if not re.search(r"\bextra\s*==", line)]


def pip_requirements(dependencies: Dependencies, groups: Iterable[str]) -> str:
    """A requirements file with a hash for every published file, for `pip install --no-deps --require-hashes`."""
    lines = sorted({line for group in groups for line in dependencies.groups[group]})
    out = []
    for line in lines:
        pin = line.split(" ", 1)[0]
        if not dependencies.files.get(pin):
            raise ReleaseError(f"release/manifest.lock: {pin} has no file")
        hashes = sorted({f"--hash=sha256:{file.sha256}" for file in dependencies.files[pin]})
        out.append(" \\\n    ".join([line, *hashes]))
    return "\n".join(out) + "\n"


def download_size(dependencies: Dependencies, groups: Iterable[str], python: str) -> int:
    """Bytes that pip may have to fetch for these groups on one Python, say "3.11": the largest file of each package."""
    tag = "cp" + python.replace(".", "")
    total = 0
    for pin in {line.split(" ", 1)[0] for group in groups for line in dependencies.groups[group]}:
        sizes = [file.size for file in dependencies.files[pin] if _fits_python(file.name, tag)]
        total += max(sizes, default=0)
    return total


def _fits_python(name: str, tag: str) -> bool:
    return tag in name or not re.search(r"-cp3\d+-cp3", name)
