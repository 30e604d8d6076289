# SPDX-License-Identifier: Apache-2.0
"""The comparison of two saved images, on small ones of the same format; run.py compares real ones."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docker.twice import Image, read_saved, require_same


def entry(name: str, data: bytes = b"", **more: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def archive(entries: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as made:
        for info, data in entries:
            made.addfile(info, io.BytesIO(data))
    return stream.getvalue()


BASE = [entry("etc/passwd", b"root:x:0:0\n"), entry("bin", type=tarfile.SYMTYPE, linkname="usr/bin")]
OURS = [entry("opt/vllm/a.py", b"A = 1\n", mode=0o644), entry("opt/vllm/b.py", b"B = 1\n")]


def image(folder: Path, *layers: list[tuple[tarfile.TarInfo, bytes]], user: str = "1000") -> Image:
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "Layers": names}]).encode()
    config = json.dumps({"config": {"User": user}, "created": "now"}).encode()
    files = [entry("manifest.json", manifest), entry("config.json", config)]
    files += [entry(name, archive(layer)) for name, layer in zip(names, layers, strict=True)]
    path = folder / "image.tar"
    path.write_bytes(archive(files))
    return read_saved(path)


def test_the_same_is_the_same_whenever_it_was_made(tmp_path: Path) -> None:
    later = [entry("opt/vllm/a.py", b"A = 1\n", mode=0o644, mtime=9), OURS[1]]
    said = require_same(image(tmp_path, BASE, OURS), image(tmp_path, BASE, later))
    assert said == "4 files in 2 layers, dates of 1 differ"


OTHERS = {
    "content": [entry("opt/vllm/a.py", b"A = 2\n", mode=0o644), OURS[1]],
    "mode": [entry("opt/vllm/a.py", b"A = 1\n", mode=0o600), OURS[1]],
    "owner": [entry("opt/vllm/a.py", b"A = 1\n", mode=0o644, uid=7), OURS[1]],
    "missing": [OURS[1]],
    "more": [*OURS, entry("opt/vllm/c.py")],
    "link": [entry("opt/vllm/a.py", type=tarfile.SYMTYPE, linkname="b.py"), OURS[1]],
}


@pytest.mark.parametrize("case", OTHERS)
def test_one_file_that_differs_is_named(tmp_path: Path, case: str) -> None:
    first, second = image(tmp_path, BASE, OURS), image(tmp_path, BASE, OTHERS[case])
    with pytest.raises(AssertionError, match=r"^1 differences between two builds:\nlayer 1: opt/vllm/[ac]\.py: "):
        require_same(first, second)


def test_the_configuration_counts(tmp_path: Path) -> None:
    first = image(tmp_path, BASE, OURS)
    with pytest.raises(AssertionError, match="configuration: "):
        require_same(first, image(tmp_path, BASE, OURS, user="0"))
    with pytest.raises(AssertionError, match="2 layers and 1"):
        require_same(first, replace(first, layers=first.layers[:1]))
