# SPDX-License-Identifier: Apache-2.0
"""Where a patch's hunks lie in another tree: the question a rebase asks, answered without touching anything.

Composing never fuzzes and never shifts. Fitting looks for the exact lines of a hunk anywhere in the file; where the
lines around it changed too, the file is merged as git merges: what the patch changed and what upstream changed must
not touch. Either way the patch can be written anew for its new place; the rest is left to a person.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from release.patch import FileEdit, Hunk, Patch
from release.render import merge

CLEAN, PRESENT, CONFLICT = "clean", "already upstream", "conflict"
_MOST_SHOWN = 3  # places named where a hunk's lines are found more than once

Lines = list[bytes]
Base = Mapping[str, tuple[bytes, bytes]]  # path -> (before the patch, after it)


@dataclass(frozen=True, kw_only=True)
class HunkFit:
    """One hunk's verdict. Lines count from 1; `at` is where its old lines begin, None where it does not apply."""

    path: str
    number: int  # of the hunk in its file, from 1
    line: int  # where its header says it lies
    state: str
    at: int | None = None
    why: str = ""

    def __str__(self) -> str:
        where = f"{self.path} hunk {self.number}"
        if self.state == CLEAN and self.at is not None:
            return f"{where} at line {self.at}" + ("" if self.at == self.line else f" (was {self.line})")
        return f"{where} (line {self.line}): {self.why}"


@dataclass(frozen=True, kw_only=True)
class PatchFit:
    """One patch's verdict; `before` and `after` hold the files it edits where it is clean."""

    patch: Patch
    status: str
    hunks: tuple[HunkFit, ...]
    before: Mapping[str, bytes] = field(default_factory=dict)
    after: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Files to fit on."""

    name: str  # for messages, say "0.33.0"
    paths: frozenset[str]
    read: Callable[[str], bytes]

    def namesakes(self, path: str) -> list[str]:
        """Where a file that is not at `path` may have gone: same name, closest folder first."""
        name, parts = path.rpartition("/")[2], set(path.split("/"))
        found = [other for other in self.paths if other.rpartition("/")[2] == name]
        return sorted(found, key=lambda other: (-len(parts & set(other.split("/"))), other))


def fit_series(series: Sequence[Patch], tree: Tree, bases: Sequence[Base] = ()) -> Iterator[PatchFit]:
    """Fits every patch on what the clean ones before it leave, and never stops at one that does not fit.

    `bases` holds, for each patch, the files it edits as they are before and after it where it was made; without them
    nothing is merged.
    """
    changed: dict[str, bytes] = {}

    def read(path: str) -> bytes | None:
        return changed[path] if path in changed else tree.read(path) if path in tree.paths else None

    left_out: dict[bytes, str] = {}  # line -> the patch that would have added it
    for index, patch in enumerate(series):
        fit = fit_patch(patch, read, tree, bases[index] if bases else {})
        changed |= fit.after
        if fit.status == CONFLICT:
            fit = _name_dependencies(fit, left_out)
            left_out |= {line: patch.name for edit in patch.edits for hunk in edit.hunks for line in _added(hunk)}
        yield fit


def _added(hunk: Hunk) -> set[bytes]:
    return {line for line in set(hunk.new) - set(hunk.old) if len(line.strip()) > 1}  # a bracket says nothing


def _name_dependencies(fit: PatchFit, left_out: Mapping[bytes, str]) -> PatchFit:
    """Says of a hunk that does not fit when its context is what a patch left out before it would have added."""
    olds = {(edit.path, number): hunk.old for edit in fit.patch.edits for number, hunk in enumerate(edit.hunks, 1)}
    hunks = []
    for hunk in fit.hunks:
        on = sorted({left_out[line] for line in olds[hunk.path, hunk.number] if line in left_out})
        if on and hunk.state == CONFLICT:
            hunk = replace(hunk, why=f"{hunk.why}; builds on {', '.join(on)}, which is left out")
        hunks.append(hunk)
    return replace(fit, hunks=tuple(hunks))


def fit_patch(patch: Patch, read: Callable[[str], bytes | None], tree: Tree, base: Base) -> PatchFit:
    """`read` gives a file as the patches before this one leave it, None where there is none."""
    hunks: list[HunkFit] = []
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for edit in patch.edits:
        data = read(edit.path)
        if data is None:
            hunks += _vanished(edit, tree)
            continue
        fits, result = _fit_edit(edit, split(data))
        if edit.path in base and CONFLICT in (states := {fit.state for fit in fits}) and PRESENT not in states:
            fits, result = _merge(fits, result, data, *base[edit.path])
        hunks += fits
        if all(fit.state == CLEAN for fit in fits):
            before[edit.path], after[edit.path] = data, b"".join(result)
    states = {fit.state for fit in hunks}
    status = states.pop() if len(states) == 1 else CONFLICT
    if status != CLEAN:
        before, after = {}, {}
    return PatchFit(patch=patch, status=status, hunks=tuple(hunks), before=before, after=after)


def _merge(fits: list[HunkFit], result: Lines, data: bytes, before: bytes, after: bytes) -> tuple[list[HunkFit], Lines]:
    merged = merge(data, before, after)
    if merged is None or merged == data:
        return fits, result
    why = "the lines around it changed, merged"
    return [fit if fit.state == CLEAN else replace(fit, state=CLEAN, why=why) for fit in fits], split(merged)


def split(data: bytes) -> Lines:
    """Lines with their line feeds; the last may have none."""
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _vanished(edit: FileEdit, tree: Tree) -> list[HunkFit]:
    why = f"{tree.name} has no such file"
    if elsewhere := tree.namesakes(edit.path)[:_MOST_SHOWN]:
        why += f"; of that name: {', '.join(elsewhere)}"
    return [
        HunkFit(path=edit.path, number=number, line=hunk.old_start, state=CONFLICT, why=why)
        for number, hunk in enumerate(edit.hunks, 1)
    ]


def _fit_edit(edit: FileEdit, lines: Lines) -> tuple[list[HunkFit], Lines]:
    """Every hunk's verdict, and the file with those that are clean."""
    fits: list[HunkFit] = []
    out: Lines = []
    done = shift = 0  # lines consumed; how far the last clean hunk had moved
    for number, hunk in enumerate(edit.hunks, 1):
        index, state, why = _locate(hunk, lines, done, shift)
        if index is not None:
            shift = index + 1 - hunk.old_start
            out += [*lines[done:index], *hunk.new]
            done = index + len(hunk.old)
        at = None if index is None else index + 1
        fits.append(HunkFit(path=edit.path, number=number, line=hunk.old_start, state=state, at=at, why=why))
    return fits, out + lines[done:]


def _locate(hunk: Hunk, lines: Lines, done: int, shift: int) -> tuple[int | None, str, str]:
    """(index of the hunk's first line or None, state, why not clean)."""
    if not hunk.old:
        return None, CONFLICT, "it has no context to look for"
    expected = hunk.old_start - 1 + shift
    found = [index for index in _places(lines, hunk.old) if index >= done]
    if expected in found:
        return expected, CLEAN, ""
    if len(found) == 1:
        return found[0], CLEAN, ""
    if found:
        shown = ", ".join(str(index + 1) for index in found[:_MOST_SHOWN])
        return None, CONFLICT, f"its lines are at {shown}{', ...' if len(found) > _MOST_SHOWN else ''}: which is meant?"
    for wanted in (hunk.new, _with_less_context(hunk)):
        if present := _places(lines, wanted):
            return None, PRESENT, f"its change is there already, at line {present[0] + 1}"
    return None, CONFLICT, _first_difference(hunk, lines, expected)


def _places(lines: Lines, wanted: Sequence[bytes]) -> list[int]:
    """Indices where `wanted` begins; none for nothing."""
    if not wanted:
        return []
    size, target = len(wanted), list(wanted)
    starts = (index for index, line in enumerate(lines) if line == target[0])
    return [index for index in starts if lines[index : index + size] == target]


def _with_less_context(hunk: Hunk) -> tuple[bytes, ...]:
    """The new lines with one line of context a side; empty where nothing is added, for context alone proves nothing."""
    new = hunk.new
    head, tail = hunk.shared_ends()
    if len(new) - head - tail <= 0:
        return ()
    return new[max(head - 1, 0) : len(new) - max(tail - 1, 0)]


def _first_difference(hunk: Hunk, lines: Lines, expected: int) -> str:
    """The line at which the best match of the hunk ends. The nearest place wins among equals."""
    best, best_at = -1, expected
    for index in sorted(range(len(lines)), key=lambda index: abs(index - expected)):
        matched = 0
        while matched < len(hunk.old) and lines[index + matched : index + matched + 1] == [hunk.old[matched]]:
            matched += 1
        if matched > best and (matched or index == expected):
            best, best_at = matched, index
    at = best_at + max(best, 0)
    found = lines[at] if at < len(lines) else b"<end of file>"
    want = hunk.old[max(best, 0)]
    return f"line {at + 1} is {_shown(found)}, want {_shown(want)}"


def _shown(line: bytes) -> str:
    return repr(line.strip().decode(errors="replace"))
