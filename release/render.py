# SPDX-License-Identifier: Apache-2.0
"""Writes a patch in its one form, so that the same change is always the same bytes.

git makes the hunks (Myers, two lines of context, no index lines); the header is taken over as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from release.errors import ReleaseError

# Two lines hold a hunk to its place; with more, neighbouring changes of upstream would look like conflicts.
DIFF = (
    "diff", "--unified=2", "--diff-algorithm=myers", "--indent-heuristic", "--no-renames", "--no-color",
    "--no-ext-diff", "--no-textconv", "--no-relative",
)  # fmt: skip
_INDEX = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+( \d+)?\n", re.MULTILINE)


def git(*arguments: str, folder: Path, may_fail: bool = False, extra: Mapping[str, str] | None = None) -> bytes:
    """Runs git with no configuration but its own defaults. Raises ReleaseError with git's message."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    fixed = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=kept | fixed | dict(extra or {}), capture_output=True, check=False
        )
    except FileNotFoundError:
        raise ReleaseError("git: not found; on Debian, install git") from None
    if done.returncode and not may_fail:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise ReleaseError(f"git {' '.join(arguments[:2])} in {folder}: {said}")
    return done.stdout


def render(header: str, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    """`header` (all that comes before the first diff, ending in one blank line) and the change from before to after."""
    with tempfile.TemporaryDirectory() as temporary:
        for side, files in (("a", before), ("b", after)):
            for path, data in files.items():
                file = Path(temporary, side, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        # With --no-index git exits 1 for a difference.
        text = git(*DIFF, "--no-index", "--no-prefix", "a", "b", folder=Path(temporary), may_fail=True)
    if not text:
        raise ReleaseError("the patch changes nothing")
    return header.rstrip("\n").encode() + b"\n\n" + plain(text)


def merge(current: bytes, before: bytes, after: bytes) -> bytes | None:
    """`current` with the change from before to after, as `git merge-file` makes it; None where the two conflict."""
    with tempfile.TemporaryDirectory() as temporary:
        for name, data in (("current", current), ("before", before), ("after", after)):
            Path(temporary, name).write_bytes(data)
        command = ("merge-file", "--quiet", "-p", "current", "before", "after")
        text = git(*command, folder=Path(temporary), may_fail=True)
    return None if b"\n>>>>>>> " in text else text


def plain(diff: bytes) -> bytes:
    """git's diff without the lines that name blobs of one repository."""
    return _INDEX.sub(b"", diff)


def header_of(data: bytes) -> str:
    """All that comes before a patch's first diff."""
    return data[: data.index(b"diff --git ")].decode()
