# SPDX-License-Identifier: Apache-2.0
"""Reads release/pins.toml, the hand-written half of the lock."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.errors import ReleaseError

TARGETS = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class UpstreamWheel:
    """One upstream wheel, and how the composed wheel made from it differs in name and needs."""

    target: str
    distribution: str
    file: str
    sha256: str
    size: int  # bytes
    version: str  # of the composed wheel
    drop_requirements: tuple[str, ...]
    glibc: int = 0  # what the composed wheel's own library needs: 34 is glibc 2.34

    @property
    def tag(self) -> str:
        """Python, ABI and platform tags, as in the file name: `cp38-abi3-manylinux_2_28_x86_64`."""
        tag = "-".join(self.file.removesuffix(".whl").split("-")[2:])
        return re.sub(r"(?<=manylinux_2_)\d+", lambda found: str(max(self.glibc, int(found[0]))), tag)

    @property
    def composed_file(self) -> str:
        return f"vllm-{self.version}-{self.tag}.whl"


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Everything release/pins.toml says."""

    release: int
    author: str  # the From line of every patch
    upstream_version: str
    upstream_commit: str
    wheels: Mapping[str, UpstreamWheel]  # by target; upstream may have no cpu wheel of a version
    forbidden: tuple[str, ...]  # paths no patch may touch
    reasons: tuple[str, ...]
    pythons: tuple[str, ...]  # "3.11", ...
    torch_version: str
    torch_requires: tuple[str, ...]
    torch_cpu_files: Mapping[str, str]  # wheel file name -> sha256
    tools: tuple[str, ...]
    extra: Mapping[str, tuple[str, ...]]  # target -> requirements besides the composed wheel's
    resolver: str
    image_name: str
    image_base: str  # name@digest
    image_python: str  # the base's, "3.12"
    image_compile: tuple[str, ...]  # locked packages that the extension is compiled with


def read_pins(root: Path) -> Pins:
    """Raises ReleaseError naming the file and the missing or malformed key."""
    path = root / "release" / "pins.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return _pins(raw)
    except FileNotFoundError:
        raise ReleaseError(f"{path}: not found") from None
    except tomllib.TOMLDecodeError as error:
        raise ReleaseError(f"{path}: {error}") from None
    except KeyError as error:
        raise ReleaseError(f"{path}: key {error} is missing") from None


def _pins(raw: Mapping[str, Any]) -> Pins:
    upstream, torch, dependencies = raw["upstream"], raw["torch"], raw["dependencies"]
    base = f"{upstream['version']}+exl3.{raw['fork']['release']}"
    wheels = {}
    for target in (target for target in TARGETS if target in upstream or target == "cuda"):
        entry = upstream[target]
        wheels[target] = UpstreamWheel(
            target=target,
            distribution=entry["distribution"],
            file=entry["file"],
            sha256=entry["sha256"],
            size=entry["size"],
            version=base + entry["version-suffix"],
            drop_requirements=tuple(entry["drop-requirements"]),
        )
    return Pins(
        release=raw["fork"]["release"],
        author=raw["fork"]["from"],
        upstream_version=upstream["version"],
        upstream_commit=upstream["commit"],
        wheels=wheels,
        forbidden=tuple(raw["patches"]["forbidden"]),
        reasons=tuple(raw["patches"]["reasons"]),
        pythons=tuple(raw["python"]["versions"]),
        torch_version=torch["version"],
        torch_requires=tuple(torch["requires"]),
        torch_cpu_files=torch["cpu-files"],
        tools=tuple(dependencies["tools"]),
        extra={target: tuple(dependencies[target]) for target in TARGETS},
        resolver=dependencies["resolver"],
        image_name=raw["image"]["name"],
        image_base=raw["image"]["base"],
        image_python=raw["image"]["python"],
        image_compile=tuple(raw["image"]["compile"]),
    )
