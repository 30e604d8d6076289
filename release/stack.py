# SPDX-License-Identifier: Apache-2.0
"""The series of patches: read, checked against its rules, applied in order."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from release import patch as patches
from release.checkout import PATCHES, files_of
from release.errors import ReleaseError
from release.patch import Patch
from release.pins import Pins

_NAME = re.compile(r"^vllm/[a-z0-9_]+(-[a-z0-9_]+){2,}\.patch$")
_BODY_LINES = range(2, 7)


def read_stack(root: Path, pins: Pins, *, draft: bool = False) -> list[Patch]:
    """Every patch in the order of patches/series, parsed and checked. Raises ReleaseError at the first fault.

    In a draft, the test that a patch names need not exist yet.
    """
    names = _series(root)
    stack = [patches.parse(name, (root / PATCHES / name).read_bytes()) for name in names]
    for patch in stack:
        check_patch(root, pins, patch, draft=draft)
    return stack


def check_patch(root: Path, pins: Pins, patch: Patch, *, draft: bool = False) -> None:
    """Raises ReleaseError for a name, a header or a target that the rules do not allow."""
    if not _NAME.match(patch.name):
        raise ReleaseError(f"{PATCHES}/{patch.name}: want vllm/AREA-VERB-OBJECT.patch in lower case")
    _check_header(pins, patch)
    for test in () if draft else patch.values("Test"):
        _check_test(root, f"{PATCHES}/{patch.name}", test)
    for path in patch.touches:
        _check_target(root, pins, patch, path)


def _series(root: Path) -> list[str]:
    """Paths below patches/, in order. A line is a path; `#` starts a comment."""
    path = root / PATCHES / "series"
    if not path.is_file():
        raise ReleaseError(f"{PATCHES}/series: not found")
    names = [line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    names = [name for name in names if name]
    for name in names:
        if names.count(name) > 1:
            raise ReleaseError(f"{PATCHES}/series: lists {name} {names.count(name)} times, want once")
        if not _NAME.match(name):
            raise ReleaseError(f"{PATCHES}/series: {name}, want vllm/AREA-VERB-OBJECT.patch in lower case")
        if not (root / PATCHES / name).is_file():
            raise ReleaseError(f"{PATCHES}/series: lists {name}, and {PATCHES}/{name} does not exist")
    present = {file.removeprefix(f"{PATCHES}/") for file in files_of(root, PATCHES)} - {"series"}
    for name in sorted(present - set(names)):
        raise ReleaseError(f"{PATCHES}/{name}: not listed in {PATCHES}/series")
    return names


def _check_header(pins: Pins, patch: Patch) -> None:
    where = f"{PATCHES}/{patch.name}"
    if patch.author != pins.author:
        raise ReleaseError(f"{where}: From: {patch.author}, want From: {pins.author}")
    if len(patch.body) not in _BODY_LINES:
        raise ReleaseError(f"{where}: {len(patch.body)} lines between Subject and trailers, want 2 to 6 that say why")
    for trailer in patches.TRAILERS:
        if not patch.values(trailer):
            raise ReleaseError(f"{where}: no {trailer} line in its header, want {', '.join(patches.TRAILERS)}")
    for trailer, value in patch.trailers:
        if trailer not in patches.TRAILERS:
            raise ReleaseError(f"{where}: header line {trailer}: {value}, want one of {', '.join(patches.TRAILERS)}")
        if trailer == "Reason" and value not in pins.reasons:
            raise ReleaseError(f"{where}: Reason: {value}, want one of {', '.join(pins.reasons)}")
        if trailer == "Base" and value != f"v{pins.upstream_version}":
            raise ReleaseError(f"{where}: Base: {value}, want v{pins.upstream_version}")


def _check_target(root: Path, pins: Pins, patch: Patch, path: str) -> None:
    where = f"{PATCHES}/{patch.name}"
    if path in pins.forbidden:
        raise ReleaseError(f"{where}: touches {path}, which differs between the upstream wheels; no patch may")
    if not path.startswith("vllm/") or not path.endswith(".py"):
        raise ReleaseError(f"{where}: touches {path}, want Python files below vllm/")
    if (root / path).exists():
        raise ReleaseError(f"{where}: touches {path}, which is the overlay's own; edit it there")


def _check_test(root: Path, where: str, test: str) -> None:
    """`test` is PATH::NAME or PATH::CLASS::NAME, and must be defined there."""
    path, *names = test.split("::")
    if not names or not path.startswith("tests/"):
        raise ReleaseError(f"{where}: Test: {test}, want tests/PATH.py::NAME")
    if not (root / path).is_file():
        raise ReleaseError(f"{where}: Test: {test}, and {path} does not exist")
    scope: ast.AST = ast.parse((root / path).read_text(encoding="utf-8"))
    for name in names:
        found = [node for node in _definitions(scope) if node.name == name.split("[", 1)[0]]
        if not found:
            raise ReleaseError(f"{where}: Test: {test}, and {path} defines no {name}")
        scope = found[0]


def _definitions(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def apply_stack(
    stack: list[Patch], read: Callable[[str], bytes], exists: Callable[[str], bool]
) -> Iterator[tuple[Patch, dict[str, bytes]]]:
    """Yields (patch, the content of every file touched so far) after each patch.

    `read` and `exists` look at the upstream tree. Raises ReleaseError at the first hunk that is not exactly in place.
    """
    files: dict[str, bytes] = {}
    for patch in stack:
        for edit in patch.edits:
            if edit.path not in files:
                if not exists(edit.path):
                    raise ReleaseError(f"{PATCHES}/{patch.name}: edits {edit.path}, which upstream does not have")
                files[edit.path] = read(edit.path)
            files[edit.path] = patches.apply(patch, edit, files[edit.path])
        yield patch, dict(files)


def mark_changed(path: str, data: bytes, stack: list[Patch]) -> bytes:
    """A patched file with the notice that Apache-2.0, section 4(b), asks for, as its last line.

    At the end, so that no line number moves; made here, so that no patch carries it.
    """
    names = ", ".join(patch.name for patch in stack if path in patch.touches)
    line_feed = b"" if data.endswith(b"\n") or not data else b"\n"
    return data + line_feed + f"# Changed by the EXL3 fork of vLLM: {names}\n".encode()


def changed_files(stack: list[Patch]) -> list[str]:
    return sorted({path for patch in stack for path in patch.touches})
