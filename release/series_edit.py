# SPDX-License-Identifier: Apache-2.0
"""`add`, `drop` and the writing half of `import`: the series changed in one step, or not at all.

Every change is tried on upstream's tree first, and whatever comes after it is written anew for where its hunks then
lie. So a change leaves a series that composes, or a message and everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from release import branch, fit, stack, upstream
from release import patch as patches
from release.archive import WheelReader
from release.checkout import PATCHES, written_whole
from release.errors import ReleaseError
from release.patch import Patch
from release.pin_edit import describe, move_pins
from release.pins import Pins, read_pins
from release.rebase import own_bases
from release.render import header_of, render

SERIES = "series"


def add(root: Path, name: str, source: Path, *, before: str | None = None) -> list[str]:
    """Puts the patch in `source` into the series as `name`, at the end or before another. Returns the files written."""
    pins = read_pins(root)
    series = stack.read_stack(root, pins, draft=True)
    names = [patch.name for patch in series]
    if name in names:
        raise ReleaseError(f"{PATCHES}/{name}: is in the series already; drop it first")
    if before is not None and before not in names:
        raise ReleaseError(f"--before {before}: not in {PATCHES}/{SERIES}")
    try:
        data = source.read_bytes()
    except OSError as error:
        raise ReleaseError(f"{source}: {error.strerror}") from None
    at = names.index(before) if before else len(names)
    texts = {patch.name: (root / PATCHES / patch.name).read_bytes() for patch in series}
    bases = [*own_bases(root, pins, series)]
    added = patches.parse(name, data)
    order = [*series[:at], added, *series[at:]]
    return _store(root, pins, order, texts | {name: data}, [*bases[:at], {}, *bases[at:]])


def drop(root: Path, name: str) -> list[str]:
    """Takes a patch out of the series. Returns the files written or removed."""
    pins = read_pins(root)
    series = stack.read_stack(root, pins, draft=True)
    rest = [patch for patch in series if patch.name != name]
    if len(rest) == len(series):
        raise ReleaseError(f"{name}: not in {PATCHES}/{SERIES}")
    texts = {patch.name: (root / PATCHES / patch.name).read_bytes() for patch in rest}
    bases = [base for patch, base in zip(series, own_bases(root, pins, series), strict=True) if patch.name != name]
    return _store(root, pins, rest, texts, bases)


def take_branch(root: Path, folder: Path) -> Iterator[str]:
    """The series becomes what the branch in `folder` holds; the pins follow if it stands on another upstream."""
    pins = read_pins(root)
    version, texts = branch.read_branch(root, folder)
    for name, data in texts.items():
        stack.check_patch(root, replace(pins, upstream_version=version), patches.parse(name, data), draft=True)
    yield from (f"written {path}" for path in replace_series(root, texts))
    if version != pins.upstream_version:
        wheels = {}
        for target in pins.wheels:
            if path := upstream.obtain_other(root, pins, target, version):
                with WheelReader(path) as reader:
                    wheels[target] = describe(reader, version)
        yield from move_pins(root, version, wheels)


def replace_series(root: Path, texts: Mapping[str, bytes]) -> list[str]:
    """The series becomes exactly these patches, in this order. Returns the files written or removed."""
    head = _comments(root)
    written = [name for name, data in texts.items() if _read(root / PATCHES / name) != data]
    kept = {root / PATCHES / name for name in texts}
    removed = [path for path in sorted((root / PATCHES).rglob("*.patch")) if path not in kept]
    for name in written:
        path = root / PATCHES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as stream:
            stream.write(texts[name])
    for path in removed:
        path.unlink()
    series = (head + "".join(f"{name}\n" for name in texts)).encode()
    changed = [f"{PATCHES}/{name}" for name in written] + [path.relative_to(root).as_posix() for path in removed]
    if _read(root / PATCHES / SERIES) != series:
        (root / PATCHES / SERIES).write_bytes(series)
        changed.append(f"{PATCHES}/{SERIES}")
    return changed


def _store(
    root: Path, pins: Pins, order: Sequence[Patch], texts: Mapping[str, bytes], bases: Sequence[fit.Base]
) -> list[str]:
    """Tries the order on upstream's tree, then writes it, with every patch in its one form."""
    for patch in order:
        stack.check_patch(root, pins, patch, draft=True)
    with WheelReader(upstream.obtain(root, pins, "cuda")) as reader:
        tree = fit.Tree(name=pins.upstream_version, paths=frozenset(reader.names()), read=reader.read)
        fits = list(fit.fit_series(order, tree, bases))
    for each in fits:
        if each.status != fit.CLEAN:
            failed = "; ".join(str(hunk) for hunk in each.hunks if hunk.state != fit.CLEAN)
            raise ReleaseError(f"{PATCHES}/{each.patch.name}: {each.status}: {failed}")
    return replace_series(
        root, {each.patch.name: render(header_of(texts[each.patch.name]), each.before, each.after) for each in fits}
    )


def _comments(root: Path) -> str:
    """The comment at the head of the series. Raises ReleaseError for one further down, which would be lost."""
    lines = (root / PATCHES / SERIES).read_text(encoding="utf-8").splitlines(keepends=True)
    head = 0
    while head < len(lines) and lines[head].startswith("#"):
        head += 1
    for number, line in enumerate(lines[head:], head + 1):
        if "#" in line:
            raise ReleaseError(
                f"{PATCHES}/{SERIES}:{number}: a comment after the first patch would be lost; move it up"
            )
    return "".join(lines[:head])


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
