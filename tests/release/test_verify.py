# SPDX-License-Identifier: Apache-2.0
"""The lock and verify: green on what was built, red after one byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from release import toml
from release.__main__ import main
from release.archive import WheelReader
from release.manifest import LOCK, read_lock
from release.pins import TARGETS

from .conftest import Refusal, copy_checkout


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # it may be a link to a file that other tests share
    path.write_bytes(data)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory, upstream_wheels: dict[str, Path]) -> Path:
    """What `lock` and `compose` make of the checkout, made once."""
    copy = copy_checkout(tmp_path_factory.mktemp("products"), upstream_wheels)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(copy)
        assert main(["lock"]) == 0
        for target in TARGETS:
            assert main(["compose", "--target", target]) == 0
    return copy


@pytest.fixture
def built(checkout: Path, products: Path) -> Path:
    """A locked copy with both wheels in dist."""
    for generated in (LOCK, "NOTICE"):
        shutil.copy(products / generated, checkout / generated)
    (checkout / "dist").mkdir()
    for wheel in (products / "dist").iterdir():
        (checkout / "dist" / wheel.name).hardlink_to(wheel)
    return checkout


def test_lock_is_stable_and_check_agrees(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock"]) == 0
    first = (checkout / LOCK).read_bytes()
    capsys.readouterr()
    assert main(["lock"]) == 0
    assert (checkout / LOCK).read_bytes() == first
    assert main(["lock", "--check"]) == 0
    expected = "unchanged NOTICE, release/manifest.lock\nmanifest.lock and NOTICE are up to date\n"
    assert capsys.readouterr().out == expected


def test_lock_check_shows_what_is_stale(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock"]) == 0
    (checkout / "vllm/more.py").write_text("X = 1\n")
    lock = (checkout / LOCK).read_bytes()
    capsys.readouterr()
    assert main(["lock", "--check"]) == 1
    shown = capsys.readouterr().out
    assert '+"vllm/more.py" = "' in shown
    assert '-tree = "' in shown
    assert (checkout / LOCK).read_bytes() == lock, "--check wrote"


def test_the_lock_names_no_place_and_no_time(checkout: Path) -> None:
    assert main(["lock"]) == 0
    text = (checkout / LOCK).read_text()
    assert "://" not in text
    assert str(checkout) not in text


def test_lock_reads_back(checkout: Path) -> None:
    """The TOML writer agrees with the standard library's reader."""
    assert main(["lock"]) == 0
    table = read_lock(checkout)
    body = (checkout / LOCK).read_text().split("\n\n", 1)[1]
    assert toml.render(table) == body


def test_other_requirements_ask_for_a_new_resolution(checkout: Path, refused: Refusal) -> None:
    pins = checkout / "release/pins.toml"
    pins.write_text(pins.read_text().replace('"pytest-timeout"', '"pytest-randomly"'))
    assert refused("lock") == (
        "release/manifest.lock: its dependencies were resolved for other requirements "
        "(upstream's or release/pins.toml's changed); python -m release lock --resolve resolves them again"
    )


def test_a_broken_lock_says_what_to_do(checkout: Path, refused: Refusal) -> None:
    (checkout / LOCK).unlink()
    assert refused("lock") == f"{LOCK}: not found; python -m release lock --resolve writes it"


def test_verify_refuses_other_wheels(built: Path, refused: Refusal) -> None:
    other = built / "dist" / "vllm-0.32.0-py3-none-any.whl"
    assert main(["verify", "--wheel", str(other)]) == 1
    other.write_bytes(b"")
    assert main(["verify", "--wheel", str(other)]) == 1


def test_verify_passes_on_what_was_built(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = built / "built.so"
    for needs in (b"", b"\0GLIBC_2.2.5\0GLIBC_2.34\0"):
        library.write_bytes(b"\x7fELF" + needs)
        assert main(["compose", "--target", "cuda", "--extension", str(library)]) == 0
    capsys.readouterr()
    assert main(["verify"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "manifest.lock and NOTICE regenerate byte for byte",
        "vllm-0.32.0+exl3.1-cp38-abi3-manylinux_2_28_x86_64.whl: as locked, with a compiled extension",
        "vllm-0.32.0+exl3.1-cp38-abi3-manylinux_2_34_x86_64.whl: as locked, with a compiled extension",
        "vllm-0.32.0+exl3.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl: as locked",
    ]


def first(folder: Path, pattern: str) -> Path:
    return min(folder.rglob(pattern))


def in_header(patch: Path) -> int:
    """A byte of the subject: the patch still applies, only its hash tells."""
    return patch.read_bytes().index(b"Subject: ") + 9


def in_tree(lock: Path) -> int:
    return lock.read_bytes().index(b'tree = "') + 8


def in_dependency(lock: Path) -> int:
    data = lock.read_bytes()
    return data.index(b"sha256:", data.index(b"[dependencies.files]")) + 10


def in_code(wheel: Path) -> int:
    with WheelReader(wheel) as reader:
        return reader.entry("vllm/envs.py").header_offset + 500


FLIPS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], int], str]] = {
    "patch": (lambda root: first(root / "patches/vllm", "*.patch"), in_header, f"{LOCK} does not regenerate"),
    "overlay": (lambda root: first(root / "vllm", "*.py"), lambda _: 0, f"{LOCK} does not regenerate"),
    "csrc": (lambda root: first(root / "csrc", "*.*"), lambda _: 0, f"{LOCK} does not regenerate"),
    "lock": (lambda root: root / LOCK, in_tree, f"{LOCK} does not regenerate"),
    "locked dependency": (lambda root: root / LOCK, in_dependency, f"{LOCK}: its dependencies were changed by hand"),
    "notice": (lambda root: root / "NOTICE", lambda _: 0, f"{LOCK} does not regenerate"),
    "wheel": (lambda root: first(root / "dist", "*.cpu-*.whl"), in_code, ", composing gives "),
    "wheel's date": (lambda root: first(root / "dist", "*.cpu-*.whl"), lambda _: 10, ", composing gives "),
    "wheel's end": (lambda root: first(root / "dist", "*exl3.1-*"), lambda path: path.stat().st_size - 1, "composing"),
}


@pytest.mark.parametrize("what", FLIPS)
def test_one_byte_is_enough(built: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    find, place, message = FLIPS[what]
    flip(find(built), place(find(built)))
    capsys.readouterr()
    assert main(["verify"]) == 1
    assert message in capsys.readouterr().err
