# SPDX-License-Identifier: Apache-2.0
"""Makes the fork's wheel: upstream's files, the patched ones, the overlay, and metadata of its own.

Knows nothing of the lock: it turns a checkout into a `Composition`, whose name, tree and bytes others compare.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from release import archive, stack, upstream
from release.archive import WheelReader, WheelWriter
from release.checkout import EXTENSION, OVERLAY, files_of, sha256, tree_hash, written_whole
from release.errors import ReleaseError
from release.patch import Patch
from release.pins import UpstreamWheel, read_pins

VERSION_FILE = "vllm/_version.py"


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What a composed wheel consists of.

    Trees are `checkout.tree_hash` over everything outside dist-info: upstream's, after each patch, and composed.
    """

    wheel: UpstreamWheel
    source: Path  # the upstream wheel
    patches: tuple[Patch, ...]
    upstream_tree: str
    patch_trees: tuple[str, ...]  # upstream's tree after each patch
    tree: str  # of the composed wheel
    entries: tuple[tuple[str, bytes | None], ...]  # path, new content or None: as upstream has it

    @property
    def metadata(self) -> bytes:
        name = f"vllm-{self.wheel.version}.dist-info/METADATA"
        return next(data for path, data in self.entries if path == name and data is not None)


def compose(
    root: Path, target: str, *, extension: bytes | None = None, notice: bytes | None = None, draft: bool = False
) -> Composition:
    """Reads and checks everything that goes into a target's wheel.

    `extension` is the compiled CUDA library, `notice` stands in for the checkout's NOTICE; a `draft` is for
    development: its patches may name tests that are still to be written.

    Raises ReleaseError for a wheel of another hash, a patch that is malformed or does not lie exactly in place,
    an overlay path that upstream has, and an extension for a target other than cuda.
    """
    if extension is not None and target != "cuda":
        raise ReleaseError(f"--extension: the {target} wheel has no compiled extension, want --target cuda")
    pins = read_pins(root)
    if target not in pins.wheels:
        raise ReleaseError(f"release/pins.toml: no [upstream.{target}], so there is no {target} fork of this version")
    wheel = replace(pins.wheels[target], glibc=_glibc(extension or b""))
    series = stack.read_stack(root, pins, draft=draft)
    source = upstream.obtain(root, pins, target)
    with WheelReader(source) as reader:
        overlay = _overlay(root, reader)
        record = {path: digest for path, (digest, _) in reader.record().items() if not _is_metadata(reader, path)}
        trees = []
        patched: dict[str, bytes] = {}
        for _, patched in stack.apply_stack(series, reader.read, reader.__contains__):
            trees.append(tree_hash(record | {path: sha256(data) for path, data in patched.items()}))
        ours = {path: stack.mark_changed(path, data, series) for path, data in patched.items()}
        ours[VERSION_FILE] = _stamp_version(reader.read(VERSION_FILE), wheel.version, pins.upstream_commit)
        added = overlay if extension is None else overlay | {EXTENSION: extension}
        entries = [(path, ours.get(path)) for path in reader.names() if not _is_metadata(reader, path)]
        entries += sorted(added.items())
        tree = tree_hash(record | {path: sha256(data) for path, data in (ours | added).items()})
        entries += _dist_info(reader, wheel, notice or (root / "NOTICE").read_bytes(), entries)
    return Composition(
        wheel=wheel,
        source=source,
        patches=tuple(series),
        upstream_tree=tree_hash(record),
        patch_trees=tuple(trees),
        tree=tree,
        entries=tuple(entries),
    )


def write(composition: Composition, sink: archive.Sink) -> None:
    """Writes the wheel's bytes, always the same for the same composition."""
    with WheelReader(composition.source) as reader:
        writer = WheelWriter(sink)
        for path, data in composition.entries:
            if data is None:
                writer.copy(reader, path)
            else:
                writer.store(path, data)
        writer.finish()


def write_file(composition: Composition, folder: Path) -> Path:
    """Writes the wheel below `folder`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / composition.wheel.composed_file
    with written_whole(path) as stream:
        write(composition, stream)
    return path


def _glibc(library: bytes) -> int:
    """34 for a library whose newest symbols are those of glibc 2.34; by the version names that an ELF file holds."""
    return max((int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\0])", library)), default=0)


def _is_metadata(reader: WheelReader, path: str) -> bool:
    return path.startswith(reader.dist_info + "/")


def _overlay(root: Path, reader: WheelReader) -> dict[str, bytes]:
    """path -> content of the checkout's own files. The overlay only adds."""
    overlay = {}
    for path in files_of(root, OVERLAY):
        if path in reader:
            raise ReleaseError(f"{path}: exists in upstream {reader.path.name} too; the overlay only adds, use a patch")
        overlay[path] = (root / path).read_bytes()
    return overlay


def _stamp_version(data: bytes, version: str, commit: str) -> bytes:
    """vllm/_version.py with the fork's version and upstream's commit; everything else as upstream has it."""
    numbers, _, local = version.partition("+")
    parts = ", ".join([*numbers.split("."), f'"{local}"'])
    values = {
        "__version__ = version": f"'{version}'",
        "__version_tuple__ = version_tuple": f"({parts})",
        "__commit_id__ = commit_id": f"'g{commit}'",
    }
    text = data.decode()
    for name, value in values.items():
        line = re.compile(rf"^{name} = .*$", re.MULTILINE)
        if len(line.findall(text)) != 1:
            raise ReleaseError(f"upstream {VERSION_FILE}: {len(line.findall(text))} lines '{name} = ...', want 1")
        text = line.sub(f"{name} = {value}", text)
    return text.encode()


def _dist_info(
    reader: WheelReader, wheel: UpstreamWheel, notice: bytes, files: list[tuple[str, bytes | None]]
) -> list[tuple[str, bytes]]:
    """The wheel's metadata, RECORD last. `files` is everything else that it holds."""
    folder = f"vllm-{wheel.version}.dist-info"
    old = reader.dist_info
    entries = [
        (f"{folder}/METADATA", _metadata(reader.read(f"{old}/METADATA"), wheel)),
        (f"{folder}/WHEEL", _wheel_file(wheel)),
        (f"{folder}/entry_points.txt", reader.read(f"{old}/entry_points.txt")),
        (f"{folder}/licenses/LICENSE", reader.read(f"{old}/licenses/LICENSE")),
        (f"{folder}/licenses/NOTICE", notice),
        (f"{folder}/top_level.txt", reader.read(f"{old}/top_level.txt")),
    ]
    recorded = reader.record()
    rows = []
    for path, data in [*files, *entries]:
        rows.append((path, *recorded[path]) if data is None else (path, sha256(data), len(data)))
    return [*entries, (f"{folder}/RECORD", archive.render_record(rows, f"{folder}/RECORD"))]


def _metadata(data: bytes, wheel: UpstreamWheel) -> bytes:
    """METADATA with the fork's name, version, notice and needs; torch is asked for by plain version for both builds."""
    head, _, description = data.decode().partition("\n\n")
    lines: list[str] = []
    for line in head.split("\n"):
        field, _, value = line.partition(": ")
        if field in ("Name", "Version"):
            line = f"{field}: {'vllm' if field == 'Name' else wheel.version}"
        elif field == "License-File":
            line += "\nLicense-File: NOTICE"
        elif field == "Requires-Dist":
            name, needed = requirement_name(value), value.split(";")[0].strip()
            if name in wheel.drop_requirements:
                continue
            if name == "torch":
                line = f"Requires-Dist: {needed.split('+')[0]}"
                if line in lines:
                    continue
        lines.append(line)
    return "\n".join([*lines, "", description]).encode()


def requirement_name(requirement: str) -> str:
    """The normalised project name that a requirement begins with (PEP 503)."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ReleaseError(f"requirement {requirement!r}: no project name")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _wheel_file(wheel: UpstreamWheel) -> bytes:
    lines = ["Wheel-Version: 1.0", "Generator: release compose", "Root-Is-Purelib: false", f"Tag: {wheel.tag}"]
    return ("\n".join(lines) + "\n").encode()
