"""Builds csrc/exl3 for the emulated device of emulator/, and calls its operators on CPU tensors.

The sources are the ones that nvcc compiles, but for what a host compiler cannot read: launches in triple brackets and
declarations of shared memory are spelled as calls, and the operators are registered for the CPU. Files that
emulator/ has too, those of inline assembly, are replaced as a whole. Operators come with the checks of bindings.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from tests.csrc.mutants import plant

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "exl3"
EMULATOR = Path(__file__).parent / "emulator"
TORCH = Path(torch.__file__).parent

INCLUDE = re.compile(r'^#include ["<](.*?)[">]', re.MULTILINE)
LAUNCH = re.compile(r"(\b[\w:]+(?:<[^<>;]*>)?)<<<(.*?)>>>\(", re.DOTALL)
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
STATIC = re.compile(r"__shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)((?:\[[^\]]*\])*);")
# The emulated device is the CPU, which needs no guard.
BINDINGS = {
    r"\bis_cuda\(\)": "is_cpu()",
    r"(STABLE_TORCH_LIBRARY\w*)\(exl3,": r"\1(EXL3_NAMESPACE,",
    r"\(EXL3_NAMESPACE, CUDA,": "(EXL3_NAMESPACE, CPU,",
    r"\n *const DeviceGuard guard\(.*\);": "",
    r"\nusing .*::DeviceGuard;": "",
}

# What the kernels are compiled for: warp by warp as everywhere, or by warpgroups as on SM90.
TARGETS = {"warp": "-DEXL3_WARPGROUP=0", "warpgroup": "-DEXL3_WARPGROUP=1"}

# Misaligned accesses trap. Unrolling and inlining are the device compiler's business; fused multiply-adds only where
# the source asks for them.
FLAGS = [
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off",
    "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
]  # fmt: skip


def host_spelling(name: str, text: str) -> str:
    """A source of csrc/exl3 as the host compiler reads it."""
    if name.startswith("bindings"):
        for old, new in BINDINGS.items():
            text = re.sub(old, new, text)
        for left in ("is_cuda", "DeviceGuard", "(exl3,", ", CUDA,"):
            assert left not in text, f"{name}: a spelling of {left} that tests/csrc/emulation.py does not know"
        return text
    text = LAUNCH.sub(r"launch(\1, \2)(", text)
    text = DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulate::dynamic_shared());", text)
    text = STATIC.sub(r"auto& \2 = emulate::block_shared<\1\3>(__LINE__);", text)
    for left in ("__shared__", "<<<"):
        assert left not in text, f"{name}: a spelling of {left} that tests/csrc/emulation.py does not know"
    return text


def sources() -> dict[str, str]:
    """Name -> text of the kernels, without the files that the emulator replaces."""
    paths = [path for path in sorted(KERNELS.iterdir()) if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if not (EMULATOR / path.name).exists()}


def build(texts: dict[str, str], target: str, namespace: str, optimize: str = "-O1") -> Path:
    """The emulated library of these sources for one of TARGETS, from the cache if it was built before."""
    spelled = {name: host_spelling(name, text) for name, text in texts.items()}
    headers = {path.name: path.read_text(encoding="utf-8") for path in sorted(EMULATOR.iterdir())}
    machine = {name: headers.pop(name) for name in list(headers) if name.endswith(".cpp")}
    objects = [_compile(Path(name).stem, text, _included(text, headers), [optimize]) for name, text in machine.items()]
    headers |= {name: text for name, text in spelled.items() if not name.endswith((".cu", ".cpp"))}
    for name, text in spelled.items():
        if name.endswith((".cu", ".cpp")):
            flags = [f"-DEXL3_NAMESPACE={namespace}" if name.startswith("bindings") else TARGETS[target], optimize]
            objects.append(_compile(Path(name).stem, text, _included(text, headers), flags))
    key = hashlib.sha256(repr([path.name for path in objects]).encode()).hexdigest()[:16]
    library = _cache() / f"exl3_kernels-{key}.so"
    if not library.exists():
        libraries = [str(TORCH / "lib" / name) for name in ("libtorch.so", "libtorch_cpu.so")]
        draft = library.with_suffix(f".{os.getpid()}")
        _run(["g++", "-shared", *map(str, objects), "-Wl,-z,defs", "-Wl,--no-as-needed", *libraries, "-o", str(draft)])
        draft.replace(library)
    return library


def _included(text: str, headers: dict[str, str]) -> dict[str, str]:
    """Those of our headers that a source includes, itself or through others."""
    found: dict[str, str] = {}
    todo = [text]
    while todo:
        for name in INCLUDE.findall(todo.pop()):
            if name in headers and name not in found:
                found[name] = headers[name]
                todo.append(headers[name])
    return found


def _cache() -> Path:
    folder = ROOT / ".cache" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(stem: str, text: str, headers: dict[str, str], flags: list[str]) -> Path:
    """The object of one source beside its headers; kept under a name that says what it was made from."""
    recipe = (text, sorted(headers.items()), FLAGS, flags, torch.__version__)
    target = _cache() / f"{stem}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]}.o"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as name:
            folder = Path(name)
            for header, content in headers.items():
                (folder / header).write_text(content, encoding="utf-8")
            source, draft = folder / f"{stem}.cpp", folder / "out.o"
            source.write_text(text, encoding="utf-8")
            includes = [f"-I{folder}", f"-isystem{TORCH / 'include'}"]
            _run(["g++", *FLAGS, *flags, *includes, "-c", str(source), "-o", str(draft)])
            draft.replace(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


def build_mutant(name: str, target: str, namespace: str) -> Path:
    """Not optimized: it will hardly run before it fails."""
    return build(plant(name, sources()), target, namespace, "-O0")


class KernelError(Exception):
    """What the emulated device refused: an address, a barrier, a warp whose lanes part."""


class Device:
    """The operators built for one of TARGETS, and the machine they run on."""

    def __init__(self, library: Path, namespace: str) -> None:
        torch.ops.load_library(str(library))
        self.ops = getattr(torch.ops, namespace)
        self._library = ctypes.CDLL(str(library))
        self._library.exl3_emulator_synchronize.restype = ctypes.c_char_p

    def schedule(self, backward: bool) -> None:
        """Which of the two orders of threads and copies the next kernels run in."""
        self._library.exl3_emulator_schedule(int(backward))

    def block_launches(self) -> None:
        """From now on a launch runs its kernel before it returns, for callers that know nothing of `synchronize`."""
        self._library.exl3_emulator_blocking(1)

    def synchronize(self) -> None:
        """Runs what was launched; KernelError says which block and thread went wrong first."""
        message = self._library.exl3_emulator_synchronize()
        if message:
            raise KernelError(message.decode())


@functools.cache
def load(target: str, namespace: str = "") -> Device:
    """The emulated device of a target, its operators in a namespace of that target unless another is given.

    The variable EXL3_MUTANT names a fault to plant, see mutants.py.
    """
    namespace = namespace or f"exl3_{target}"
    if mutant := os.environ.get("EXL3_MUTANT"):
        return Device(build_mutant(mutant, target, namespace), namespace)
    return Device(build(sources(), target, namespace), namespace)
