# SPDX-License-Identifier: Apache-2.0
"""The commands of a maintainer and of a reviewer: rebase, stack, explain, export, import, add, drop."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from release import branch, explain, manifest, rebase, series_edit, stack
from release.errors import ReleaseError
from release.pins import read_pins


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    move = commands.add_parser(
        "rebase", help="try every patch on another upstream version, and move there with --write",
        description="Tries every patch on another upstream version and reports each as clean, conflict or already "
        "upstream. Exits 0 once reported; with --check, 1 if anything is not clean.",
    )  # fmt: skip
    move.add_argument("--onto", required=True, metavar="VERSION", help="upstream's version, say 0.33.0")
    move.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    move.add_argument("--check", action="store_true", help="exit 1 if anything is not clean")
    move.add_argument("--write", action="store_true", help="if all is clean, move patches and pins.toml there")
    move.set_defaults(run=_rebase)

    series = commands.add_parser("stack", help="list the patches: order, size, reason, what each touches, when it goes")
    series.add_argument("--json", action="store_true", help="as JSON")
    series.set_defaults(run=_stack)

    one = commands.add_parser("explain", help="show one patch with the functions its hunks lie in")
    one.add_argument("patch", metavar="PATCH", help="say loader-select-files")
    one.set_defaults(run=lambda root, given: _say(explain.explain(root, given.patch)))

    out = commands.add_parser("export", help="make a git branch of one commit a patch on upstream's tree")
    out.add_argument("folder", type=Path, metavar="DIR", help="a new folder for the repository")
    out.add_argument("--onto", metavar="VERSION", help="put that upstream version beside it, to rebase onto")
    out.set_defaults(run=lambda root, given: _say(branch.export(root, given.folder, given.onto)))

    back = commands.add_parser("import", help="make the series from a branch that export made")
    back.add_argument("folder", type=Path, metavar="DIR", help="the repository; its branch `fork` is read")
    back.set_defaults(run=lambda root, given: _import(root, given.folder))

    more = commands.add_parser("add", help="put a patch into the series")
    more.add_argument("name", metavar="NAME", help="its name there: vllm/AREA-VERB-OBJECT.patch")
    more.add_argument("--from", dest="source", type=Path, required=True, metavar="FILE", help="the patch, with header")
    more.add_argument("--before", metavar="NAME", help="the patch it goes before (default: the end)")
    more.set_defaults(
        run=lambda root, given: _changed(root, series_edit.add(root, given.name, given.source, before=given.before))
    )

    less = commands.add_parser("drop", help="take a patch out of the series, say one that upstream took")
    less.add_argument("name", metavar="NAME", help="as in patches/series")
    less.set_defaults(run=lambda root, given: _changed(root, series_edit.drop(root, given.name)))


def _say(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return 0


def _rebase(root: Path, options: argparse.Namespace) -> int:
    pins = read_pins(root)
    if options.onto == pins.upstream_version:
        raise ReleaseError(f"--onto {options.onto}: that is the version the fork stands on")
    report = rebase.examine(root, options.onto)
    _say(rebase.lines(report, pins))
    if options.json:
        rebase.save(report, pins, options.json)
    if options.write:
        _say(rebase.write(root, report))
    return 1 if options.check and not report.clean else 0


def _stack(root: Path, options: argparse.Namespace) -> int:
    series = stack.read_stack(root, read_pins(root), draft=True)
    if options.json:
        print(json.dumps(explain.as_table(series), indent=1))
        return 0
    return _say(explain.stack_lines(series))


def _import(root: Path, folder: Path) -> int:
    before = read_pins(root).upstream_version
    _say(series_edit.take_branch(root, folder))
    if read_pins(root).upstream_version != before:
        return 0  # the lock waits for new dependencies, which only `lock --resolve` can ask for
    return _relock(root)


def _changed(root: Path, paths: list[str]) -> int:
    for path in paths:
        print(f"{'written' if (root / path).exists() else 'removed'} {path}")
    return _relock(root)


def _relock(root: Path) -> int:
    generated = manifest.generate(root, draft=True)
    for path in manifest.store(root, generated):
        print(f"written {path}")
    return 0
