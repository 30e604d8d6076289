# SPDX-License-Identifier: Apache-2.0
"""Parsing and applying one patch."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from release import patch as patches
from release.errors import ReleaseError
from release.pins import read_pins
from release.stack import read_stack

ROOT = Path(__file__).resolve().parents[2]
OLD = b"".join(b"line %d\n" % number for number in range(1, 21))
HEAD = b"From: someone\nSubject: something\n\n"


def diff(*hunks: bytes, path: bytes = b"vllm/a.py", extra: bytes = b"") -> bytes:
    head = b"diff --git a/%b b/%b\n%b--- a/%b\n+++ b/%b\n" % (path, path, extra, path, path)
    return HEAD + head + b"".join(hunks)


INSERT = b"@@ -3,2 +3,3 @@ context\n line 3\n+new\n line 4\n"
DELETE = b"@@ -10,3 +11,2 @@\n line 10\n-line 11\n line 12\n"
LAST = b"@@ -20 +20 @@\n-line 20\n+line 20\n\\ No newline at end of file\n"


def apply(data: bytes, old: bytes = OLD) -> bytes:
    patch = patches.parse("vllm/a-b-c.patch", data)
    return patches.apply(patch, patch.edits[0], old)


@pytest.mark.parametrize(
    ("data", "new"),
    [
        (diff(INSERT), OLD.replace(b"line 4\n", b"new\nline 4\n")),
        (diff(INSERT, DELETE), OLD.replace(b"line 4\n", b"new\nline 4\n").replace(b"line 11\n", b"")),
        (diff(LAST), OLD[:-1]),
        (diff(b"@@ -0,0 +1 @@\n+first\n"), b"first\n" + OLD),
        (diff(b"@@ -20,0 +21 @@\n+last\n"), OLD + b"last\n"),
        (diff(INSERT, extra=b"index 123abc..456def 100644\n"), OLD.replace(b"line 4\n", b"new\nline 4\n")),
        (diff(INSERT) + b"-- \n2.39.5\n", OLD.replace(b"line 4\n", b"new\nline 4\n")),
    ],
    ids=["insert", "two hunks", "no newline at end", "before the first", "after the last", "index line", "signature"],
)
def test_applies(data: bytes, new: bytes) -> None:
    assert apply(data) == new


@pytest.mark.parametrize(
    ("data", "old", "message"),
    [
        (diff(INSERT), b"top\n" + OLD, "hunk 1 at line 3: its lines are at line 4, and offsets are refused"),
        (diff(INSERT), OLD.replace(b"line 4\n", b"new\nline 4\n"), "hunk 1 at line 3: its change is there already"),
        (
            diff(INSERT),
            OLD.replace(b"line 4\n", b"line four\n"),
            "hunk 1 at line 3: line 4 is 'line four', want 'line 4'",
        ),
        (diff(INSERT), OLD.replace(b"line 4\n", b"line 4 \n"), "hunk 1 at line 3: line 4 is 'line 4', want 'line 4'"),
        (diff(DELETE, INSERT), OLD, "hunk 1 at line 10: lands at line 10, its header says 11"),
        (diff(DELETE.replace(b"+11", b"+10"), INSERT), OLD, "hunk 2 at line 3: overlaps the hunk before it"),
        (diff(INSERT), b"line 1\n", "hunk 1 at line 3: line 3 is '<end of file>', want 'line 3'"),
    ],
    ids=["offset", "applied already", "fuzz", "white space", "new line number", "order", "short file"],
)
def test_refuses_to_apply(data: bytes, old: bytes, message: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape(message)) as error:
        apply(data, old)
    assert str(error.value).startswith("patches/vllm/a-b-c.patch: vllm/a.py, ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEAD, "patches/x: no 'diff --git' line, so it changes nothing"),
        (
            diff(INSERT, extra=b"new file mode 100644\n"),
            "'new file mode 100644'; a patch only edits existing text files",
        ),
        (diff(INSERT, extra=b"old mode 100644\n"), "'old mode 100644'; a patch only edits existing text files"),
        (
            diff(INSERT).replace(b"b/vllm/a.py\n---", b"b/vllm/b.py\n---"),
            "renames vllm/a.py to vllm/b.py; a patch only edits",
        ),
        (diff(INSERT).replace(b"+++ b/vllm/a.py", b"+++ /dev/null"), "'+++ /dev/null', want '+++ b/vllm/a.py'"),
        (diff(), "patches/x:4: vllm/a.py has no hunk"),
        (diff(INSERT.replace(b"+3,3", b"+3,4")), "patches/x:7: 2 old and 3 new lines, want 2 and 4"),
        (diff(INSERT) + diff(DELETE).removeprefix(HEAD), "vllm/a.py is edited twice in one patch"),
        (diff(INSERT, b"stray\n"), "want 'diff --git a/PATH b/PATH'"),
        (b"Subject: only\n\n" + diff(INSERT).removeprefix(HEAD), "want a From line and a Subject line"),
    ],
    ids=["empty", "new", "mode", "rename", "delete", "no hunk", "count", "twice", "stray", "header"],
)
def test_refuses_to_parse(data: bytes, message: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape(message)):
        patches.parse("x", data)


def test_git_applies_the_series_to_the_same_bytes(tmp_path: Path, upstream_wheels: dict[str, Path]) -> None:
    """An independent reader of the same patches: `git apply`, which is laxer, must come to the same files."""
    stack = read_stack(ROOT, read_pins(ROOT), draft=True)
    assert stack, "patches/series is empty"
    touched = sorted({path for patch in stack for path in patch.touches})
    with zipfile.ZipFile(upstream_wheels["cpu"]) as wheel:
        files = {path: wheel.read(path) for path in touched}
        wheel.extractall(tmp_path, touched)
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "GIT_DIR": str(tmp_path / "none")}
    for patch in stack:
        for edit in patch.edits:
            files[edit.path] = patches.apply(patch, edit, files[edit.path])
        command = ["git", "apply", "--whitespace=nowarn", str(ROOT / "patches" / patch.name)]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert {path: (tmp_path / path).read_bytes() for path in touched} == files
