# SPDX-License-Identifier: Apache-2.0
"""The torch operators of EXL3, and the only caller of compiled code.

`exl3_trellis::linear` and `exl3_trellis::parity_linear` are what layers call: functional, with fake implementations, so
that torch.compile sees one opaque node and CUDA graphs capture what it launches.  Underneath lie the operators of the
compiled extension (csrc/exl3, namespace `exl3`), which write into buffers given to them.  Without the extension this
module imports all the same; `load()` says why it is missing.

Scratch memory belongs to the stream that uses it: two streams never share one, and one stream runs one call at a time.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

EXTENSION = Path(__file__).with_name("_exl3_C.abi3.so")
CODEBOOK_CODES = {"3inst": 0, "mcg": 1, "mul1": 2}
SHARD_INTS = 4  # n, first, width, 2 * rate
ROW_TILES = (8, 16, 32, 64, 128)  # rows of x the fused kernels take at once; the last may repeat


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


_buffers: dict[tuple[int, int], list[torch.Tensor]] = {}
_reserved: dict[int, int] = {}


def reserve(device: torch.device, size: int) -> None:
    """Say that calls on `device` may need `size` bytes of scratch, before the first of them."""
    index = device.index or 0
    _reserved[index] = max(size, _reserved.get(index, 0))


def scratch(device: torch.device, size: int) -> torch.Tensor:
    """At least `size` bytes that belong to the current stream of `device`.

    Allocated once per stream at the largest size reserved.  A later, larger demand keeps the old buffer alive beside
    the new one: graphs captured before hold its address.
    """
    key = (device.index or 0, torch.cuda.current_stream(device).cuda_stream)
    held = _buffers.setdefault(key, [])
    if not held or held[-1].numel() < size:
        held.append(torch.empty(max(size, _reserved.get(key[0], 0)), dtype=torch.uint8, device=device))
    return held[-1]


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
    chunk_columns: int,
) -> torch.Tensor:
    """y [m, sum of widths] of x's dtype from x [m, k'], k' <= k.

    trellis, suh and svh hold the shards end to end; shards has SHARD_INTS integers each.  Up to `fused_rows` rows run
    fused; more decode `chunk_columns` columns at a time to the original basis and leave the product to the library.
    """
    m = x.shape[0]
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = x.new_empty(m, sum(shards[2::SHARD_INTS]))
    if m <= fused_rows:
        columns = sum(shards[0::SHARD_INTS])
        size = fused_scratch_bytes(m, k, columns, len(shards) // SHARD_INTS, splits)
        dependent = torch.cuda.get_device_capability(x.device)[0] >= 9
        torch.ops.exl3.linear(y, x, trellis, suh, svh, scratch(x.device, size), k, shards, codebook, splits, dependent)
    else:
        _many_rows(y, x, (trellis, suh, svh), k, shards, codebook, chunk_columns)
    return y


def many_rows_scratch_bytes(width: int, shards: list[int], chunk_columns: int, item: int = 2) -> int:
    """Scratch of a call of many rows: one chunk of the dense matrix, `item` bytes an element."""
    return width * min(chunk_columns, max(shards[0::SHARD_INTS])) * item


def _many_rows(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    k: int,
    shards: list[int],
    codebook: int,
    chunk_columns: int,
) -> None:
    trellis, suh, svh = weights
    buffer = scratch(x.device, many_rows_scratch_bytes(x.shape[1], shards, chunk_columns, x.element_size()))
    words, column, out = 0, 0, 0
    for index in range(len(shards) // SHARD_INTS):
        n, first, width, rate2 = shards[SHARD_INTS * index : SHARD_INTS * (index + 1)]
        size = k * n // 256 * 8 * rate2
        for start in range(first // 128 * 128, first + width, chunk_columns):
            columns = min(chunk_columns, n - start)
            dense = buffer[: x.shape[1] * columns * x.element_size()].view(x.dtype).view(x.shape[1], columns)
            torch.ops.exl3.reconstruct_original(
                dense,
                trellis[words : words + size],
                suh[k * index : k * (index + 1)],
                svh[column : column + n],
                n,
                start // 128,
                rate2,
                codebook,
            )
            left, right = max(first, start), min(first + width, start + columns)
            into = y[:, out + left - first : out + right - first]
            torch.mm(x, dense[:, left - start : right - start], out=into)
        words, column, out = words + size, column + n, out + width


def _linear_fake(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    k: int,
    shards: list[int],
    codebook: int,
    splits: int,
    fused_rows: int,
    chunk_columns: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], sum(shards[2::SHARD_INTS]))


def _parity_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    k: int,
    shards: list[int],
    codebook: int,
) -> torch.Tensor:
    """The same product by exllamav3's own kernel, one call a shard, fp32 accumulators written out.

    Raises RuntimeError during graph capture: its first call for a shape measures, which allocates and synchronizes.
    """
    import exllamav3_ext

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("backend exllamav3 cannot be captured into a CUDA graph: use --enforce-eager")
    a = torch.nn.functional.pad(x.half(), (0, k - x.shape[1])).contiguous()
    rotated, outputs, words, column = torch.empty_like(a), [], 0, 0
    for index in range(len(shards) // SHARD_INTS):
        n, first, width, rate2 = shards[SHARD_INTS * index : SHARD_INTS * (index + 1)]
        size = k * n // 256 * 8 * rate2
        tiles = trellis[words : words + size].view(k // 16, n // 16, 8 * rate2)
        c = torch.empty(x.shape[0], n, dtype=torch.float32, device=x.device)
        suh_of, svh_of = suh[k * index : k * (index + 1)], svh[column : column + n]
        exllamav3_ext.exl3_gemm(a, tiles, c, suh_of, rotated, svh_of, -1, codebook == 1, codebook == 2, 0)
        outputs.append(c[:, first : first + width])
        words, column = words + size, column + n
    return torch.cat(outputs, dim=1).to(x.dtype)


def _parity_linear_fake(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    k: int,
    shards: list[int],
    codebook: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], sum(shards[2::SHARD_INTS]))


_TENSORS = "Tensor x, Tensor trellis, Tensor suh, Tensor svh, int k, int[] shards, int codebook"
_library = torch.library.Library("exl3_trellis", "FRAGMENT")
if not hasattr(torch.ops.exl3_trellis, "linear"):
    _library.define(f"linear({_TENSORS}, int splits, int fused_rows, int chunk_columns) -> Tensor")
    _library.define(f"parity_linear({_TENSORS}) -> Tensor")
    _library.impl("linear", _linear, "CUDA")
    _library.impl("parity_linear", _parity_linear, "CUDA")
    torch.library.register_fake("exl3_trellis::linear", _linear_fake, lib=_library)
    torch.library.register_fake("exl3_trellis::parity_linear", _parity_linear_fake, lib=_library)

linear = torch.ops.exl3_trellis.linear
parity_linear = torch.ops.exl3_trellis.parity_linear
