# SPDX-License-Identifier: Apache-2.0
"""`rebase --onto VERSION`: how every patch fares on another release of upstream, and the move there.

The report never stops at the first patch that does not fit. Only `--write` changes the checkout, and only when every
patch is clean; conflicts are resolved in git, on the branch that `export --onto VERSION` makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release import fit, render, stack, upstream
from release.archive import WheelReader
from release.checkout import PATCHES
from release.errors import ReleaseError
from release.fit import PatchFit, Tree
from release.overlay import Gap, overlay_gaps
from release.patch import Patch
from release.pin_edit import OtherUpstream, describe, move_pins
from release.pins import Pins, read_pins


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a move would meet. `wheels` lacks a target for which upstream published none."""

    version: str
    fits: tuple[PatchFit, ...]
    wheels: Mapping[str, OtherUpstream]
    gaps: tuple[Gap, ...]  # what the overlay imports and the new tree lacks
    differing: tuple[str, ...]  # patched files that are not the same in both wheels

    @property
    def clean(self) -> bool:
        return all(each.status == fit.CLEAN for each in self.fits) and not self.gaps and not self.differing


def examine(root: Path, version: str) -> Report:
    """Fetches the wheels of `version` and fits the series on them.

    Raises ReleaseError where upstream has no CUDA wheel of that version, or the series does not fit its own base.
    """
    pins = read_pins(root)
    series = stack.read_stack(root, pins, draft=True)
    paths = {target: upstream.obtain_other(root, pins, target, version) for target in pins.wheels}
    if paths["cuda"] is None:
        raise ReleaseError(f"--onto {version}: the index has no wheel {pins.wheels['cuda'].distribution}=={version}")
    bases = own_bases(root, pins, series)
    with ExitStack() as opened:
        readers = {target: opened.enter_context(WheelReader(path)) for target, path in paths.items() if path}
        cuda = readers["cuda"]
        tree = Tree(name=version, paths=frozenset(cuda.names()), read=cuda.read)
        touched = sorted({path for patch in series for path in patch.touches if path in cuda})
        return Report(
            version=version,
            fits=tuple(fit.fit_series(series, tree, bases)),
            wheels={target: describe(reader, version) for target, reader in readers.items()},
            gaps=tuple(overlay_gaps(root, tree)),
            differing=tuple(_differing(touched, readers)),
        )


def own_bases(root: Path, pins: Pins, series: Sequence[Patch]) -> list[fit.Base]:
    """For each patch, the files it edits before and after it, on the upstream that the series is made for."""
    with WheelReader(upstream.obtain(root, pins, "cuda")) as reader:
        states = [files for _, files in stack.apply_stack(list(series), reader.read, reader.__contains__)]
        before: dict[str, bytes] = {}
        bases: list[fit.Base] = []
        for patch, after in zip(series, states, strict=True):
            bases.append({path: (before.get(path) or reader.read(path), after[path]) for path in patch.touches})
            before = after
    return bases


def _differing(paths: Sequence[str], readers: Mapping[str, WheelReader]) -> Iterator[str]:
    """Patches must apply to both wheels alike, so what they touch must be the same in both."""
    for path in paths:
        found = {reader.record().get(path) for reader in readers.values()}
        if len(found) > 1:
            yield path


def lines(report: Report, pins: Pins) -> Iterator[str]:
    """The report for people: the wheels, one line a patch, then what else stands in the way."""
    yield f"onto {report.version}, from {pins.upstream_version}"
    for target, wheel in pins.wheels.items():
        if (other := report.wheels.get(target)) is None:
            yield f"{target:5} upstream has published no {wheel.distribution} {report.version}: no {target} fork of it"
        else:
            yield f"{target:5} {other.file}, torch {other.torch}, commit {other.commit}"
    for each in report.fits:
        yield f"{each.status:16}  {each.patch.name}  {'; '.join(str(hunk) for hunk in each.hunks)}"
    for gap in report.gaps:
        yield f"overlay           {gap}"
    for path in report.differing:
        yield f"wheels differ     {path} is not the same in the cpu and the cuda wheel"
    count = {state: sum(each.status == state for each in report.fits) for state in (fit.CLEAN, fit.PRESENT)}
    yield (
        f"{len(report.fits)} patches: {count[fit.CLEAN]} clean, {count[fit.PRESENT]} already upstream, "
        f"{len(report.fits) - sum(count.values())} in conflict; {len(report.gaps)} imports of the overlay are gone"
    )


def as_table(report: Report, pins: Pins) -> dict[str, Any]:
    """The report for programs."""
    return {
        "from": pins.upstream_version,
        "onto": report.version,
        "clean": report.clean,
        "wheels": {target: vars(wheel) for target, wheel in report.wheels.items()},
        "without_wheel": [target for target in pins.wheels if target not in report.wheels],
        "patches": [
            {
                "file": each.patch.name,
                "status": each.status,
                "hunks": [vars(hunk) for hunk in each.hunks],
            }
            for each in report.fits
        ],
        "overlay": [vars(gap) for gap in report.gaps],
        "differing": list(report.differing),
    }


def write(root: Path, report: Report) -> Iterator[str]:
    """Moves patches and pins onto the new version. Raises ReleaseError, before anything is written, unless all fit."""
    if not report.clean:
        raise ReleaseError(
            f"--write: not everything is clean on {report.version}; "
            f"python -m release export DIR --onto {report.version} gives a branch to resolve conflicts on"
        )
    refreshed = {each.patch.name: refresh(root, each, base=f"v{report.version}") for each in report.fits}
    for name, data in refreshed.items():
        (root / PATCHES / name).write_bytes(data)
        yield f"written {PATCHES}/{name}"
    yield from move_pins(root, report.version, report.wheels)


def refresh(root: Path, each: PatchFit, *, base: str | None = None) -> bytes:
    """The patch anew for where its hunks lie now; with another Base line where one is given."""
    header = render.header_of((root / PATCHES / each.patch.name).read_bytes())
    if base:
        header = "".join(
            f"Base: {base}\n" if line.startswith("Base: ") else line for line in header.splitlines(keepends=True)
        )
    return render.render(header, each.before, each.after)


def save(report: Report, pins: Pins, path: Path) -> None:
    path.write_text(json.dumps(as_table(report, pins), indent=1) + "\n", encoding="utf-8")
