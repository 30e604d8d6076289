# SPDX-License-Identifier: Apache-2.0
"""Compares two images by what `docker save` gives of them: the configuration, and every file of every layer.

A file is its type, mode, owner, link and content. Dates are counted apart: pip and dpkg date by the clock.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

NAMED = 10  # differences that are named one by one
_CONFIGURATION = ("Env", "Cmd", "Entrypoint", "Labels", "User", "WorkingDir", "Healthcheck", "ExposedPorts")


@dataclass(frozen=True, kw_only=True)
class File:
    kind: str  # tarfile's type byte
    mode: int
    owner: tuple[int, int]
    link: str
    digest: str  # SHA-256; empty for what has no content


@dataclass(frozen=True, kw_only=True)
class Image:
    configuration: Mapping[str, Any]
    layers: tuple[Mapping[str, File], ...]  # path -> file, from the base upwards
    dates: tuple[Mapping[str, float], ...]


def read_image(docker: Sequence[str], environment: Mapping[str, str], tag: str, folder: Path) -> Image:
    """Saves the image below `folder`, where it takes its own size for a while, and reads it."""
    path = folder / "image.tar"
    try:
        with path.open("wb") as stream:
            subprocess.run([*docker, "save", tag], env=dict(environment), stdout=stream, check=True)
        return read_saved(path)
    finally:
        path.unlink(missing_ok=True)


def read_saved(path: Path) -> Image:
    """The image in a file that `docker save` wrote."""
    with tarfile.open(path) as archive:
        [entry] = json.load(_member(archive, "manifest.json"))
        configuration = json.load(_member(archive, entry["Config"]))["config"]
        read = [_read_layer(_member(archive, name)) for name in entry["Layers"]]
    return Image(
        configuration={name: configuration.get(name) for name in _CONFIGURATION},
        layers=tuple(files for files, _ in read), dates=tuple(dates for _, dates in read),
    )  # fmt: skip


def _member(archive: tarfile.TarFile, name: str) -> BinaryIO:
    stream = archive.extractfile(name)
    if stream is None:
        raise ValueError(f"{name}: no file in the saved image")
    return cast(BinaryIO, stream)


def _read_layer(stream: BinaryIO) -> tuple[dict[str, File], dict[str, float]]:
    files, dates = {}, {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            files[member.name] = File(
                kind=member.type.decode(), mode=member.mode, owner=(member.uid, member.gid), link=member.linkname,
                digest=_sha256(content) if content else "",
            )  # fmt: skip
            dates[member.name] = member.mtime
    return files, dates


def _sha256(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := content.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def differences(first: Image, second: Image) -> Iterator[str]:
    """One line for each thing that is not the same, dates apart."""
    if first.configuration != second.configuration:
        yield f"configuration: {first.configuration} and {second.configuration}"
    if len(first.layers) != len(second.layers):
        yield f"{len(first.layers)} layers and {len(second.layers)}"
    for number, (one, other) in enumerate(zip(first.layers, second.layers, strict=False)):
        for path in sorted(one.keys() | other.keys()):
            if one.get(path) != other.get(path):
                yield f"layer {number}: {path}: {one.get(path)} and {other.get(path)}"


def summary(first: Image, second: Image) -> str:
    files = sum(len(layer) for layer in first.layers)
    dated = sum(
        dates.get(path) != others.get(path)
        for dates, others in zip(first.dates, second.dates, strict=False)
        for path in dates
    )
    return f"{files} files in {len(first.layers)} layers, dates of {dated} differ"


def require_same(first: Image, second: Image) -> str:
    """The summary; raises AssertionError that names the first differences and counts the rest."""
    found = list(differences(first, second))
    if found:
        named = "\n".join(found[:NAMED])
        raise AssertionError(f"{len(found)} differences between two builds:\n{named}")
    return summary(first, second)
