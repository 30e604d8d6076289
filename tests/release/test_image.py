# SPDX-License-Identifier: Apache-2.0
"""What an image is built from, without building one: tests/docker/run.py does that."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from importlib.metadata import distributions
from pathlib import Path

import pytest

from release import fetch, image, installed, manifest
from release.__main__ import main
from release.checkout import sha256_of_file
from release.errors import ReleaseError
from release.pins import TARGETS, read_pins

from .conftest import Refusal


@pytest.mark.parametrize("target", TARGETS)
def test_print_shows_one_command(checkout: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    assert main(["build", "--target", target, "--print", "--docker-option=--network=host"]) == 0
    words = shlex.split(capsys.readouterr().out)
    pins, lock = read_pins(checkout), manifest.read_lock(checkout)
    suffix = "-cpu" if target == "cpu" else ""
    assert words[:3] == ["docker", "build", "--file=docker/Dockerfile"]
    assert f"--tag=exl3-vllm:0.32.0-exl3.1{suffix}" in words
    assert f"--build-arg=BASE_IMAGE={pins.image_base}" in words
    assert f"--label=exl3.lock-sha256={sha256_of_file(checkout / manifest.LOCK)}" in words
    assert f"--label=exl3.tree={lock['composed'][target]['tree']}" in words
    assert words[-2:] == ["--network=host", "."]


def test_exllamav3_is_asked_for(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--target", "cuda", "--print"]) == 0
    plain = shlex.split(capsys.readouterr().out)
    assert main(["build", "--target", "cuda", "--print", "--exllamav3"]) == 0
    words = shlex.split(capsys.readouterr().out)
    version = fetch.exllamav3_version(checkout)
    assert set(words) - set(plain) == {"--build-arg=EXLLAMAV3=1", f"--label=exl3.exllamav3={version}"}
    assert set(plain) - set(words) == {"--build-arg=EXLLAMAV3=0", "--label=exl3.exllamav3="}


@pytest.mark.parametrize("command", ["build", "fetch"])
def test_exllamav3_without_a_gpu_is_refused(refused: Refusal, command: str) -> None:
    message = "--exllamav3: the cpu image has no use for it, want --target cuda"
    assert refused(command, "--target", "cpu", "--exllamav3") == message


def test_exllamav3_is_pinned_by_hash_and_noticed(checkout: Path) -> None:
    lines = (checkout / fetch.EXLLAMAV3_REQUIREMENTS).read_text().splitlines()[1:]
    assert re.fullmatch(r"exllamav3==\d+\.\d+\.\d+ \\\s+--hash=sha256:[0-9a-f]{64}", "\n".join(lines))
    assert "exllamav3 (MIT License; Copyright" in (checkout / "NOTICE").read_text()
    assert "licenses/exllamav3, beside this file" in " ".join((checkout / "NOTICE").read_text().split())


def test_both_extensions_are_compiled_for_the_same_cards(checkout: Path) -> None:
    """exllamav3's kernels need nothing that only sm_90a has."""
    own = re.search(r'EXL3_ARCHS "([^"]+)"', (checkout / "csrc/exl3/CMakeLists.txt").read_text())
    other = re.search(r'^ARCHITECTURES = "([^"]+)"$', (checkout / "docker/exllamav3.py").read_text(), re.MULTILINE)
    assert own and other
    cards = [card.rstrip("a") for card in own[1].split(";")]
    assert other[1].removesuffix("+PTX").replace(".", "").split(";") == cards


def test_a_base_without_its_python_is_refused(refused: Refusal) -> None:
    message = "--base and --python go together: say which Python the base image has"
    assert refused("build", "--target", "cpu", "--base", "x") == message


def test_a_python_that_is_not_locked_is_refused(refused: Refusal) -> None:
    assert refused("fetch", "--target", "cpu", "--python", "3.9") == "--python 3.9: the lock covers 3.11, 3.12, 3.13"


def test_the_base_is_named_by_digest(checkout: Path) -> None:
    assert re.fullmatch(r"[a-z./:0-9-]+@sha256:[0-9a-f]{64}", read_pins(checkout).image_base)


def test_the_dockerfile_names_no_version_and_no_index(checkout: Path) -> None:
    """It installs by requirements files that `fetch` writes, and by the lists of Debian's packages."""
    text = (checkout / image.DOCKERFILE).read_text()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not re.search(r"\d+\.\d+\.\d+|==|://", code)
    assert code.count("pip install") == code.count("--no-index") == code.count("--require-hashes")


@pytest.mark.parametrize("target", TARGETS)
def test_debian_packages_have_hashes(checkout: Path, target: str) -> None:
    lines = (checkout / f"docker/debian-{target}.txt").read_text().splitlines()
    assert lines[0].startswith("# ")
    for line in lines[1:]:
        assert re.fullmatch(r"[a-z0-9.+-]+=\S+ [0-9a-f]{64} \S+\.deb", line), line


def test_what_compiles_the_extension_is_locked(checkout: Path) -> None:
    pins = read_pins(checkout)
    text = fetch._compile_requirements(checkout, pins, manifest.locked_dependencies(checkout))
    found = {line.partition("==")[0] for line in text.splitlines() if "==" in line and not line.startswith(" ")}
    assert found == {"cmake", *pins.image_compile}
    assert f"torch=={pins.torch_version} " in text


def test_docker_is_part_of_the_lock(checkout: Path) -> None:
    assert main(["lock"]) == 0
    (checkout / image.DOCKERFILE).write_text("FROM elsewhere\n")
    assert main(["lock", "--check"]) == 1


def test_an_installed_file_that_changed_is_named(tmp_path: Path) -> None:
    """A package of one file, whose RECORD says what it was."""
    data = b"X = 1\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    info = tmp_path / "thing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (info / "RECORD").write_text(f"thing.py,sha256={digest},{len(data)}\nthing-1.dist-info/RECORD,,\n")
    (tmp_path / "thing.py").write_bytes(data)
    [package] = distributions(path=[str(tmp_path)])
    recorded = {"thing.py": {hashlib.sha256(data).hexdigest()}}
    installed._check_record(tmp_path, "thing", package, recorded)
    (tmp_path / "thing.py").write_bytes(b"X = 2\n")
    of_another = {"thing.py": {*recorded["thing.py"], hashlib.sha256(b"X = 2\n").hexdigest()}}
    installed._check_record(tmp_path, "thing", package, of_another)
    with pytest.raises(ReleaseError, match=r"^thing: .*/thing\.py: [0-9a-f]{64}, its RECORD has [0-9a-f]{64}$"):
        installed._check_record(tmp_path, "thing", package, recorded)
    (tmp_path / "thing.py").unlink()
    with pytest.raises(ReleaseError, match=r"^thing: .*/thing\.py: missing, its RECORD has "):
        installed._check_record(tmp_path, "thing", package, recorded)
