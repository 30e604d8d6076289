# SPDX-License-Identifier: Apache-2.0
"""The commands that make an image: fetch and build."""

from __future__ import annotations

import argparse
from pathlib import Path

from release import fetch, image
from release.errors import ReleaseError
from release.pins import TARGETS, read_pins


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    gather = commands.add_parser("fetch", help="gather all that an image is built from in build/image, by hash")
    order = commands.add_parser("build", help="verify, fetch, and build the image with Docker")
    for command in (gather, order):
        command.add_argument("--target", choices=TARGETS, required=True, help="which image")
        command.add_argument("--python", metavar="3.N", help="the base image's Python (default: of the pinned base)")
        command.add_argument("--torch", choices=("cpu", "cuda"), default="cpu", help="build of torch in the CPU image")
        command.add_argument("--exllamav3", action="store_true", help="also exllamav3's extension, hours of compiling")
    order.add_argument("--base", metavar="IMAGE", help="base image in place of the pinned one; needs --python")
    order.add_argument("--tag", default="", help="name of the image (default: exl3-vllm:VERSION)")
    order.add_argument("--stage", default="", help="stop after a stage of the Dockerfile, say extension")
    order.add_argument("--print", dest="only_print", action="store_true", help="show the command, run nothing")
    order.add_argument(
        "--docker-option", dest="options", action="append", default=[], metavar="OPTION",
        help="for docker build, as it is: --docker-option=--network=host",
    )  # fmt: skip
    gather.set_defaults(run=_fetch)
    order.set_defaults(run=_build)


def _fetch(root: Path, given: argparse.Namespace) -> int:
    image.require_target(given.target, given.exllamav3)
    python = given.python or read_pins(root).image_python
    for line in fetch.fetch(root, given.target, python, given.torch, exllamav3=given.exllamav3):
        print(line, flush=True)
    return 0


def _build(root: Path, given: argparse.Namespace) -> int:
    pins = read_pins(root)
    if (given.base is None) != (given.python is None):
        raise ReleaseError("--base and --python go together: say which Python the base image has")
    order = image.Order(
        target=given.target, base=given.base or pins.image_base, python=given.python or pins.image_python,
        torch=given.torch, exllamav3=given.exllamav3, tag=given.tag, stage=given.stage, options=tuple(given.options),
    )  # fmt: skip
    for line in image.build(root, order, only_print=given.only_print):
        print(line, flush=True)
    return 0
