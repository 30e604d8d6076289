"""Calls of the emulated operators in hostile surroundings, each made under both schedules of the emulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.csrc.emulation import load
from tests.csrc.memory import Arena
from tests.csrc.shards import CODEBOOKS, Shard, same_bytes

BLOCK = 128


def under_both_schedules(call: Callable[[Arena], torch.Tensor], target: str = "warp") -> torch.Tensor:
    """The result of a call, which must not depend on the order in which threads run and copies land."""
    results = []
    for backward in (False, True):
        load(target).schedule(backward)
        arena = Arena()  # must outlive what the call returns
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
    target: str = "warp",
    blocks: int = 0,
) -> torch.Tensor:
    """[m, sum of widths] `dtype` of operator `linear`, or of `linear_many_rows` on so many blocks.

    pad: elements between the rows of x and of y.
    """
    m, columns = x.shape[0], sum(shard.width for shard in shards)

    def call(arena: Arena) -> torch.Tensor:
        y = arena.empty((m, columns + pad), dtype)
        x_wide = arena.empty((m, x.shape[1] + pad), x.dtype, align=x.dtype.itemsize)[:, : x.shape[1]]
        if blocks:
            enqueue_many_rows(arena, y[:, :columns], x_wide.copy_(x), shards, blocks, target)
        else:
            enqueue_linear(arena, y[:, :columns], x_wide.copy_(x), shards, splits, dependent, target=target)
        load(target).synchronize()
        assert y[:, columns:].isnan().all(), "a write between the rows of y"
        return y[:, :columns]

    return under_both_schedules(call, target)


def enqueue_linear(
    arena: Arena,
    y: torch.Tensor,
    x: torch.Tensor,
    shards: Sequence[Shard],
    splits: int,
    dependent: bool,
    scratch: torch.Tensor | None = None,
    target: str = "warp",
) -> torch.Tensor:
    """Launches without waiting, x as it lies; returns the scratch, one made for the purpose unless given."""
    k, blocks = shards[0].k, sum(shard.n for shard in shards) // BLOCK
    ops = load(target).ops
    need = ops.linear_scratch_bytes(x.shape[0], k, blocks, len(shards), splits)
    if scratch is None:
        scratch = arena.empty((need,), torch.uint8, align=256)
    ops.linear(y, x, *_weights(arena, shards), scratch, k, *_numbers(shards), splits, dependent)
    return scratch


def enqueue_many_rows(
    arena: Arena, y: torch.Tensor, x: torch.Tensor, shards: Sequence[Shard], blocks: int, target: str
) -> None:
    """Launches without waiting, as on a card of `blocks` multiprocessors."""
    ops, k = load(target).ops, shards[0].k
    need = ops.many_rows_scratch_bytes(x.shape[0], k, len(shards), blocks)
    scratch = arena.empty((need,), torch.uint8, align=256)
    ops.linear_many_rows(y, x, *_weights(arena, shards), scratch, k, *_numbers(shards), blocks)


def _weights(arena: Arena, shards: Sequence[Shard]) -> list[torch.Tensor]:
    """Trellises, suh and svh, each end to end."""
    names = ("trellis", "suh", "svh")
    return [arena.copy(torch.cat([getattr(shard, name).reshape(-1) for shard in shards])) for name in names]


def _numbers(shards: Sequence[Shard]) -> tuple[list[int], int]:
    """The operators' arguments `shards` and `codebook`."""
    numbers = [number for shard in shards for number in (shard.n, shard.first, shard.width, shard.rate2)]
    return numbers, CODEBOOKS.index(shards[0].book)


def reconstruct(shard: Shard, dtype: torch.dtype) -> torch.Tensor:
    """[k, n] `dtype`, rotated basis."""

    def call(arena: Arena) -> torch.Tensor:
        w = arena.empty((shard.trellis.shape[0] * 16, shard.n), dtype)
        load("warp").ops.reconstruct(w, arena.copy(shard.trellis), shard.rate2, CODEBOOKS.index(shard.book))
        load("warp").synchronize()
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
        load("warp").ops.reconstruct_original(w[:, :columns], *tensors, shard.n, first_block, shard.rate2, book)
        load("warp").synchronize()
        assert w[:, columns:].isnan().all(), "a write between the rows of w"
        return w[:, :columns]

    return under_both_schedules(call)


def hadamard_rows(
    x: torch.Tensor, pre: torch.Tensor | None, post: torch.Tensor | None, n: int, n_out: int, dtype: torch.dtype
) -> torch.Tensor:
    """[m, n_out] `dtype` of operator `hadamard` over n columns."""

    def call(arena: Arena) -> torch.Tensor:
        y = arena.empty((x.shape[0], n_out), dtype, align=dtype.itemsize)
        scales = (None if scale is None else arena.copy(scale) for scale in (pre, post))
        load("warp").ops.hadamard(y, arena.copy(x, align=x.dtype.itemsize), *scales, n)
        load("warp").synchronize()
        return y

    return under_both_schedules(call)
