# SPDX-License-Identifier: Apache-2.0
"""`python -m validate receipt`: what results belong to: build, trees, checkpoint, GPUs and, with a URL, the server.

`here` is the installation and the machine that run the command. They are the server's only where it runs in the same
container: `docker compose exec server python -m validate …`. Of another machine's server no more is known than it tells
over HTTP. Digests are of what is recorded (RECORD, headers), not of every byte: they tell builds and checkpoints apart,
and would not notice a weight changed in place.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import struct
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import machine, trellis
from .client import Client, RefusedError, ServerError, connect

EXTENSION = "/exl3_trellis/_exl3_C.abi3.so"  # compiled, and so no part of the locked tree
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Print a receipt, or write it."""
    parser = argparse.ArgumentParser(prog="python -m validate receipt", description=__doc__)
    parser.add_argument("url", nargs="?", help="of a running server; a key comes from VLLM_API_KEY")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the checkpoint")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write it there instead")
    options = parser.parse_args(arguments)
    try:
        text = json.dumps(make(connect(options.url, 60) if options.url else None, options.model), indent=1)
        if options.out:
            options.out.write_text(text + "\n", encoding="utf-8")
    except (ServerError, OSError, ValueError) as error:
        print(f"validate: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}" if options.out else text)
    return 0


def make(client: Client | None, model: Path | None) -> dict[str, Any]:
    """The receipt. Raises OSError or CheckpointError where `model` is no folder with a checkpoint."""
    made: dict[str, Any] = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "here": here()}
    if client:
        made["server"] = server(client)
        made["same_version"] = made["server"]["version"] == made["here"]["installed"].get("version")
    if model:
        made["checkpoint"] = checkpoint(model)
    return made


def server(client: Client) -> dict[str, Any]:
    """What the server tells of itself."""
    try:
        version = client.get_json("/version").get("version")
    except RefusedError:
        version = None  # something in front hides it
    card = {name: client.card.get(name) for name in ("id", "root", "max_model_len")}
    return {"url": client.url, "version": version, "model": card}


def here() -> dict[str, Any]:
    """Build, installed fork and GPUs of this side."""
    made, found = build(), installed()
    trees = made.get("tree")  # of the image's target, or of each
    found["as_locked"] = found.get("recorded_tree") in (trees.values() if isinstance(trees, dict) else (trees,))
    return {"build": made, "installed": found, "gpu": gpus(), "python": platform.python_version()}


def build() -> dict[str, Any]:
    """An image's build.json; in a checkout the digest of the lock and the trees that it locks."""
    facts = Path(os.environ.get("EXL3_HOME") or ROOT / "docker") / "build.json"
    if facts.is_file():
        return {"source": "image", **json.loads(facts.read_text(encoding="utf-8"))}
    lock = ROOT / "release" / "manifest.lock"
    if not lock.is_file():
        return {"source": "unknown", "tree": ""}
    text = lock.read_bytes()
    trees = {target: locked["tree"] for target, locked in tomllib.loads(text.decode())["composed"].items()}
    return {"source": "checkout", "lock_sha256": hashlib.sha256(text).hexdigest(), "tree": trees}


def installed() -> dict[str, Any]:
    """The installed vllm: its version, its tree as the lock counts it, and torch's version."""
    try:
        fork = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return {}
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {"version": fork.version, "recorded_tree": recorded_tree(fork.read_text("RECORD") or ""), "torch": torch}


def recorded_tree(record: str) -> str:
    """SHA-256 over `path NUL sha256 LF`, sorted, of the files outside the dist-info, from the RECORD of a wheel."""
    lines = []
    for path, digest, _ in csv.reader(record.splitlines()):
        inside = not path.startswith("..") and not path.split("/")[0].endswith(".dist-info")
        if digest and inside and not path.endswith((EXTENSION, ".pyc")):
            encoded = digest.removeprefix("sha256=")
            decoded = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
            lines.append(f"{path}\0{decoded}\n".encode())
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def gpus() -> Any:
    """Name and driver of each GPU, or 'none'."""
    found = machine.look("cuda").gpus
    return [{"name": gpu.name, "driver": _driver(gpu.driver)} for gpu in found] or "none"


def _driver(numbers: tuple[int, ...]) -> str:
    """As NVIDIA writes it: 580.65.06."""
    return ".".join(f"{number:02}" for number in numbers)


def checkpoint(folder: Path) -> dict[str, Any]:
    """A digest of the JSON files, the chat template, and each weight file's header and size: no weight is read.

    Raises FileNotFoundError if there is no config.json, CheckpointError if a weight file is missing.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json there, want a checkpoint's folder")
    digest, held, weights = hashlib.sha256(), 0, trellis.load("safetensors_headers").weight_files(folder)
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *weights]):
        content = header(path) if path in weights else path.read_bytes()
        size = path.stat().st_size
        held += size
        digest.update(f"{path.name}\0{size}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return {"name": folder.resolve().name, "weight_files": len(weights), "bytes": held, "digest": digest.hexdigest()}


def header(path: Path) -> bytes:
    """The header of a safetensors file, its length first, as far as the file goes."""
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        return head + file.read(min(length, path.stat().st_size))
