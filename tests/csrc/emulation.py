"""Builds csrc/exl3 for the emulated device of emulator/, and calls its operators on CPU tensors.

The sources are the ones that nvcc compiles, but for what a host compiler cannot read: launches in triple brackets and
declarations of shared memory are spelled as calls, and the operators are registered for the CPU. ptx.cuh is replaced as
a whole. Operators are `torch.ops.exl3`, with the checks and the arithmetic of bindings.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "exl3"
EMULATOR = Path(__file__).parent / "emulator"
TORCH = Path(torch.__file__).parent

LAUNCH = re.compile(r"(\b[\w:]+(?:<[^<>;]*>)?)<<<(.*?)>>>\(", re.DOTALL)
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
STATIC = re.compile(r"__shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)((?:\[[^\]]*\])*);")
# The emulated device is the CPU, which needs no guard.
BINDINGS = {
    r"\bis_cuda\(\)": "is_cpu()",
    r"_LIBRARY_IMPL\(exl3, CUDA,": "_LIBRARY_IMPL(exl3, CPU,",
    r"\n *const DeviceGuard guard\(.*\);": "",
    r"\nusing .*::DeviceGuard;": "",
}

# Misaligned accesses trap. Unrolling and inlining are the device compiler's business; fused multiply-adds only where
# the source asks for them.
FLAGS = [
    "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off",
    "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
]  # fmt: skip


def host_spelling(name: str, text: str) -> str:
    """A source of csrc/exl3 as the host compiler reads it."""
    if name == "bindings.cpp":
        for old, new in BINDINGS.items():
            assert re.search(old, text), f"{name}: {old} not found, which tests/csrc/emulation.py replaces"
            text = re.sub(old, new, text)
        return text
    text = LAUNCH.sub(r"launch(\1, \2)(", text)
    text = DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulate::dynamic_shared());", text)
    text = STATIC.sub(r"auto& \2 = emulate::block_shared<\1\3>(__LINE__);", text)
    for left in ("__shared__", "<<<"):
        assert left not in text, f"{name}: a spelling of {left} that tests/csrc/emulation.py does not know"
    return text


def sources() -> dict[str, str]:
    """Name -> text of the kernels, without the one file that the emulator replaces."""
    paths = [path for path in sorted(KERNELS.iterdir()) if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.name != "ptx.cuh"}


def build(texts: dict[str, str]) -> Path:
    """The emulated library of these sources, from the cache if it was built before."""
    digest = hashlib.sha256()
    for path in sorted(EMULATOR.rglob("*.*")):
        digest.update(path.read_bytes())
    digest.update(repr((FLAGS, torch.__version__)).encode())
    spelled = {name: host_spelling(name, text) for name, text in texts.items()}
    headers = digest.copy()
    headers.update(repr(sorted(item for item in spelled.items() if not item[0].endswith((".cu", ".cpp")))).encode())

    cache = ROOT / ".cache" / "emulator"
    cache.mkdir(parents=True, exist_ok=True)
    objects = [_compile(cache, "machine", (EMULATOR / "machine.cpp").read_text(encoding="utf-8"), {}, digest.copy())]
    for name, text in spelled.items():
        if name.endswith((".cu", ".cpp")):
            objects.append(_compile(cache, Path(name).stem, text, spelled, headers.copy()))
    key = hashlib.sha256(repr([path.name for path in objects]).encode()).hexdigest()[:16]
    library = cache / f"exl3_kernels-{key}.so"
    if not library.exists():
        libraries = [str(TORCH / "lib" / name) for name in ("libtorch.so", "libtorch_cpu.so")]
        arguments = ["-shared", *map(str, objects), "-Wl,-z,defs", "-Wl,--no-as-needed", *libraries]
        _run(["g++", *arguments, "-o", f"{library}.{os.getpid()}"])
        Path(f"{library}.{os.getpid()}").replace(library)
    return library


def _compile(cache: Path, stem: str, text: str, headers: dict[str, str], digest: hashlib._Hash) -> Path:
    digest.update(text.encode())
    key = digest.hexdigest()[:16]
    target = cache / f"{stem}-{key}.o"
    if target.exists():
        return target
    folder = cache / f"{stem}-{key}-{os.getpid()}"
    folder.mkdir()
    for name, header in headers.items():
        (folder / name).write_text(header, encoding="utf-8")
    shutil.copy(EMULATOR / "ptx.cuh", folder)
    source = folder / f"{stem}.cpp"
    source.write_text(text, encoding="utf-8")
    includes = [f"-I{folder}", f"-I{EMULATOR}", f"-isystem{TORCH / 'include'}"]
    _run(["g++", *FLAGS, *includes, "-c", str(source), "-o", str(folder / "out.o")])
    (folder / "out.o").replace(target)
    shutil.rmtree(folder)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


@functools.cache
def load() -> ctypes.CDLL:
    """Registers `torch.ops.exl3`. EXL3_EMULATED_LIBRARY names one built before, such as a mutant."""
    path = os.environ.get("EXL3_EMULATED_LIBRARY") or str(build(sources()))
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    library.exl3_emulator_synchronize.restype = ctypes.c_char_p
    return library


class KernelError(Exception):
    """What the emulated device refused: an address, a barrier, a divergent warp."""


def synchronize() -> None:
    """Runs what was launched; KernelError says which block and thread went wrong first."""
    message = load().exl3_emulator_synchronize()
    if message:
        raise KernelError(message.decode())


def schedule(backward: bool) -> None:
    """Which of the two orders of threads and copies the next kernels run in."""
    load().exl3_emulator_schedule(int(backward))
