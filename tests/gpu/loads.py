"""What a process loads onto its card while it is watched: modules, and kernels asked for by name for the first time.

    with Loads() as seen: ...
    seen.names        # ["_Z14linear_kernelI…", "module of 51200 bytes: first_kernel"]

CUDA loads lazily: a library's module when its first kernel is launched, every further kernel when its own turn comes.
CUPTI reports both to a callback, in the process that loads.  It takes one subscriber at a time: not beside a profiler.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

DRIVER, RESOURCE = 1, 3  # callback domains
MODULE_LOADED = 6
# Driver calls that load code, by CUPTI's number; those of the second table name a kernel in their third argument.
LOADS = {18: "cuModuleLoad", 19: "cuModuleLoadData", 20: "cuModuleLoadDataEx", 21: "cuModuleLoadFatBinary",
         365: "cuLinkComplete", 678: "cuLibraryLoadData", 679: "cuLibraryLoadFromFile"}  # fmt: skip
KERNELS = {23: "cuModuleGetFunction", 681: "cuLibraryGetKernel"}


class _Call(ctypes.Structure):
    """The head of CUpti_CallbackData."""

    _fields_ = (
        ("site", ctypes.c_int),  # 0: entering
        ("function", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(ctypes.c_char_p)),
    )


class _Module(ctypes.Structure):
    """CUpti_ModuleResourceData."""

    _fields_ = (("number", ctypes.c_uint32), ("size", ctypes.c_size_t), ("cubin", ctypes.c_void_p))


class _Resource(ctypes.Structure):
    """CUpti_ResourceData."""

    _fields_ = (("context", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("descriptor", ctypes.POINTER(_Module)))


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


def first_kernel(cubin: bytes) -> str:
    """The name of a kernel in a compiled module: the first section of code."""
    found = re.search(rb"\.text\.([\w$]+)", cubin)
    return found[1].decode() if found else "no kernel"


# Kernels that libraries below vLLM choose by the sizes of a batch, for unquantized models too, and load when they run:
# torch's own, cuBLAS's, FlashAttention's.
LIBRARIES = re.compile(r"_ZN2at6native|nvjet_|.*gemv|_ZN\d+cublas|_ZN5flash|_ZN7cutlass13device_kernelIN5flash")


def late(names: list[str]) -> list[str]:
    """Those that nobody below vLLM answers for: compiled kernels and ours.  Every load ends in a kernel with a name."""
    kernels = [name.partition(": ")[2] or name for name in names if name not in LOADS.values()]
    return [name for name in kernels if not LIBRARIES.match(name)]


class Loads:
    """A context that listens; `names` has one entry for each module and kernel loaded meanwhile."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._cupti = ctypes.CDLL("libcupti.so.13")  # torch has loaded it
        self._callback = _CALLBACK(self._hear)
        self._subscriber = ctypes.c_void_p()

    def _hear(self, _: int, domain: int, number: int, data: int) -> None:
        if domain == RESOURCE:
            module = ctypes.cast(data, ctypes.POINTER(_Resource))[0].descriptor[0]
            cubin = ctypes.string_at(module.cubin, module.size) if module.cubin else b""
            self.names.append(f"module of {module.size} bytes: {first_kernel(cubin)}")
            return
        call = ctypes.cast(data, ctypes.POINTER(_Call))[0]
        if call.site == 0:
            self.names.append(call.arguments[2].decode() if number in KERNELS else LOADS[number])

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cupti, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: CUPTI status {status}")

    def __enter__(self) -> Loads:
        self._do("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
        self._do("cuptiEnableCallback", 1, self._subscriber, RESOURCE, MODULE_LOADED)
        for number in (*LOADS, *KERNELS):
            self._do("cuptiEnableCallback", 1, self._subscriber, DRIVER, number)
        return self

    def __exit__(self, *_: object) -> None:
        self._do("cuptiUnsubscribe", self._subscriber)
