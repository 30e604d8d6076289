"""Buffers for kernels to misuse: NaN before they are written, and a page that faults behind each."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

NAN_BYTE = 0xFF  # fp16, bf16 and fp32 read NaN

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """Buffers between pages that fault. They stay mapped until the arena goes."""

    def __init__(self) -> None:
        self._maps: list[tuple[int, int]] = []

    def __del__(self) -> None:
        for base, size in self._maps:
            _libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(size))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, align: int = 16) -> torch.Tensor:
        """[*shape] `dtype` of NaN bytes, aligned to `align`, its end less than that before a page that faults."""
        size = max(math.prod(shape) * dtype.itemsize, 1)
        page = mmap.PAGESIZE
        inside = -(-size // page) * page
        flags, protection = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
        base = _libc.mmap(None, inside + 2 * page, protection, flags, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value), "no memory"
        self._maps.append((base, inside + 2 * page))
        assert _libc.mprotect(base, page, 0) == 0 and _libc.mprotect(base + page + inside, page, 0) == 0
        start = base + page + inside - -(-size // align) * align
        ctypes.memset(start, NAN_BYTE, size)
        buffer = (ctypes.c_ubyte * size).from_address(start)
        return torch.frombuffer(buffer, dtype=dtype)[: math.prod(shape)].view(*shape)

    def copy(self, tensor: torch.Tensor, align: int = 16) -> torch.Tensor:
        return self.empty(tensor.shape, tensor.dtype, align).copy_(tensor)
