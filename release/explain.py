# SPDX-License-Identifier: Apache-2.0
"""`stack` and `explain`: the series as a reviewer wants to read it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from release import stack, upstream
from release.archive import WheelReader
from release.checkout import PATCHES
from release.errors import ReleaseError
from release.patch import FileEdit, Hunk, Patch
from release.pins import read_pins

_DEFINITION = re.compile(rb"^(\s*)(?:async def|def|class)\s+(\w+)")


def sizes(patch: Patch) -> tuple[int, int]:
    """(lines added, lines removed), context not counted."""
    added = removed = 0
    for edit in patch.edits:
        for hunk in edit.hunks:
            common = len(hunk.old) - _removed(hunk)
            removed += len(hunk.old) - common
            added += len(hunk.new) - common
    return added, removed


def _removed(hunk: Hunk) -> int:
    """Old lines that are not, in order, among the new: what diff shows with a minus."""
    length = [0] * (len(hunk.new) + 1)
    for line in hunk.old:  # the longest common subsequence, one row at a time
        above = length[:]
        for index, other in enumerate(hunk.new):
            length[index + 1] = above[index] + 1 if line == other else max(above[index + 1], length[index])
    return len(hunk.old) - length[-1]


def as_table(series: Sequence[Patch]) -> list[dict[str, Any]]:
    rows = []
    for number, patch in enumerate(series, 1):
        added, removed = sizes(patch)
        rows.append({
            "number": number, "file": patch.name, "subject": patch.subject, "added": added, "removed": removed,
            "reason": patch.values("Reason")[0], "origin": patch.values("Origin"), "touches": list(patch.touches),
            "remove_when": patch.values("Remove-when"), "tests": patch.values("Test"),
        })  # fmt: skip
    return rows


def stack_lines(series: Sequence[Patch]) -> Iterator[str]:
    rows = as_table(series)
    for row in rows:
        yield f"{row['number']:2}  {row['file']}  +{row['added']} -{row['removed']}  {row['reason']}"
        yield f"    {row['subject']}"
        yield f"    touches      {', '.join(row['touches'])}"
        yield f"    may go when  {'; '.join(row['remove_when'])}"
        yield f"    origin       {', '.join(row['origin'])}"
        yield f"    test         {', '.join(row['tests'])}"
    added, removed = sum(row["added"] for row in rows), sum(row["removed"] for row in rows)
    files = len(stack.changed_files(list(series)))
    yield f"{len(rows)} patches, {files} upstream files, +{added} -{removed} lines"


def explain(root: Path, name: str) -> Iterator[str]:
    """One patch: why it is there, and each hunk with the function it lies in. `name` may leave out `vllm/` and the end.

    Raises ReleaseError where the series has no such patch.
    """
    pins = read_pins(root)
    series = stack.read_stack(root, pins, draft=True)
    named = [patch for patch in series if name in (patch.name, patch.name.removeprefix("vllm/").removesuffix(".patch"))]
    if not named:
        known = ", ".join(patch.name for patch in series)
        raise ReleaseError(f"{name}: not in {PATCHES}/series, want one of {known}")
    patch = named[0]
    position = series.index(patch)
    added, removed = sizes(patch)
    yield f"{patch.name}: {patch.subject}"
    made_for = ", ".join(patch.values("Base"))
    yield f"number {position + 1} of {len(series)}, +{added} -{removed} lines, made for {made_for}"
    yield from ("", *patch.body, "")
    for trailer, value in patch.trailers:
        yield f"{trailer}: {value}"
    with WheelReader(upstream.obtain(root, pins, "cuda")) as reader:
        states = [files for _, files in stack.apply_stack(series[:position], reader.read, reader.__contains__)]
        before = states[-1] if states else {}
        for edit in patch.edits:
            data = before.get(edit.path) or reader.read(edit.path)
            yield from ("", *_hunks(edit, data.split(b"\n")))
    if others := _neighbours(patch, series):
        yield from ("", f"also edit these files: {', '.join(others)}")


def _hunks(edit: FileEdit, lines: list[bytes]) -> Iterator[str]:
    for hunk in edit.hunks:
        inside = enclosing(lines, hunk.old_start + 1)
        yield f"{edit.path}:{hunk.old_start}" + (f", in {inside}" if inside else ", at the top level")
        yield from (f"    {sign} {line.decode(errors='replace').rstrip()}" for sign, line in _signed(hunk))


def _signed(hunk: Hunk) -> Iterator[tuple[str, bytes]]:
    """The hunk as diff shows it: what both sides share at its ends, what went, what came."""
    old, new = list(hunk.old), list(hunk.new)
    head, tail = hunk.shared_ends()
    yield from ((" ", line) for line in old[:head])
    yield from (("-", line) for line in old[head : len(old) - tail])
    yield from (("+", line) for line in new[head : len(new) - tail])
    yield from ((" ", line) for line in old[len(old) - tail :])


def enclosing(lines: Sequence[bytes], number: int) -> str:
    """Dotted name of the classes and functions around line `number` (from 1), by indentation; empty at the top."""
    names: list[str] = []
    indent: int | None = None
    for line in reversed(lines[:number]):
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        match = _DEFINITION.match(line)
        if indent is None:
            indent = depth + (1 if match else 0)
        if match and depth < indent:
            names.insert(0, match[2].decode())
            indent = depth
    return ".".join(names)


def _neighbours(patch: Patch, series: Sequence[Patch]) -> list[str]:
    return [other.name for other in series if other is not patch and set(other.touches) & set(patch.touches)]
