# SPDX-License-Identifier: Apache-2.0
"""`python -m release`: lock, compose, verify, requirements, venv; maintenance.py and packaging.py have the rest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from release import compose, environment, fetch, installed, maintenance, manifest, packaging, verify
from release.checkout import find_root
from release.dependencies import GROUPS, pip_requirements
from release.errors import ReleaseError
from release.pins import TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(find_root(), options))
    except ReleaseError as error:
        print(f"release {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"release {options.command}: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m release", description="Builds, locks and checks the fork.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    lock = commands.add_parser(
        "lock", help="write release/manifest.lock and NOTICE's list of changed files",
        description="Writes release/manifest.lock and NOTICE's list of changed files from pins.toml and the checkout.",
    )  # fmt: skip
    lock.add_argument("--check", action="store_true", help="write nothing; exit 1 with a diff if anything is stale")
    lock.add_argument("--resolve", action="store_true", help="resolve the Python dependencies again, over the network")
    lock.set_defaults(run=_lock)

    wheel = commands.add_parser(
        "compose", help="write the fork's wheel",
        description="Writes the fork's wheel from the pinned upstream wheel, the patches and the overlay.",
    )  # fmt: skip
    wheel.add_argument("--target", choices=TARGETS, required=True, help="which upstream wheel to start from")
    wheel.add_argument("--out", type=Path, help="folder for the wheel (default: dist in the checkout)")
    wheel.add_argument("--extension", type=Path, metavar="FILE", help="compiled CUDA library for the cuda wheel")
    wheel.add_argument(
        "--unlocked", action="store_true", help="a wheel for development, from a checkout that differs from the lock"
    )
    wheel.set_defaults(run=_compose)

    check = commands.add_parser(
        "verify", help="check the lock, the checkout and built wheels against each other",
        description="Fails unless the lock regenerates byte for byte and every built wheel is what it describes.",
    )  # fmt: skip
    check.add_argument("--wheel", type=Path, action="append", metavar="FILE", help="a wheel (default: each in dist)")
    check.add_argument(
        "--installed", choices=TARGETS, help="check the files and packages of the running Python instead"
    )
    check.add_argument("--torch", choices=("cpu", "cuda"), default="cpu", help="build of torch of a cpu installation")
    check.set_defaults(run=_verify)

    listing = commands.add_parser(
        "requirements", help="print locked packages with their hashes, for pip",
        description="Prints locked packages with their hashes, for pip install --no-deps --require-hashes -r FILE.",
    )  # fmt: skip
    listing.add_argument("groups", nargs="+", choices=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    listing.set_defaults(run=_requirements)

    venv = commands.add_parser(
        "venv", help="make .venv with the CPU fork and what it needs",
        description="Makes .venv: the CPU fork, its locked dependencies, the test tools. Only redoes what changed.",
    )  # fmt: skip
    torch_help = "CPU build, public CUDA build, or the first of them that pip's configuration offers (default)"
    venv.add_argument("--torch", choices=environment.TORCH, default="auto", help=torch_help)
    venv.set_defaults(run=lambda root, given: environment.make(root, torch=given.torch))
    maintenance.add_commands(commands)
    packaging.add_commands(commands)
    return parser


def _lock(root: Path, options: argparse.Namespace) -> int:
    generated = manifest.generate(root, resolve_again=options.resolve, draft=not options.check)
    difference = manifest.differences(root, generated)
    if options.check:
        print(difference or "manifest.lock and NOTICE are up to date", end="" if difference else "\n")
        return 1 if difference else 0
    manifest.store(root, generated)
    print("written" if difference else "unchanged", ", ".join(generated.files))
    return 0


def _compose(root: Path, options: argparse.Namespace) -> int:
    if options.extension and not options.extension.is_file():
        raise ReleaseError(f"{options.extension}: not found")
    extension = options.extension.read_bytes() if options.extension else None
    composition = compose.compose(root, options.target, extension=extension, draft=options.unlocked)
    if not options.unlocked:
        verify.require_locked(root, composition)
    path = compose.write_file(composition, options.out or root / "dist")
    print(f"{path}\ntree {composition.tree}")
    return 0


def _requirements(root: Path, options: argparse.Namespace) -> int:
    print(pip_requirements(manifest.locked_dependencies(root), options.groups), end="")
    return 0


def _verify(root: Path, options: argparse.Namespace) -> int:
    if options.installed:
        groups = fetch.groups_of(options.installed, options.torch)
        lines = installed.verify_installed(root, options.installed, groups)
    else:
        lines = verify.verify(root, options.wheel)
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
