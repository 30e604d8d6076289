# SPDX-License-Identifier: Apache-2.0
"""Finds versions and hashes for every dependency: the one part of the lock that asks the network.

Works on the public index, whatever extra indexes, folders or constraints this machine's pip has, so that any user's
pip accepts the hashes. Of pip's configuration only the route to the index counts: index URL, certificate, proxy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from release.dependencies import Dependencies, File, inputs_hash
from release.errors import ReleaseError
from release.pins import Pins
from release.upstream import cache, pip, tool_python

_EXTRAS = {"cpu": ["--prune=torch"], "cuda": [], "tools": [], "torch-cuda": []}
_WHEEL = re.compile(r"-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl$")
# Runs in the tool venv, whose pip brings a parser for markers: which of them hold in which environment.
_EVALUATE = """
import json, sys
from pip._vendor.packaging.markers import Marker
markers, environments = json.load(sys.stdin)
json.dump([[bool(m is None or Marker(m).evaluate(e)) for e in environments] for m in markers], sys.stdout)
"""


def resolve(root: Path, pins: Pins, text: str) -> Dependencies:
    """Resolves the pyproject `text` (see dependencies.project) with uv for every locked Python at once."""
    python = tool_python(root)
    pip(python, "install", "--quiet", pins.resolver)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pyproject.toml").write_text(text, encoding="utf-8")
        run = [str(python.parent / "uv"), "--no-config", f"--cache-dir={cache(root, 'uv')}", "--directory", folder]
        environment = _environment(python)
        _run([*run, "lock", f"--python={python}"], environment)
        exported: dict[str, list[Mapping[str, Any]]] = {}
        for extra, options in _EXTRAS.items():
            if extra == "cpu" and "cpu" not in pins.wheels:
                continue
            command = [*run, "export", f"--python={python}", "--frozen", "--format=pylock.toml", "--no-emit-project"]
            exported[extra] = tomllib.loads(_run([*command, f"--extra={extra}", *options], environment))["packages"]
    groups: dict[str, tuple[str, ...]] = {}
    files: dict[str, tuple[File, ...]] = {}
    if "cpu" in pins.wheels:
        groups["torch-cpu"] = (f"torch=={pins.torch_version}+cpu",)
        files[groups["torch-cpu"][0]] = tuple(_sorted(_cpu_torch(pins)))
    for extra, packages in exported.items():
        groups[extra] = tuple(_lines(python, pins, packages))
        for package in packages:
            files[f"{package['name']}=={package['version']}"] = tuple(_sorted(_files(pins, package)))
    return Dependencies(inputs=inputs_hash(text), groups=groups, files=files)


def _environment(python: Path) -> dict[str, str]:
    """Ours, with pip's route to its index told to uv."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    listing = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        name = names.get(key.rpartition(".")[2])
        if name is not None:
            environment[name] = value.strip("'\"")
    return environment


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}: exit code {done.returncode}, see above")
    return done.stdout


def _lines(python: Path, pins: Pins, packages: list[Mapping[str, Any]]) -> list[str]:
    """`name==version`, with a marker where a package is for some of the locked Pythons only."""
    environments = [_marker_environment(version) for version in pins.pythons]
    request = json.dumps([[package.get("marker") for package in packages], environments])
    command = [str(python), "-c", _EVALUATE]
    answer = subprocess.run(command, input=request, capture_output=True, text=True, check=True).stdout
    lines = []
    for package, holds in zip(packages, json.loads(answer), strict=True):
        pythons = [version for version, held in zip(pins.pythons, holds, strict=True) if held]
        pin = f"{package['name']}=={package['version']}"
        if pythons == list(pins.pythons):
            lines.append(pin)
        elif pythons:
            lines.append(f"{pin} ; " + " or ".join(f'python_version == "{version}"' for version in pythons))
    return sorted(lines)


def _marker_environment(version: str) -> dict[str, str]:
    return {
        "implementation_name": "cpython", "implementation_version": f"{version}.0", "os_name": "posix",
        "platform_machine": "x86_64", "platform_python_implementation": "CPython", "platform_system": "Linux",
        "python_full_version": f"{version}.0", "python_version": version, "sys_platform": "linux",
    }  # fmt: skip


def _files(pins: Pins, package: Mapping[str, Any]) -> list[File]:
    """The published wheels that a locked Python can install; the source archive where there is no such wheel."""
    wheels = [wheel for wheel in package.get("wheels", []) if _fits(pins, _name(wheel))]
    chosen = wheels or ([package["sdist"]] if "sdist" in package else [])
    if not chosen:
        raise ReleaseError(f"{package['name']}=={package['version']}: no file for {', '.join(pins.pythons)} on x86-64")
    return [File(name=_name(file), sha256=file["hashes"]["sha256"], size=file.get("size", 0)) for file in chosen]


def _name(file: Mapping[str, Any]) -> str:
    return str(file.get("name") or file["url"].rpartition("/")[2])


def _fits(pins: Pins, name: str) -> bool:
    match = _WHEEL.search(name)
    if match is None:
        raise ReleaseError(f"{name}: not a wheel's file name")
    older = range(int(pins.pythons[-1].split(".")[1]) + 1)
    exact = {"cp" + version.replace(".", "") for version in pins.pythons}
    any_python = {"py3", *(f"py3{minor}" for minor in older)}  # also py3 wheels that name the oldest Python they take
    stable = {f"cp3{minor}" for minor in older}
    pythons, abi, platform = set(match["python"].split(".")), match["abi"], match["platform"]
    fits_python = bool(pythons & (exact | any_python)) or (abi == "abi3" and bool(pythons & stable))
    fits_abi = abi in ("none", "abi3") or abi in exact
    return fits_python and fits_abi and (platform == "any" or ("manylinux" in platform and "x86_64" in platform))


def _cpu_torch(pins: Pins) -> list[File]:
    return [File(name=name, sha256=digest, size=0) for name, digest in pins.torch_cpu_files.items()]


def _sorted(files: list[File]) -> list[File]:
    return sorted(files, key=lambda file: file.name)
