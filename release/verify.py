# SPDX-License-Identifier: Apache-2.0
"""Checks that the lock, the checkout and built wheels say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from release import compose, manifest
from release.archive import WheelReader
from release.checkout import CSRC, EXTENSION, sha256_of_file
from release.compose import Composition
from release.errors import ReleaseError


def require_locked(root: Path, composition: Composition) -> None:
    """Raises ReleaseError unless a composition without extension, and the kernels' source, are as the lock has them."""
    target = composition.wheel.target
    lock = manifest.read_lock(root)
    locked = lock["composed"][target]
    if changed := sorted(set(manifest.hashes(root, CSRC).items()) ^ set(lock["csrc"].items())):
        message = f"{manifest.LOCK}: {changed[0][0]} differs; python -m release lock --check shows what changed"
        raise ReleaseError(message)
    plain = composition if not _has_extension(composition) else compose.compose(root, target)
    for what, found in (("tree", plain.tree), ("sha256", manifest.wheel_sha256(plain))):
        if found != locked[what]:
            raise ReleaseError(
                f"{manifest.LOCK}: the {target} wheel's {what} is {found}, the lock has {locked[what]}; "
                "python -m release lock --check shows what changed"
            )


def verify(root: Path, wheels: Sequence[Path] | None) -> Iterator[str]:
    """Yields a line for each thing that holds; raises ReleaseError for the first that does not.

    `wheels` defaults to every composed wheel in dist.
    """
    generated = manifest.generate(root)
    difference = manifest.differences(root, generated)
    if difference:
        raise ReleaseError(f"{manifest.LOCK} does not regenerate:\n{difference}")
    yield "manifest.lock and NOTICE regenerate byte for byte"
    for wheel in wheels if wheels is not None else sorted((root / "dist").glob("vllm-*.whl")):
        if not wheel.is_file():
            raise ReleaseError(f"{wheel}: not found")
        yield f"{wheel.name}: {_check_wheel(root, wheel, generated.compositions)}"


def _check_wheel(root: Path, wheel: Path, compositions: Mapping[str, Composition]) -> str:
    """A wheel must be, byte for byte, what composing gives; one with an extension, composing with that extension."""
    named = {composition.wheel.composed_file: composition for composition in compositions.values()}
    wanted, what = named.get(wheel.name), "as locked"
    found = sha256_of_file(wheel)
    if wanted is None or found != manifest.wheel_sha256(wanted):
        extension = _extension_in(wheel) if wheel.name.startswith("vllm-") else None
        if extension is not None:  # whose name says which glibc it needs
            with_it = compose.compose(root, "cuda", extension=extension)
            named |= {with_it.wheel.composed_file: with_it}
            wanted, what = named.get(wheel.name), "as locked, with a compiled extension"
    if wanted is None:
        raise ReleaseError(f"{wheel}: no wheel of this lock, want {' or '.join(sorted(named))}")
    if found != (want := manifest.wheel_sha256(wanted)):
        raise ReleaseError(f"{wheel}: sha256 {found}, composing gives {want}")
    return what


def _extension_in(wheel: Path) -> bytes | None:
    with WheelReader(wheel) as reader:
        return reader.read(EXTENSION) if EXTENSION in reader else None


def _has_extension(composition: Composition) -> bool:
    return any(path == EXTENSION for path, _ in composition.entries)
