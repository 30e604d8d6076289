"""Builds csrc/exl3 as the image does, with the locked compiler, and reads what that reports. Needs no GPU.

The compiler comes from the package index, by hash, into the clone's cache: another one would count other registers and
spill elsewhere. `python -m tests.csrc.compiled` compiles for every card and writes the table of registers anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from release import manifest
from release.dependencies import Dependencies, pip_requirements
from release.fetch import COMPILE_REQUIREMENTS
from release.pins import read_pins
from release.upstream import cache, pip, tool_python

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "exl3"
REGISTERS = Path(__file__).parent / "registers.json"
# As csrc/exl3/CMakeLists.txt names them.
ALL_TARGETS = ("80", "86", "89", "90a", "100", "120")

ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
USED = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """library: the extension; log: all that the compilers said; commands: one a source, as CMake runs them."""

    library: Path
    log: str
    commands: tuple[str, ...]


def compiled(target: str) -> Compiled:
    """The extension for one of ALL_TARGETS, from the cache if the same sources were built before."""
    compiler = _compiler()
    digest = hashlib.sha256(repr((compiler.name, target, torch.__version__)).encode())
    for path in sorted({*KERNELS.iterdir()} - {KERNELS / "README.md"}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = cache(ROOT, "compiled") / digest.hexdigest()[:16]
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        cuda, cmake = compiler / "nvidia" / "cu13", compiler / "cmake" / "data" / "bin" / "cmake"
        configure = [cmake, "-S", KERNELS, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        configure += [f"-DCMAKE_CUDA_COMPILER={cuda / 'bin' / 'nvcc'}", f"-DCUDAToolkit_ROOT={cuda}"]
        configure += [f"-DTORCH_DIR={Path(torch.__file__).parent}", f"-DEXL3_ARCHS={target}"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={compiler / 'bin' / 'ninja'}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        _run([*configure, "-DCMAKE_CUDA_FLAGS=-Xptxas=-v"])
        log = _run([cmake, "--build", folder, "--parallel", "1"])
        (folder / "log").write_text(log, encoding="utf-8")
        (folder / "complete").touch()
    entries = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
    return Compiled(
        library=next(folder.glob("*.so")),
        log=(folder / "log").read_text(encoding="utf-8"),
        commands=tuple(entry["command"] for entry in entries),
    )


def _compiler() -> Path:
    """A folder with nvcc, cmake and ninja of the versions that the image compiles with."""
    text = (ROOT / COMPILE_REQUIREMENTS).read_text(encoding="utf-8") + pip_requirements(_locked(), ["compile"])
    folder = ROOT / ".cache" / f"compiler-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        listing = cache(ROOT, "requirements") / "compiler.txt"
        listing.write_text(text, encoding="utf-8")
        pip(
            tool_python(ROOT), "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
            f"--target={folder}", f"--requirement={listing}",
        )  # fmt: skip
        subprocess.run(["sh", ROOT / "docker" / "link-cuda", folder / "nvidia" / "cu13"], check=True)
        (folder / "complete").touch()
    return folder


def _locked() -> Dependencies:
    """Of the lock, what the extension is compiled with; torch is installed already."""
    locked, names = manifest.locked_dependencies(ROOT), set(read_pins(ROOT).image_compile) - {"torch"}
    lines = tuple(line for line in locked.groups["cuda"] if line.partition("==")[0] in names)
    return replace(locked, groups={"compile": lines})


def nvcc_version() -> str:
    """The compiler's, as locked."""
    return next(line for line in _locked().groups["compile"] if line.startswith("nvidia-cuda-nvcc==")).partition("==")[
        2
    ]


def _run(command: list[str | Path]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def registers(log: str) -> dict[str, dict[str, int]]:
    """kernel -> target -> registers a thread, the most over codebooks, rates and types that share a row."""
    table: dict[str, dict[str, int]] = defaultdict(dict)
    entry: tuple[str, str] | None = None
    for line in log.splitlines():
        if found := ENTRY.search(line):
            entry = (_family(found[1]), found[2])
        elif (found := USED.search(line)) and entry:
            kernel, target = entry
            table[kernel][target] = max(table[kernel].get(target, 0), int(found[1]))
            entry = None
    return {kernel: dict(sorted(row.items())) for kernel, row in sorted(table.items())}


def _family(mangled: str) -> str:
    """`linear_kernel 16` for the kernel of 16 rows, else the kernel's name: ptxas speaks mangled."""
    name = re.search(r"4exl3L?\d+([a-z_]+_kernel)", mangled)
    rows = re.search(r"ShapeILi(\d+)E", mangled)
    assert name, f"no kernel's name in {mangled}"
    return f"{name[1]} {rows[1]}" if rows else name[1]


def spills(log: str) -> list[str]:
    """Reports of kernels that keep anything in local memory."""
    return [found[0] for found in SPILLS.finditer(log) if found.groups() != ("0", "0", "0")]


def _tabulate() -> None:
    table: dict[str, dict[str, int]] = defaultdict(dict)
    for target in ALL_TARGETS:
        print(f"compiling for sm_{target}", file=sys.stderr, flush=True)
        for kernel, row in registers(compiled(target).log).items():
            table[kernel] |= row
    content = {"nvcc": nvcc_version(), "registers": dict(sorted(table.items()))}
    REGISTERS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _tabulate()
