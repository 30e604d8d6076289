# SPDX-License-Identifier: Apache-2.0
"""`build`: the image, from a checkout that verifies and a folder that `fetch` filled; nothing else goes in."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from release import fetch, verify
from release.errors import ReleaseError
from release.pins import Pins, read_pins

DOCKERFILE, COMPILE_STAGES = "docker/Dockerfile", ("compile-cuda", "extension")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to build. `base` and `python` belong together: another base image has a Python of its own."""

    target: str
    base: str
    python: str
    torch: str = "cpu"  # of the cpu target
    tag: str = ""
    exllamav3: bool = False  # compile exllamav3's extension too
    stage: str = ""  # stop after this stage of the Dockerfile
    options: tuple[str, ...] = ()  # for `docker build`, as they are


def default_tag(pins: Pins, target: str) -> str:
    """`exl3-vllm:0.32.0-exl3.1` or `…-cpu`: as the wheel's version, in letters that a tag may have; it never moves."""
    return f"{pins.image_name}:{pins.wheels[target].version.replace('+', '-').replace('.cpu', '-cpu')}"


def require_target(target: str, exllamav3: bool) -> None:
    if exllamav3 and target != "cuda":
        raise ReleaseError(f"--exllamav3: the {target} image has no use for it, want --target cuda")


def build(root: Path, order: Order, *, only_print: bool = False) -> Iterator[str]:
    """Verifies, fetches, builds. With `only_print`, yields the command that would be run."""
    pins = read_pins(root)
    require_target(order.target, order.exllamav3)
    if only_print:
        yield shlex.join(command(root, pins, order))
        return
    if shutil.which("docker") is None:
        raise ReleaseError("docker: not found; an install without it is described in README.md")
    yield from verify.verify(root, [])
    only_compile = order.stage in COMPILE_STAGES
    given = {"only_compile": only_compile, "exllamav3": order.exllamav3}
    yield from fetch.fetch(root, order.target, order.python, order.torch, **given)
    done = subprocess.run(command(root, pins, order), cwd=root, env=_environment(), check=False)
    if done.returncode:
        raise ReleaseError(f"docker build: exit code {done.returncode}, see above")
    yield f"built {order.tag or default_tag(pins, order.target)}"


def command(root: Path, pins: Pins, order: Order) -> list[str]:
    record = fetch.describe(root, pins, order.target, order.python, exllamav3=order.exllamav3)
    labels = {
        "org.opencontainers.image.title": f"EXL3 in vLLM, {order.target}",
        "org.opencontainers.image.version": record["version"],
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": order.base,
    }
    labels |= {f"exl3.{name.replace('_', '-')}": value for name, value in record.items()}
    arguments = ["docker", "build", f"--file={DOCKERFILE}", f"--tag={order.tag or default_tag(pins, order.target)}"]
    arguments += [f"--build-arg=TARGET={order.target}", f"--build-arg=BASE_IMAGE={order.base}"]
    arguments += [f"--build-arg=EXLLAMAV3={int(order.exllamav3)}"]
    arguments += [f"--label={name}={value}" for name, value in labels.items()]
    arguments += [f"--target={order.stage}"] if order.stage else []
    return [*arguments, *order.options, "."]


def _environment() -> dict[str, str]:
    """The Dockerfile mounts folders into its steps, which the older builder does not know."""
    return os.environ | {"DOCKER_BUILDKIT": "1"}
