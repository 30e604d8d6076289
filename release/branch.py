# SPDX-License-Identifier: Apache-2.0
"""`export` and `import`: the series as a git branch, one commit a patch on upstream's tree, and back.

    tag upstream-0.32.0   upstream's files, without compiled libraries
    tag overlay           the overlay's files; not imported, they are edited in the checkout
    branch fork           one commit a patch; the last line of its message names the patch's file

Exporting twice gives the same commits. A tree of another upstream version can be put beside (`export --onto`), so
that `git rebase` does what git is good at. Importing reads commits only, never the working files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from release import patch as patches
from release import render, stack, upstream
from release.archive import WheelReader
from release.checkout import OVERLAY, PATCHES, files_of
from release.errors import ReleaseError
from release.pins import Pins, read_pins
from release.render import git

BRANCH, OVERLAY_TAG = "fork", "overlay"
_PATCH_LINE = re.compile(r"^Patch: (\S+)$", re.MULTILINE)
_LIBRARIES = (".so", ".a")  # large, and no patch may touch them
_DATE = "315532800 +0000"  # 1980-01-01, as in the wheels: the same commits whenever they are made


def export(root: Path, folder: Path, onto: str | None = None) -> Iterator[str]:
    """Makes a git repository in `folder`, which must be new or empty. Raises ReleaseError otherwise."""
    pins = read_pins(root)
    series = stack.read_stack(root, pins, draft=True)
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError(f"{folder}: not empty, want a new folder for the branch")
    folder.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet", f"--initial-branch={BRANCH}", folder=folder)
    with WheelReader(upstream.obtain(root, pins, "cuda")) as reader:
        base = _commit_tree(folder, reader, pins.upstream_version, pins)
        if onto is not None:
            yield _put_beside(root, pins, folder, onto)
        git("checkout", "--quiet", "-B", BRANCH, base, folder=folder)
        _commit_overlay(root, folder, pins)
        for patch, files in stack.apply_stack(series, reader.read, reader.__contains__):
            for path in patch.touches:
                (folder / path).write_bytes(files[path])
            _commit(folder, _message(patch.name, (root / PATCHES / patch.name).read_bytes()), pins, *patch.touches)
    yield f"{folder}: branch {BRANCH}, {len(series)} patches on {base}"


def _put_beside(root: Path, pins: Pins, folder: Path, version: str) -> str:
    path = upstream.obtain_other(root, pins, "cuda", version)
    if path is None:
        raise ReleaseError(f"--onto {version}: the index has no wheel {pins.wheels['cuda'].distribution}=={version}")
    with WheelReader(path) as reader:
        tag = _commit_tree(folder, reader, version, pins)
    return f"{tag} is beside it; to move the branch there: git -C {folder} rebase {tag}"


def _commit_tree(folder: Path, reader: WheelReader, version: str, pins: Pins) -> str:
    """Upstream's tree as the next commit, tagged; every text file of it, in place of what was there."""
    shutil.rmtree(folder / OVERLAY, ignore_errors=True)
    for name in reader.names():
        if name.startswith(f"{OVERLAY}/") and not name.endswith(("/", *_LIBRARIES)):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(reader.read(name))
    tag = f"upstream-{version}"
    _commit(folder, f"vLLM {version}, as its CUDA wheel has it, without compiled libraries\n", pins)
    git("tag", tag, folder=folder)
    return tag


def _commit_overlay(root: Path, folder: Path, pins: Pins) -> None:
    for name in files_of(root, OVERLAY):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((root / name).read_bytes())
    _commit(folder, "The overlay: files of the fork that upstream does not have\n", pins)
    git("tag", OVERLAY_TAG, folder=folder)


def _commit(folder: Path, message: str, pins: Pins, *paths: str) -> None:
    """Commits these paths, or everything there is."""
    name, _, address = pins.author.partition(" <")
    who = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in (
        ("NAME", name), ("EMAIL", address.rstrip(">")), ("DATE", _DATE),
    )}  # fmt: skip
    git("add", "--all", "--force", "--", *(paths or ["."]), folder=folder)
    git("commit", "--quiet", "--no-verify", "--allow-empty", "--cleanup=verbatim", f"--message={message}",
        folder=folder, extra=who)  # fmt: skip


def _message(name: str, data: bytes) -> str:
    """A patch's header as a commit message; the From line is the commit's author."""
    head = render.header_of(data).split("\n", 1)[1]
    return head.removeprefix("Subject: ").rstrip("\n") + f"\nPatch: {name}\n"


def read_branch(root: Path, folder: Path) -> tuple[str, dict[str, bytes]]:
    """(upstream version that the branch stands on, patch file -> content, in order).

    Raises ReleaseError for a commit that names no patch file, names one twice, merges, or touches the overlay.
    """
    pins = read_pins(root)
    if not (folder / ".git").exists():
        raise ReleaseError(f"{folder}: no git repository, want one that `export` made")
    described = git("describe", "--tags", "--abbrev=0", "--match=upstream-*", BRANCH, folder=folder)
    version = described.decode().strip().removeprefix("upstream-")
    listing = git("rev-list", "--reverse", "--parents", f"upstream-{version}..{BRANCH}", folder=folder).decode()
    found: dict[str, bytes] = {}
    for line in listing.splitlines():
        commit, *parents = line.split()
        message = git("show", "--no-patch", "--format=%B", commit, folder=folder).decode()
        subject = message.split("\n", 1)[0]
        touched = git("diff", "--name-only", parents[0], commit, folder=folder).decode().split()
        ours = [path for path in touched if (root / path).exists()]
        where = f"{folder}: commit {commit[:10]} ({subject})"
        if not _PATCH_LINE.search(message) and touched and ours == touched:
            continue  # the overlay's own commit
        name = _patch_name(where, message, parents, ours, found)
        found[name] = _patch_of(folder, pins, version, message, (parents[0], commit))
        patches.parse(name, found[name])
    return version, found


def _patch_name(where: str, message: str, parents: list[str], ours: list[str], found: dict[str, bytes]) -> str:
    names = _PATCH_LINE.findall(message)
    if len(parents) != 1:
        raise ReleaseError(f"{where}: has {len(parents)} parents, want 1; a series has no merges")
    if ours:
        raise ReleaseError(f"{where}: touches {ours[0]}, which is the overlay's own; edit it in the checkout")
    if len(names) != 1:
        raise ReleaseError(f"{where}: {len(names)} lines 'Patch: vllm/AREA-VERB-OBJECT.patch', want 1")
    if names[0] in found:
        raise ReleaseError(f"{where}: {names[0]} is an earlier commit too; squash them")
    return names[0]


def _patch_of(folder: Path, pins: Pins, version: str, message: str, span: tuple[str, str]) -> bytes:
    text = _PATCH_LINE.sub("", message).rstrip("\n")
    text = re.sub(r"^Base: v\S+$", f"Base: v{version}", text, flags=re.MULTILINE)
    diff = render.plain(git(*render.DIFF, *span, folder=folder))
    return f"From: {pins.author}\nSubject: {text}\n\n".encode() + diff
