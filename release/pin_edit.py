# SPDX-License-Identifier: Apache-2.0
"""Changes release/pins.toml for another release of upstream, keeping its comments: it is written by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from release.archive import WheelReader
from release.checkout import sha256_of_file
from release.errors import ReleaseError
from release.pins import read_pins

_REQUIRES = re.compile(r"^Requires-Dist: ([A-Za-z0-9._-]+)==([^\s;+]+)(?:\+\w+)?\s*(?:;.*)?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class OtherUpstream:
    """A wheel of another upstream release, as it describes itself."""

    version: str
    file: str
    sha256: str
    size: int  # bytes
    commit: str  # as vllm/_version.py has it, without the g; empty where it has none
    torch: str
    exact: Mapping[str, str]  # project -> version, of every requirement `==`


def describe(reader: WheelReader, version: str) -> OtherUpstream:
    metadata = reader.read(f"{reader.dist_info}/METADATA").decode().partition("\n\n")[0]
    exact = {name.lower().replace("_", "-"): pin for name, pin in _REQUIRES.findall(metadata)}
    return OtherUpstream(
        version=version,
        file=reader.path.name,
        sha256=sha256_of_file(reader.path),
        size=reader.path.stat().st_size,
        commit=_commit(reader.read("vllm/_version.py")),
        torch=exact.get("torch", ""),
        exact=exact,
    )


def _commit(source: bytes) -> str:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "commit_id" in names or "__commit_id__" in names:
                return node.value.value.removeprefix("g")
    return ""


def move_pins(root: Path, version: str, wheels: Mapping[str, OtherUpstream]) -> Iterator[str]:
    """Writes the new upstream into pins.toml and says what was changed and what is left to a person."""
    path = root / "release" / "pins.toml"
    pins = read_pins(root)
    text = path.read_text(encoding="utf-8")
    text = _set(text, "fork", "release", "1")
    text = _set(text, "upstream", "version", f'"{version}"')
    text = _set(text, "upstream", "commit", f'"{wheels["cuda"].commit}"')
    for target in pins.wheels:
        section = f"upstream.{target}"
        if target not in wheels:
            text = _without(text, section)
            continue
        wheel = wheels[target]
        for key, value in (("file", f'"{wheel.file}"'), ("sha256", f'"{wheel.sha256}"'), ("size", str(wheel.size))):
            text = _set(text, section, key, value)
    torch = wheels["cuda"].torch
    text = _set(text, "torch", "version", f'"{torch}"')
    for requirements in pins.extra.values():
        for requirement in requirements:
            name, _, old = requirement.partition("==")
            if (new := wheels["cuda"].exact.get(name, old)) != old:
                text = text.replace(f'"{requirement}"', f'"{name}=={new}"')
                yield f"release/pins.toml: {requirement} -> {name}=={new}, as upstream's extra has it"
    path.write_text(text, encoding="utf-8")
    yield f"written release/pins.toml: upstream {version}, torch {torch}, release 1"
    if torch != pins.torch_version and "cpu" in wheels:
        yield "release/pins.toml: [torch] requires and cpu-files are still those of the old torch: write them by hand"
    yield "now: python -m release lock --resolve, then make lint test"


def _set(text: str, section: str, key: str, value: str) -> str:
    """The TOML text with one plain value replaced; a comment behind it stays."""
    lines = text.splitlines(keepends=True)
    start, end = _span(lines, section)
    for index in range(start, end):
        match = re.match(rf"({re.escape(key)} = )(\"[^\"]*\"|\d+)(.*\n)", lines[index])
        if match:
            lines[index] = match[1] + value + match[3]
            return "".join(lines)
    raise ReleaseError(f"release/pins.toml: [{section}] has no line {key} = ...")


def _without(text: str, section: str) -> str:
    lines = text.splitlines(keepends=True)
    start, end = _span(lines, section)
    return "".join(lines[: start - 1] + lines[end:])


def _span(lines: list[str], section: str) -> tuple[int, int]:
    """Lines of a section's body, as indices [start, end)."""
    head = f"[{section}]\n"
    if lines.count(head) != 1:
        raise ReleaseError(f"release/pins.toml: {lines.count(head)} lines {head.strip()}, want 1")
    start = lines.index(head) + 1
    end = next((index for index in range(start, len(lines)) if lines[index].startswith("[")), len(lines))
    return start, end
