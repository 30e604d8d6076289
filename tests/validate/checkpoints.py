# SPDX-License-Identifier: Apache-2.0
"""Making a synthetic checkpoint and reading back what was written."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from validate.__main__ import main


def make(folder: Path, form: str) -> Path:
    """Write a checkpoint as the command line would."""
    name, *options = form.split()
    assert main(["make-checkpoint", name, str(folder), *options]) == 0
    return folder


def headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """{tensor: (dtype, shape)} of all files, by the safetensors library."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), list(part.get_shape()))
    return found


MARKERS = {".mcg": 0xCBAC1FED, ".mul1": 0x83DCD12D}


def wrong_markers(folder: Path) -> list[str]:
    """Codebook markers that do not hold the multiplier of their codebook."""
    wrong = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                want = MARKERS.get(name[name.rindex(".") :])
                if want is not None and int(file.get_tensor(name)) % (1 << 32) != want:
                    wrong.append(name)
    return wrong


def config_of(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())
