# SPDX-License-Identifier: Apache-2.0
"""The wheel writer, read back by the standard library and by Info-ZIP's rules."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from release.archive import WheelReader, WheelWriter, render_record
from release.errors import ReleaseError

CONTENT = {"a/deflated.py": b"print(1)\n" * 500, "a/stored.bin": bytes(range(256)), "a/empty": b"", "a/ü.txt": b"u"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A wheel that another writer made: deflated and stored entries, a mode of its own, a data descriptor."""
    path = tmp_path / "source-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in CONTENT.items():
            info = zipfile.ZipInfo(name, (2026, 10, 17, 1, 2, 4))
            info.external_attr = 0o100755 << 16
            info.compress_type = zipfile.ZIP_STORED if name.endswith(".bin") else zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
        rows = [(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in CONTENT.items()]
        archive.writestr("source-1.dist-info/RECORD", render_record(rows, "source-1.dist-info/RECORD"))
    return path


def write(source: Path) -> bytes:
    sink = io.BytesIO()
    with WheelReader(source) as reader:
        writer = WheelWriter(sink)
        for name in CONTENT:
            writer.copy(reader, name)
        writer.store("b/new ü.py", b"new\n")
        writer.finish()
    return sink.getvalue()


def test_copies_are_raw_and_new_entries_plain(source: Path) -> None:
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(io.BytesIO(write(source))) as after:
        assert after.testzip() is None
        assert after.namelist() == [*CONTENT, "b/new ü.py"]
        assert {name: after.read(name) for name in CONTENT} == CONTENT
        for name in CONTENT:
            old, new = before.getinfo(name), after.getinfo(name)
            for field in ("compress_type", "compress_size", "CRC", "date_time", "external_attr"):
                assert getattr(new, field) == getattr(old, field), (name, field)
        new = after.getinfo("b/new ü.py")
        assert (new.compress_type, new.date_time, new.external_attr >> 16) == (0, (1980, 1, 1, 0, 0, 0), 0o100644)
        assert after.read(new) == b"new\n"


def test_the_same_bytes_every_time(source: Path) -> None:
    assert write(source) == write(source)


def test_record_round_trip(source: Path) -> None:
    with WheelReader(source) as reader:
        record = reader.record()
    assert record == {name: (hashlib.sha256(data).hexdigest(), len(data)) for name, data in CONTENT.items()}


def test_a_file_that_is_no_wheel(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(ReleaseError, match=r"x\.whl: File is not a zip file, want a wheel"):
        WheelReader(path)


def test_zip64_is_refused() -> None:
    writer = WheelWriter(io.BytesIO())
    writer._offset = 0xFFFFFFFF
    with pytest.raises(ReleaseError, match="a: the wheel passes 4 GiB or 65,534 files, which needs ZIP64"):
        writer.store("a", b"")
