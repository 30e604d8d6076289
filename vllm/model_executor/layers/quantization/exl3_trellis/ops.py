# SPDX-License-Identifier: Apache-2.0
"""The torch operators of EXL3, and the only caller of compiled code.

`exl3_trellis::linear`, `parity_linear` and `reference_linear` are what layers call: functional, with fake
implementations, so that torch.compile sees one opaque node and CUDA graphs capture what it launches.  Underneath lie
the operators of the compiled extension (csrc/exl3, namespace `exl3`), which write into buffers given to them.  Without
the extension this module imports all the same; `load()` says why it is missing.

Scratch memory is taken from torch's allocator for one call and given back with it, as any temporary tensor is: every
stream, graph and engine gets its own, nothing outlives a call, and a captured graph's lies in the graph's pool.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .reference import forward

if TYPE_CHECKING:
    from .plan import Device

MIN_SM = 80  # mma.sync m16n8k16 and cp.async
EXTENSION = Path(__file__).with_name("_exl3_C.abi3.so")
CODEBOOK_CODES = {"3inst": 0, "mcg": 1, "mul1": 2}
SHARD_INTS = 4  # n, first, width, 2 * rate
ROW_TILES = (8, 16, 32, 64, 128)  # rows of x the fused kernels take at once; the last may repeat
MANY_TILE = 256  # rows of SM90's kernel for many rows
MANY_SLICE = 2048  # most rows of one call of it, which bounds its scratch
PARITY_ROWS = 144  # most that exllamav3 gives its fused kernel, whose trials of itself take minutes at thousands


@functools.cache
def load() -> tuple[bool, str]:
    """Load the compiled extension once: (True, "") or (False, why not)."""
    if not hasattr(torch.ops.exl3, "linear"):
        if not EXTENSION.is_file():
            return False, f"{EXTENSION.name} is not installed: the wheel was built without csrc/exl3"
        try:
            torch.ops.load_library(str(EXTENSION))
        except OSError as error:
            return False, f"{EXTENSION.name} does not load: {error}"
    return True, ""


def runs_on(device: Device, shared_bytes: int) -> tuple[bool, str]:
    """Whether the extension's kernels run there: (True, "") or (False, why not).

    shared_bytes: the most shared memory that a thread block of them asks for.
    """
    if device.kind != "cuda":
        return False, f"runs on CUDA, not on {device.kind}"
    if device.sm < MIN_SM:
        return False, f"needs SM{MIN_SM} or newer, this card is SM{device.sm}"
    if device.smem < shared_bytes:
        return False, f"needs {shared_bytes} bytes of shared memory a block, this card has {device.smem}"
    return load()


def row_tile(rows: int) -> int:
    """Rows of the fused kernel that serves `rows` rows."""
    return next((tile for tile in ROW_TILES if tile >= rows), ROW_TILES[-1])


def fused_scratch_bytes(rows: int, k: int, columns: int, shards: int, splits: int) -> int:
    """Scratch of one fused call, as csrc/exl3/mma.cuh lays it out: rotated inputs, then partial sums.

    rows, k and columns are the call's rows, the depth and the columns of all `shards` trellises together.
    """
    tile = row_tile(rows)
    tiles = -(-rows // tile)
    return tiles * tile * (shards * k * 2 + (splits + columns // 128) * 128 * 4)


def many_scratch_bytes(rows: int, k: int, shards: int, sms: int) -> int:
    """Scratch of one call for many rows on SM90, as csrc/exl3/wide.cu lays it out: rotated inputs, partial sums."""
    tiles = -(-min(rows, MANY_SLICE) // MANY_TILE)
    return MANY_TILE * (shards * tiles * k * 2 + 2 * sms * 128 * 4)


def dense_scratch_bytes(width: int, shards: list[int], chunk_columns: int, item: int = 2) -> int:
    """Scratch of a call that decodes to the original basis: one chunk of the matrix, `item` bytes an element."""
    return width * min(chunk_columns, max(shards[0::SHARD_INTS])) * item


def scratch(x: torch.Tensor, size: int) -> torch.Tensor:
    """`size` bytes for one call, beside x.  No longer held when the call returns, though the card may still use them:
    what takes their place runs on the same stream.
    """
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def _linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    k: int,
    shards: list[int],
    codebook: int,
    splits: int,
    fused_rows: int,
    many_rows: int,
    chunk_columns: int,
    sm: int,
    sms: int,
) -> torch.Tensor:
    """y [m, sum of widths] of x's dtype from x [m, k'], k' <= k.

    trellis, suh and svh hold the shards end to end; shards has SHARD_INTS integers each.  Up to `fused_rows` rows run
    fused and up to `many_rows` by SM90's kernel for many rows; more decode `chunk_columns` columns at a time to the
    original basis and leave the product to the library.
    """
    m = x.shape[0]
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = x.new_empty(m, sum(shards[2::SHARD_INTS]))
    weights, count = (trellis, suh, svh), len(shards) // SHARD_INTS
    if m <= fused_rows:
        size = fused_scratch_bytes(m, k, sum(shards[0::SHARD_INTS]), count, splits)
        buffer = scratch(x, size)
        torch.ops.exl3.linear(y, x, *weights, buffer, k, shards, codebook, splits, sm >= 90)
    elif m <= many_rows:
        buffer = scratch(x, many_scratch_bytes(m, k, count, sms))
        for rows, out in zip(x.split(MANY_SLICE), y.split(MANY_SLICE), strict=True):
            torch.ops.exl3.linear_many_rows(out, rows, *weights, buffer, k, shards, codebook, sms)
    else:
        _dense(y, x, weights, k, shards, codebook, chunk_columns)
    return y


def _dense(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    k: int,
    shards: list[int],
    codebook: int,
    chunk_columns: int,
) -> None:
    buffer = scratch(x, dense_scratch_bytes(x.shape[1], shards, chunk_columns, x.element_size()))
    out = 0
    for tiles, suh, svh, kept in split(*weights, k, shards):
        n, rate2 = svh.shape[0], tiles.shape[2] // 8
        for start in range(kept.start // 128 * 128, kept.stop, chunk_columns):
            columns = min(chunk_columns, n - start)
            dense = buffer[: x.shape[1] * columns * x.element_size()].view(x.dtype).view(x.shape[1], columns)
            torch.ops.exl3.reconstruct_original(dense, tiles.view(-1), suh, svh, n, start // 128, rate2, codebook)
            left, right = max(kept.start, start), min(kept.stop, start + columns)
            into = y[:, out + left - kept.start : out + right - kept.start]
            torch.mm(x, dense[:, left - start : right - start], out=into)
        out += kept.stop - kept.start


def _parity_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    k: int,
    shards: list[int],
    codebook: int,
) -> torch.Tensor:
    """The same product as exllamav3 computes it, a shard at a time.

    Raises RuntimeError during graph capture: its first call for a shape measures, which allocates and synchronizes.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("backend exllamav3 cannot be captured into a CUDA graph: use --enforce-eager")
    a = torch.nn.functional.pad(x.half(), (0, k - x.shape[1])).contiguous()
    outputs = [
        _parity_product(a, tiles, left, right, codebook)[:, kept]
        for tiles, left, right, kept in split(trellis, suh, svh, k, shards)
    ]
    return torch.cat(outputs, dim=1).to(x.dtype)


def split(
    trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, k: int, shards: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]]:
    """Of each shard: views of its trellis [k/16, n/16, 16*rate], suh [k] and svh [n], and the columns that are kept."""
    words, column = 0, 0
    for index in range(len(shards) // SHARD_INTS):
        n, first, width, rate2 = shards[SHARD_INTS * index : SHARD_INTS * (index + 1)]
        size = k * n // 256 * 8 * rate2
        tiles = trellis[words : words + size].view(k // 16, n // 16, 8 * rate2)
        yield tiles, suh[k * index : k * (index + 1)], svh[column : column + n], slice(first, first + width)
        words, column = words + size, column + n


def _reference_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    k: int,
    shards: list[int],
    codebooks: list[int],
) -> torch.Tensor:
    """The same product by the reference, which decodes the weights anew; each shard has a codebook of its own.

    An operator because of the reference's tables: what makes them starts a thread, which torch.compile cannot trace.
    The first call for a rate makes them, and waits for the device; every other call only launches kernels, so after
    vLLM's first run a CUDA graph can hold it.
    """
    names = {code: name for name, code in CODEBOOK_CODES.items()}
    parts = zip(split(trellis, suh, svh, k, shards), codebooks, strict=True)
    outputs = [forward(x, tiles, left, right, names[code])[:, kept] for (tiles, left, right, kept), code in parts]
    return torch.cat(outputs, dim=1).to(x.dtype)


def _parity_product(
    a: torch.Tensor, tiles: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: int
) -> torch.Tensor:
    """[m, n] f32 from a [m, k] f16 and tiles [k/16, n/16, 16*rate]; many rows by way of the decoded matrix."""
    import exllamav3_ext

    n, book, rotated = svh.shape[0], (codebook == 1, codebook == 2), torch.empty_like(a)
    if a.shape[0] <= PARITY_ROWS:
        c = torch.empty(a.shape[0], n, dtype=torch.float32, device=a.device)
        exllamav3_ext.exl3_gemm(a, tiles, c, suh, rotated, svh, -1, *book, 0)
        return c
    dense = torch.empty(a.shape[1], n, dtype=torch.float16, device=a.device)
    exllamav3_ext.reconstruct(dense, tiles, tiles.shape[2] / 16, *book)
    exllamav3_ext.had_r_128(a, rotated, suh, None, 1.0)
    c = torch.mm(rotated, dense, out_dtype=torch.float32)
    exllamav3_ext.had_r_128(c, c, None, svh, 1.0)
    return c


def _fake(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    k: int,
    shards: list[int],
    *rest: object,
) -> torch.Tensor:
    """Shape and dtype of every operator's result."""
    return x.new_empty(x.shape[0], sum(shards[2::SHARD_INTS]))


_TENSORS = "Tensor x, Tensor trellis, Tensor suh, Tensor svh, int k, int[] shards"
_NUMBERS = "int splits, int fused_rows, int many_rows, int chunk_columns, int sm, int sms"
_library = torch.library.Library("exl3_trellis", "FRAGMENT")
if not hasattr(torch.ops.exl3_trellis, "linear"):
    for _name, _schema, _run, _devices in (
        ("linear", f"{_TENSORS}, int codebook, {_NUMBERS}", _linear, ("CUDA",)),
        ("parity_linear", f"{_TENSORS}, int codebook", _parity_linear, ("CUDA",)),
        ("reference_linear", f"{_TENSORS}, int[] codebooks", _reference_linear, ("CUDA", "CPU")),
    ):
        _library.define(f"{_name}({_schema}) -> Tensor")
        for _device in _devices:
            _library.impl(_name, _run, _device)
        torch.library.register_fake(f"exl3_trellis::{_name}", _fake, lib=_library)

linear = torch.ops.exl3_trellis.linear
parity_linear = torch.ops.exl3_trellis.parity_linear
reference_linear = torch.ops.exl3_trellis.reference_linear
