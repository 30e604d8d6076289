"""Calls of the emulated operators in hostile surroundings, each made under both schedules of the emulated device.

Every buffer ends at a page that faults, what an operator shall write is NaN before, and both schedules must give the
same bytes.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.csrc.emulation import schedule, synchronize
from vllm.model_executor.layers.quantization.exl3_trellis.codebook import tile_words
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_rotated, hadamard

CODEBOOKS = ("3inst", "mcg", "mul1")  # in the order of their numbers
BLOCK = 128
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
        assert _libc.mprotect(base, page, 0) == 0 and _libc.mprotect(base + page + inside, page, 0) == 0  # noqa: PT018
        start = base + page + inside - -(-size // align) * align
        ctypes.memset(start, NAN_BYTE, size)
        buffer = (ctypes.c_ubyte * size).from_address(start)
        return torch.frombuffer(buffer, dtype=dtype)[: math.prod(shape)].view(*shape)

    def copy(self, tensor: torch.Tensor, align: int = 16) -> torch.Tensor:
        return self.empty(tensor.shape, tensor.dtype, align).copy_(tensor)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One matrix of a merged projection: y gets columns [first, first + width) of its n."""

    trellis: torch.Tensor  # [k/16, n/16, 16*K] i16
    suh: torch.Tensor  # [k] f16
    svh: torch.Tensor  # [n] f16
    book: str
    first: int
    width: int

    @property
    def rate2(self) -> int:
        """Twice the bits a weight."""
        return self.trellis.shape[2] // 8

    @property
    def k(self) -> int:
        return self.suh.shape[0]

    @property
    def n(self) -> int:
        return self.svh.shape[0]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[m, width] f64: had(fp16(had(x * suh)) @ W) * svh, all but the one rounding in float64."""
        x = torch.nn.functional.pad(x.double(), (0, self.k - x.shape[1]))
        rotated = hadamard(x * self.suh.double()).half().double()
        y = hadamard(rotated @ decode_rotated(self.trellis, self.book, torch.float64)) * self.svh.double()
        return y[:, self.first : self.first + self.width]

    def matrix(self) -> torch.Tensor:
        """[k, n] f64 in the original basis."""
        rows = hadamard(decode_rotated(self.trellis, self.book, torch.float64)) * self.svh.double()
        return hadamard(rows.t().contiguous()).t() * self.suh.double().unsqueeze(1)


def random_shard(k: int, n: int, rate: float, book: str, first: int = 0, width: int | None = None) -> Shard:
    """Random bits; scales of both signs and of sizes that differ, so that no two channels may be confused."""
    generator = torch.Generator().manual_seed(hash((k, n, round(2 * rate), CODEBOOKS.index(book))))
    words = (k // 16, n // 16, tile_words(rate))
    trellis = torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, generator=generator)
    suh, svh = (torch.randn(size, generator=generator).half() + 0.5 for size in (k, n))
    return Shard(trellis=trellis, suh=suh, svh=svh, book=book, first=first, width=n - first if width is None else width)


def random_x(m: int, k: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64; NaN if anything is."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def under_both_schedules(call: Callable[[Arena], torch.Tensor]) -> torch.Tensor:
    """The result of a call, which must not depend on the order in which threads run and copies land."""
    results = []
    for backward in (False, True):
        schedule(backward)
        arena = Arena()
        results.append(call(arena).clone())
    assert same_bytes(*results), "the result depends on the order of threads: a barrier or a wait is missing"
    return results[0]


def linear(
    x: torch.Tensor,
    shards: Sequence[Shard],
    dtype: torch.dtype = torch.float32,
    splits: int = 3,
    dependent: bool = False,
    pad: int = 0,
) -> torch.Tensor:
    """[m, sum of widths] `dtype` of `torch.ops.exl3.linear`. pad: elements between the rows of x and of y."""
    m, columns = x.shape[0], sum(shard.width for shard in shards)

    def call(arena: Arena) -> torch.Tensor:
        y = arena.empty((m, columns + pad), dtype)
        x_wide = arena.empty((m, x.shape[1] + pad), x.dtype, align=x.dtype.itemsize)[:, : x.shape[1]]
        enqueue_linear(arena, y[:, :columns], x_wide.copy_(x), shards, splits, dependent)
        synchronize()
        assert y[:, columns:].isnan().all(), "a write between the rows of y"
        return y[:, :columns]

    return under_both_schedules(call)


def enqueue_linear(
    arena: Arena,
    y: torch.Tensor,
    x: torch.Tensor,
    shards: Sequence[Shard],
    splits: int,
    dependent: bool,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launches without waiting, x as it lies; returns the scratch, one made for the purpose unless given."""
    k, blocks = shards[0].k, sum(shard.n for shard in shards) // BLOCK
    need = torch.ops.exl3.linear_scratch_bytes(x.shape[0], k, blocks, len(shards), splits)
    if scratch is None:
        scratch = arena.empty((need,), torch.uint8, align=256)
    torch.ops.exl3.linear(
        y,
        x,
        arena.copy(torch.cat([shard.trellis.reshape(-1) for shard in shards])),
        arena.copy(torch.cat([shard.suh for shard in shards])),
        arena.copy(torch.cat([shard.svh for shard in shards])),
        scratch,
        k,
        [number for shard in shards for number in (shard.n, shard.first, shard.width, shard.rate2)],
        CODEBOOKS.index(shards[0].book),
        splits,
        dependent,
    )
    return scratch


def reconstruct(shard: Shard, dtype: torch.dtype) -> torch.Tensor:
    """[k, n] `dtype`, rotated basis."""

    def call(arena: Arena) -> torch.Tensor:
        w = arena.empty((shard.trellis.shape[0] * 16, shard.n), dtype)
        torch.ops.exl3.reconstruct(w, arena.copy(shard.trellis), shard.rate2, CODEBOOKS.index(shard.book))
        synchronize()
        return w

    return under_both_schedules(call)


def reconstruct_original(
    shard: Shard, dtype: torch.dtype, k: int, first_block: int, columns: int, pad: int
) -> torch.Tensor:
    """[k, columns] `dtype`, original basis, from column 128 * first_block. pad: elements between the rows."""

    def call(arena: Arena) -> torch.Tensor:
        w = arena.empty((k, columns + pad), dtype, align=dtype.itemsize)
        tensors = (arena.copy(tensor) for tensor in (shard.trellis, shard.suh, shard.svh))
        book = CODEBOOKS.index(shard.book)
        torch.ops.exl3.reconstruct_original(w[:, :columns], *tensors, shard.n, first_block, shard.rate2, book)
        synchronize()
        assert w[:, columns:].isnan().all(), "a write between the rows of w"
        return w[:, :columns]

    return under_both_schedules(call)


def hadamard_rows(
    x: torch.Tensor, pre: torch.Tensor | None, post: torch.Tensor | None, n: int, n_out: int, dtype: torch.dtype
) -> torch.Tensor:
    """[m, n_out] `dtype` of `torch.ops.exl3.hadamard` over n columns."""

    def call(arena: Arena) -> torch.Tensor:
        y = arena.empty((x.shape[0], n_out), dtype, align=dtype.itemsize)
        scales = (None if scale is None else arena.copy(scale) for scale in (pre, post))
        torch.ops.exl3.hadamard(y, arena.copy(x, align=x.dtype.itemsize), *scales, n)
        synchronize()
        return y

    return under_both_schedules(call)
