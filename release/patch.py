# SPDX-License-Identifier: Apache-2.0
"""One patch: its header, its hunks, and how it is applied.

Applying is stricter than `git apply`: a hunk goes at the line its header names or not at all, so neither fuzz nor
offsets exist. Only edits of existing text files are known here: a new file belongs to the overlay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from release.checkout import sha256
from release.errors import ReleaseError

TRAILERS = ("Reason", "Origin", "Base", "Remove-when", "Test")
_TRAILER = re.compile(r"^([A-Z][A-Za-z-]*): +(.*\S)\s*$")
_FILE = re.compile(rb"^diff --git a/(\S+) b/(\S+)$")
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """Line numbers count from 1; lines keep their line feed."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def shared_ends(self) -> tuple[int, int]:
        """How many lines both sides have in common at the top, and below these at the bottom."""
        most = min(len(self.old), len(self.new))
        head = 0
        while head < most and self.old[head] == self.new[head]:
            head += 1
        tail = 0
        while tail < most - head and self.old[-1 - tail] == self.new[-1 - tail]:
            tail += 1
        return head, tail


@dataclass(frozen=True, kw_only=True)
class FileEdit:
    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A parsed patch. `trailers` holds (name, value) pairs in order; a name may repeat."""

    name: str  # its path below patches/
    sha256: str
    author: str
    subject: str
    body: tuple[str, ...]  # lines between the subject and the trailers
    trailers: tuple[tuple[str, str], ...]
    edits: tuple[FileEdit, ...]

    def values(self, trailer: str) -> list[str]:
        return [value for name, value in self.trailers if name == trailer]

    @property
    def touches(self) -> tuple[str, ...]:
        return tuple(edit.path for edit in self.edits)


def parse(name: str, data: bytes) -> Patch:
    """Raises ReleaseError naming the patch and the line that is not as it should be."""
    start = re.search(rb"^diff --git ", data, re.MULTILINE)
    if start is None:
        raise ReleaseError(f"patches/{name}: no 'diff --git' line, so it changes nothing")
    author, subject, body, trailers = _header(name, data[: start.start()].decode())
    edits = tuple(_edits(name, data[start.start() :], first_line=data[: start.start()].count(b"\n") + 1))
    return Patch(
        name=name, sha256=sha256(data), author=author, subject=subject, body=body, trailers=trailers, edits=edits
    )


def _header(name: str, text: str) -> tuple[str, str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    lines = [line.rstrip() for line in text.split("\n---", 1)[0].splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    trailers: list[tuple[str, str]] = []
    while lines and (match := _TRAILER.match(lines[-1])) and match[1] not in ("From", "Subject"):
        trailers.insert(0, (match[1], match[2]))
        lines.pop()
    fields = {key: value for key, _, value in (line.partition(": ") for line in lines[:2])}
    if set(fields) != {"From", "Subject"}:
        raise ReleaseError(f"patches/{name}: begins with {lines[:2]}, want a From line and a Subject line")
    body = [line for line in lines[2:] if line]
    return fields["From"], fields["Subject"], tuple(body), tuple(trailers)


def _edits(name: str, data: bytes, first_line: int) -> list[FileEdit]:
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    edits: list[FileEdit] = []
    at = 0
    while at < len(lines):
        where = f"patches/{name}:{first_line + at}"
        match = _FILE.match(lines[at])
        if match is None:
            if _is_signature(lines[at:]):
                break
            raise ReleaseError(f"{where}: {lines[at][:60]!r}, want 'diff --git a/PATH b/PATH'")
        if match[1] != match[2]:
            raise ReleaseError(f"{where}: renames {match[1].decode()} to {match[2].decode()}; a patch only edits")
        path = match[1].decode()
        at = _skip_to_hunk(where, lines, at + 1, path)
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(f"patches/{name}:{first_line + at}", lines, at)
            hunks.append(hunk)
        if path in [edit.path for edit in edits]:
            raise ReleaseError(f"{where}: {path} is edited twice in one patch")
        edits.append(FileEdit(path=path, hunks=tuple(hunks)))
    return edits


def _is_signature(lines: list[bytes]) -> bool:
    """`git format-patch` ends with `-- ` and git's version."""
    return lines[0] == b"-- " and all(len(line) < 40 for line in lines)


def _skip_to_hunk(where: str, lines: list[bytes], at: int, path: str) -> int:
    """Reads the lines between `diff --git` and the first hunk, and returns the hunk's index."""
    expected = {b"---": b"--- a/" + path.encode(), b"+++": b"+++ b/" + path.encode()}
    while at < len(lines) and not lines[at].startswith(b"@@"):
        word = lines[at].split(b" ", 1)[0]
        if word in expected:
            if lines[at] != expected[word]:
                raise ReleaseError(f"{where}: {lines[at].decode()!r}, want {expected[word].decode()!r}")
        elif word != b"index":
            raise ReleaseError(f"{where}: {path}: '{lines[at].decode()}'; a patch only edits existing text files")
        at += 1
    if at == len(lines):
        raise ReleaseError(f"{where}: {path} has no hunk")
    return at


def _hunk(where: str, lines: list[bytes], at: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if match is None:
        raise ReleaseError(f"{where}: {lines[at][:60]!r}, want '@@ -LINE,COUNT +LINE,COUNT @@'")
    old_start, old_count, new_start, new_count = (int(group) if group else 1 for group in match.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while len(old) < old_count or len(new) < new_count or (at < len(lines) and lines[at] == _NO_NEWLINE):
        sign, text = (lines[at][:1], lines[at][1:] + b"\n") if at < len(lines) else (b"", b"")
        if lines[at : at + 1] == [_NO_NEWLINE]:
            for side in _last_sides(lines[at - 1][:1], old, new):
                side[-1] = side[-1].removesuffix(b"\n")
        elif sign == b"-":
            old.append(text)
        elif sign == b"+":
            new.append(text)
        elif sign == b" " or (sign == b"" and at < len(lines)):  # some editors strip the space of an empty line
            old.append(text)
            new.append(text)
        else:
            raise ReleaseError(f"{where}: {len(old)} old and {len(new)} new lines, want {old_count} and {new_count}")
        at += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise ReleaseError(f"{where}: {len(old)} old and {len(new)} new lines, want {old_count} and {new_count}")
    return Hunk(old_start=old_start, new_start=new_start, old=tuple(old), new=tuple(new)), at


def _last_sides(sign: bytes, old: list[bytes], new: list[bytes]) -> list[list[bytes]]:
    return {b"-": [old], b"+": [new]}.get(sign, [old, new])


def apply(patch: Patch, edit: FileEdit, data: bytes) -> bytes:
    """The file after the edit. Raises ReleaseError if any hunk does not lie exactly where its header says."""
    lines = data.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out: list[bytes] = []
    done = 0  # lines of the old file consumed
    for number, hunk in enumerate(edit.hunks, 1):
        where = f"patches/{patch.name}: {edit.path}, hunk {number} at line {hunk.old_start}"
        at = hunk.old_start - 1 if hunk.old else hunk.old_start
        if at < done:
            raise ReleaseError(f"{where}: overlaps the hunk before it")
        if tuple(lines[at : at + len(hunk.old)]) != hunk.old:
            raise ReleaseError(f"{where}: {_explain(lines, at, hunk)}")
        out += lines[done:at]
        new_at = hunk.new_start - 1 if hunk.new else hunk.new_start
        if len(out) != new_at:
            raise ReleaseError(f"{where}: lands at line {len(out) + 1}, its header says {hunk.new_start}")
        out += hunk.new
        done = at + len(hunk.old)
    return b"".join(out + lines[done:])


def _explain(lines: list[bytes], at: int, hunk: Hunk) -> str:
    """Why the hunk does not fit: its lines are elsewhere (an offset), its change is there already, or they differ."""
    if (line := _find(lines, hunk.old)) is not None:
        return f"its lines are at line {line}, and offsets are refused"
    if (line := _find(lines, hunk.new)) is not None:
        return f"its change is there already, at line {line}"
    for index, want in enumerate(hunk.old):
        found = lines[at + index] if at + index < len(lines) else b"<end of file>"
        if found != want:
            return f"line {at + index + 1} is {found.strip().decode()!r}, want {want.strip().decode()!r}"
    return "does not fit"


def _find(lines: list[bytes], wanted: tuple[bytes, ...]) -> int | None:
    """The line, counted from 1, where `wanted` begins."""
    starts = range(len(lines) - len(wanted) + 1) if wanted else range(0)
    return next((start + 1 for start in starts if tuple(lines[start : start + len(wanted)]) == wanted), None)
