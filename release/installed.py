# SPDX-License-Identifier: Apache-2.0
"""Holds an installation to the lock: the fork's files to its tree, every package to its version and its own RECORD.

Runs with the Python of the installation, which needs nothing but this folder: in an image, the checkout is mounted.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from release import manifest
from release.checkout import EXTENSION, sha256_of_file, tree_hash
from release.compose import requirement_name
from release.errors import ReleaseError

# pip writes these itself, and a package's own commands bear the path of their interpreter.
_WRITTEN_BY_PIP = ("INSTALLER", "REQUESTED", "direct_url.json")
# Published with a RECORD that gives other hashes for its libraries. What pip installed had the locked hash as a whole.
_RECORD_IS_WRONG = ("pynvvideocodec==2.0.4",)


def verify_installed(root: Path, target: str, groups: list[str]) -> Iterator[str]:
    """Yields a line for each thing that holds; raises ReleaseError for the first that does not."""
    packages = Path(sysconfig.get_path("purelib"))
    found = {requirement_name(each.metadata["Name"]): each for each in distributions(path=[str(packages)])}
    fork = found.pop("vllm", None)
    if fork is None:
        raise ReleaseError(f"{packages}: no vllm is installed there")
    yield _check_fork(root, target, packages, fork)
    locked = _locked(root, groups)
    if missing := sorted(set(locked) - set(found)):
        raise ReleaseError(f"{packages}: locked and not installed: {', '.join(missing)}")
    if surplus := sorted(set(found) - set(locked)):
        raise ReleaseError(f"{packages}: installed and not locked: {', '.join(surplus)}")
    recorded: dict[str, set[str]] = {}  # packages may bring the same file; the last one installed has it
    for each in found.values():
        for path, digest in _record(each).items():
            recorded.setdefault(path, set()).add(digest)
    for name, each in sorted(found.items()):
        if each.version != locked[name]:
            raise ReleaseError(f"{packages}: {name} {each.version}, the lock has {locked[name]}")
        if f"{name}=={each.version}" not in _RECORD_IS_WRONG:
            _check_record(packages, name, each, recorded)
    odd = [pin for pin in _RECORD_IS_WRONG if pin.partition("==")[0] in found]
    but = f", but for {', '.join(odd)}, whose own RECORD is wrong" if odd else ""
    yield f"{len(found)} packages, every version locked and every file as its RECORD says{but}"


def _locked(root: Path, groups: list[str]) -> dict[str, str]:
    """name -> version of what this Python needs."""
    version = sysconfig.get_python_version()
    dependencies = manifest.locked_dependencies(root)
    pins = {}
    for line in {line for group in groups for line in dependencies.groups[group]}:
        pin, _, marker = line.partition(" ; ")
        if not marker or f'"{version}"' in marker:
            name, _, number = pin.partition("==")
            pins[requirement_name(name)] = number
    return pins


def _check_fork(root: Path, target: str, packages: Path, fork: Distribution) -> str:
    wanted = manifest.read_lock(root)["composed"][target]
    if fork.version != wanted["version"]:
        raise ReleaseError(f"{packages}: vllm {fork.version}, the lock has {wanted['version']}")
    files = {
        path.relative_to(packages).as_posix(): sha256_of_file(path)
        for path in (packages / "vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    extension = files.pop(EXTENSION, None)
    if target == "cuda" and extension is None:
        raise ReleaseError(f"{packages / EXTENSION}: the compiled extension is missing")
    if (tree := tree_hash(files)) != wanted["tree"]:
        odd = _odd(fork, files)
        raise ReleaseError(f"{packages}/vllm: tree {tree}, the lock has {wanted['tree']}{odd}")
    return f"vllm {fork.version}: {len(files)} files, tree {tree}, as locked"


def _odd(fork: Distribution, files: dict[str, str]) -> str:
    """The first file that differs from the wheel's RECORD, which helps to find what changed."""
    recorded = {path: digest for path, digest in _record(fork).items() if path.startswith("vllm/")}
    names = sorted(set(recorded.items()) ^ set(files.items()))
    names = [name for name in names if name[0] != EXTENSION]
    return f"; first: {names[0][0]}" if names else ""


def _record(each: Distribution) -> dict[str, str]:
    """path below site-packages -> SHA-256 in hex, of the files that RECORD gives a hash for."""
    rows = csv.reader((each.read_text("RECORD") or "").splitlines())
    decoded = {}
    for path, digest, _ in rows:
        if digest:
            encoded = digest.removeprefix("sha256=")
            decoded[path] = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    return decoded


def _check_record(packages: Path, name: str, each: Distribution, recorded: Mapping[str, Collection[str]]) -> None:
    for path, digest in _record(each).items():
        if path.rpartition("/")[2] in _WRITTEN_BY_PIP or path.endswith(".pyc"):
            continue
        file = packages / path
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"
        if found not in recorded[path]:
            raise ReleaseError(f"{name}: {file}: {found}, its RECORD has {digest}")
