# SPDX-License-Identifier: Apache-2.0
"""Reads a wheel and writes one, byte for byte the same on any machine and any Python.

Entries that do not change are copied as they lie in the source, compressed bytes and all: nothing is compressed again,
so no zlib version can show. New entries are stored, dated 1980-01-01, mode 0644. ZIP64 is refused, not written:
a wheel has fewer than 65,535 files and is smaller than 4 GiB. Structures: APPNOTE.TXT 4.3.7, 4.3.12, 4.3.16.
"""

from __future__ import annotations

import base64
import csv
import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from release.errors import ReleaseError

_CHUNK = 1 << 20  # bytes read at a time
_UTF8_NAME, _ENCRYPTED = 0x800, 0x1
_MADE_BY_UNIX, _NEEDS = 3 << 8 | 20, 20
_EPOCH = (0, 1 << 5 | 1)  # time, date: 00:00:00, 1980-01-01 in MS-DOS form
_LIMIT = 0xFFFFFFFF


class Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


class WheelReader:
    """A wheel's RECORD, files and compressed bytes. Its hash is checked by whoever fetched it."""

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ReleaseError(f"{path}: {error}, want a wheel") from None
        self.path = path
        self._stream = path.open("rb")
        self._infos = {info.filename: info for info in self._zip.infolist()}
        records = [name for name in self._infos if name.endswith(".dist-info/RECORD")]
        if len(records) != 1:
            raise ReleaseError(f"{path}: {len(records)} RECORD files, want 1")
        self.dist_info = records[0].removesuffix("/RECORD")

    def __enter__(self) -> WheelReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._stream.close()

    def names(self) -> list[str]:
        """Every entry, in the order of the archive."""
        return list(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def read(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except KeyError:
            raise ReleaseError(f"{self.path}: no {name} inside") from None

    def record(self) -> dict[str, tuple[str, int]]:
        """path -> (SHA-256 in hex, size in bytes) of every file but RECORD itself, as RECORD says."""
        rows = csv.reader(io.StringIO(self.read(f"{self.dist_info}/RECORD").decode()))
        return {path: (_hex(digest), int(size)) for path, digest, size in rows if digest}

    def entry(self, name: str) -> zipfile.ZipInfo:
        return self._infos[name]

    def compressed(self, name: str) -> Iterator[bytes]:
        """The entry's bytes as they lie in the archive."""
        info = self._infos[name]
        self._stream.seek(info.header_offset)
        header = self._stream.read(30)
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        self._stream.seek(name_bytes + extra_bytes, io.SEEK_CUR)
        left = info.compress_size
        while left:
            chunk = self._stream.read(min(left, _CHUNK))
            if not chunk:
                raise ReleaseError(f"{self.path}: {name} ends {left} bytes early")
            left -= len(chunk)
            yield chunk


class WheelWriter:
    """Writes the entries in the order given; `finish` adds the directory. Only ever appends to the sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._offset = 0
        self._central: list[bytes] = []

    def copy(self, reader: WheelReader, name: str) -> None:
        info = reader.entry(name)
        if info.flag_bits & _ENCRYPTED:
            raise ReleaseError(f"{reader.path}: {name} is encrypted")
        year, month, day, hour, minute, second = info.date_time
        stamp = (hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day)
        sizes = (info.CRC, info.compress_size, info.file_size)
        self._entry(name, info.compress_type, stamp, sizes, info.external_attr, reader.compressed(name))

    def store(self, name: str, data: bytes) -> None:
        sizes = (zlib.crc32(data), len(data), len(data))
        self._entry(name, zipfile.ZIP_STORED, _EPOCH, sizes, 0o100644 << 16, [data])

    def _entry(
        self,
        name: str,
        method: int,
        stamp: tuple[int, int],  # MS-DOS time, date
        sizes: tuple[int, int, int],  # CRC-32, compressed bytes, bytes
        attributes: int,
        chunks: Iterable[bytes],
    ) -> None:
        encoded = name.encode()
        flags = 0 if name.isascii() else _UTF8_NAME
        shared = struct.pack("<HHHHHIII", _NEEDS, flags, method, *stamp, *sizes) + struct.pack("<HH", len(encoded), 0)
        if max(sizes[1], sizes[2], self._offset) >= _LIMIT or len(self._central) >= 0xFFFE:
            raise ReleaseError(f"{name}: the wheel passes 4 GiB or 65,534 files, which needs ZIP64")
        place = struct.pack("<HHHII", 0, 0, 0, attributes, self._offset)
        self._central.append(struct.pack("<IH", 0x02014B50, _MADE_BY_UNIX) + shared + place + encoded)
        self._put(struct.pack("<I", 0x04034B50) + shared + encoded)
        for chunk in chunks:
            self._put(chunk)

    def finish(self) -> None:
        start, count = self._offset, len(self._central)
        self._put(b"".join(self._central))
        size = self._offset - start
        if self._offset >= _LIMIT:
            raise ReleaseError("the wheel passes 4 GiB, which needs ZIP64")
        self._put(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, size, start, 0))

    def _put(self, data: bytes) -> None:
        self._sink.write(data)
        self._offset += len(data)


def render_record(files: Iterable[tuple[str, str, int]], record: str) -> bytes:
    """RECORD's content for (path, SHA-256 in hex, size in bytes) rows and its own unhashed row."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for path, digest, size in files:
        encoded = base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={encoded}", size])
    rows.writerow([record, "", ""])
    return text.getvalue().encode()


def _hex(digest: str) -> str:
    algorithm, _, encoded = digest.partition("=")
    if algorithm != "sha256":
        raise ReleaseError(f"RECORD: {digest}, want sha256=...")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
