# SPDX-License-Identifier: Apache-2.0
"""Where things are in a checkout, and which of its files belong to the fork."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from release.errors import ReleaseError

OVERLAY, PATCHES, CSRC, DOCKER = "vllm", "patches", "csrc", "docker"
EXTENSION = "vllm/model_executor/layers/quantization/exl3_trellis/_exl3_C.abi3.so"
_NEVER_OURS = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build")
_LEFTOVERS = (".pyc", ".pyo", ".so", ".o", ".orig", ".rej", ".swp", ".tmp", "~")


def find_root(start: Path | None = None) -> Path:
    """The checkout that holds `start` (default: the working folder), else the one this module lies in."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents, Path(__file__).resolve().parents[1]):
        if (folder / "release" / "pins.toml").is_file():
            return folder
    raise ReleaseError(f"{start}: no checkout of the fork here or above (release/pins.toml not found)")


def files_of(root: Path, folder: str) -> list[str]:
    """The fork's files below `folder` as sorted paths relative to the root, with `/`; no caches, no leftovers."""
    return sorted(path.relative_to(root).as_posix() for path in _walk(root / folder))


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name in _NEVER_OURS or path.name.startswith(".") or path.name.endswith(_LEFTOVERS):
            continue
        if path.is_symlink():
            raise ReleaseError(f"{path}: a symbolic link, want a plain file")
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place only once it is complete; a stop at any point leaves nothing of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def tree_hash(files: dict[str, str]) -> str:
    """Names a tree of files by content: SHA-256 over `path NUL sha256 LF`, sorted by path's bytes.

    `files` maps a path with `/` to the SHA-256 of its content, in lower-case hex. Modes and dates do not count.
    """
    lines = sorted(path.encode() + b"\0" + digest.encode() + b"\n" for path, digest in files.items())
    return sha256(b"".join(lines))
