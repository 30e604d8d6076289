# SPDX-License-Identifier: Apache-2.0
"""What an EXL3 linear means, in plain torch on any device: the yardstick of every kernel, and the CPU's way of loading.

    y = had(had(x * suh) @ decode(trellis)) * svh + bias

had is the 128-point Sylvester Hadamard transform of each block of 128 channels, over sqrt(128). The dense equivalent is
W[k, n] = diag(suh) H Wr H diag(svh), Wr being the rotated weight that the trellis decodes to. Everything is worked on a
few million weights at a time, so extra memory does not grow with the matrix. Legacy packed signs are unpacked first, by
`unpack_signs`. This module knows shapes and numbers, nothing of checkpoints or of vLLM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from .codebook import (
    BYTES_BIAS,
    BYTES_SCALE_BITS,
    BYTES_SHIFT_BITS,
    CODEBOOKS,
    HALVES_MASK,
    HALVES_XOR,
    codebook,
    rate_of_tile_words,
)
from .layout import BLOCK, TILE, Span, check_span, positions_by_place, state_starts
from .pools import outside_pools

# Weights decoded at a time: a few arrays of this many 4-byte values stay inside an L2 or L3 cache, which is worth a
# third of the time on a 2-core CPU against 16 times as many; smaller pieces lose it again to the cost of each call.
CHUNK_WEIGHTS = 1 << 20
CPU = torch.device("cpu")
Table = TypeVar("Table")


def _kept(make: Callable[..., Table]) -> Callable[..., Table]:
    """Cache the tables that `make` makes, by its arguments, in ordinary memory of their device.

    Whoever asks first may be inside a memory pool: what is in vLLM's pool of weights is lost when it sleeps.
    """

    @functools.cache
    @functools.wraps(make)
    def kept(*arguments: Hashable) -> Table:
        devices = [one for one in arguments if isinstance(one, torch.device)]
        return outside_pools(devices[0] if devices else CPU, lambda: make(*arguments))

    return kept


@_kept
def value_table(name: str, device: torch.device = CPU) -> torch.Tensor:
    """fp16 [65536] on `device`: the value of every state of codebook `name`."""
    book = CODEBOOKS[name]
    states = torch.arange(1 << 16, dtype=torch.int64)
    x = (states * book.multiplier + book.addend) & 0xFFFFFFFF
    if book.combine == "halves":
        x = (x & HALVES_MASK) ^ HALVES_XOR
        low, high = _fp16_of_bits(x & 0xFFFF), _fp16_of_bits(x >> 16)
        return (low + high).to(device)
    total = (x & 0xFF) + (x >> 8 & 0xFF) + (x >> 16 & 0xFF) + (x >> 24)
    scale, shift = (_fp16_of_bits(torch.tensor([bits])).double() for bits in (BYTES_SCALE_BITS, BYTES_SHIFT_BITS))
    # A product of two fp16 numbers and its sum with a third are exact in float64: rounding once is the fused operation.
    return ((BYTES_BIAS + total).double() * scale + shift).half().to(device)


def _fp16_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """int64 bit patterns 0..65535 as the fp16 numbers they stand for."""
    return torch.where(bits < 1 << 15, bits, bits - (1 << 16)).to(torch.int16).view(torch.float16)


@_kept
def _windows(rate: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each place of a tile, row-major: [256] index of the 16-bit word its state starts in, [256, 1] right shift.

    The shift brings the state to the low end of that word joined with the next one, first word high.
    """
    starts = torch.tensor(state_starts(rate), dtype=torch.int32)[list(positions_by_place())]
    words, bits = starts // 16, starts % 16
    return words.to(device), (16 - bits).unsqueeze(1).to(device)


def decode_rotated(trellis: torch.Tensor, name: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """The rotated weight Wr.

    trellis  [k/16, n/16, 16*K] i16; k and n need only be multiples of 16 here
    name     of the codebook; ValueError if it lacks the rate K
    Returns  [k, n] `dtype`, the fp16 values exactly (for dtypes at least as wide)
    """
    check_trellis(trellis, name)
    k, n = trellis.shape[0] * TILE, trellis.shape[1] * TILE
    out = torch.empty(k, n, dtype=dtype, device=trellis.device)
    for rows, columns in _chunks(trellis):
        out[rows[0] * TILE : rows[1] * TILE, columns[0] * TILE : columns[1] * TILE] = _decode(
            trellis[slice(*rows), slice(*columns)], name, dtype
        )
    return out


def _decode(trellis: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """`decode_rotated` of a piece small enough to do at once."""
    tile_rows, tile_columns, words = trellis.shape
    # Little-endian 32-bit words hold the stream most significant bit first. Beside each word goes the one that starts
    # 16 bits later, so that pairs[:, j] is the 32 stream bits from bit 16*j on, around the ring.
    stream = trellis.reshape(-1, words).contiguous().view(torch.int32)
    late = (stream << 16) | ((stream.roll(-1, 1) >> 16) & 0xFFFF)
    pairs = torch.stack((stream, late), dim=-1).view(-1, words)
    # With tiles innermost each of the 256 places of all tiles is one contiguous run: gather whole runs, not elements.
    index, shift = _windows(rate_of_tile_words(words), trellis.device)
    states = pairs.t().contiguous().index_select(0, index).bitwise_right_shift_(shift).bitwise_and_(0xFFFF)
    values = _table_as(name, dtype, trellis.device).index_select(0, states.view(-1))
    values = values.view(TILE, TILE, tile_rows, tile_columns).permute(2, 0, 3, 1)
    return values.reshape(tile_rows * TILE, tile_columns * TILE)


@_kept
def _table_as(name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`value_table` in another dtype: converting 65,536 values is cheaper than converting a matrix."""
    return value_table(name, device).to(dtype)


def check_trellis(trellis: torch.Tensor, name: str) -> float:
    """The rate of a trellis, or ValueError saying which of rank, dtype and rate is wrong."""
    if trellis.dim() != 3 or trellis.dtype != torch.int16:
        raise ValueError(f"trellis: {trellis.dtype} {list(trellis.shape)}, want torch.int16 [k/16, n/16, 16*K]")
    return codebook(name).check_rate(rate_of_tile_words(trellis.shape[2]))


def _chunks(trellis: torch.Tensor) -> list[tuple[Span, Span]]:
    """Ranges of tile rows and tile columns that cover a trellis in pieces of about CHUNK_WEIGHTS, by whole blocks."""
    tile_rows, tile_columns, _ = trellis.shape
    step = BLOCK // TILE
    wide = max(step, CHUNK_WEIGHTS // (BLOCK * BLOCK) * step)  # at the height of one block
    high = max(step, wide // max(tile_columns, 1) * step)
    return [
        ((row, min(row + high, tile_rows)), (column, min(column + wide, tile_columns)))
        for row in range(0, tile_rows, high)
        for column in range(0, tile_columns, wide)
    ]


@_kept
def hadamard_matrix(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> torch.Tensor:
    """[128, 128] `dtype` of +1 and -1: the Sylvester Hadamard matrix, symmetric, 128 times its own inverse.

    The factor 1/sqrt(128) stays out of it: sums of fp16 values are then all but exact in float32, and a transform on
    both sides costs one exact division by 128.
    """
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix.to(dtype).to(device)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Transform each block of 128 along the last axis of [..., 128*b] float32 or float64; the same shape and dtype."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"hadamard: {x.shape[-1]} channels, want a multiple of {BLOCK}")
    return (x.reshape(-1, BLOCK) @ hadamard_matrix(x.dtype, x.device)).mul_(1 / math.sqrt(BLOCK)).view(x.shape)


def unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    """Legacy `su` or `sv` as the `suh` or `svh` it stands for.

    packed   [c/16] i16: bit b, least significant first, of word j belongs to channel 16*j + b; 1 means -1
    Returns  [c] f16 of +1 and -1
    """
    if packed.dim() != 1 or packed.dtype != torch.int16:
        raise ValueError(f"packed signs: {packed.dtype} {list(packed.shape)}, want torch.int16 [channels/16]")
    bits = packed.unsqueeze(1).to(torch.int32) >> torch.arange(16, dtype=torch.int32, device=packed.device)
    return (1 - 2 * (bits & 1)).to(torch.float16).view(-1)


def check_linear(trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, name: str) -> None:
    """ValueError unless the three tensors of a linear fit each other and the codebook."""
    check_trellis(trellis, name)
    for side, vector, axis in (("suh", suh, 0), ("svh", svh, 1)):
        want = trellis.shape[axis] * TILE
        if tuple(vector.shape) != (want,):
            raise ValueError(f"{side}: {list(vector.shape)}, want [{want}] for a trellis of {list(trellis.shape)}")
        if want % BLOCK:
            raise ValueError(f"{side}: {want} channels, want a multiple of {BLOCK}")


def decode_dense(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    name: str,
    dtype: torch.dtype = torch.float32,
    rows: Span | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dense weight W = diag(suh) H Wr H diag(svh).

    trellis  [k/16, n/16, 16*K] i16;  suh [k] f16;  svh [n] f16
    dtype    of the result; the arithmetic is float32, or float64 if that is asked for
    rows     input channels [start, stop) to decode, on blocks of 128; None: all of them
    out      where to put the result: [k', n'] of any dtype and strides, k' and n' up to the padded sizes; what is
             beyond them is cut off. A transposed view of a weight [n', k'] is filled without another copy.
    Returns  `out`, or a new [rows, n] `dtype`. Extra memory is a few times CHUNK_WEIGHTS values.
    """
    check_linear(trellis, suh, svh, name)
    if rows is not None:
        start, stop = check_span(rows, suh.shape[0], "rows")
        trellis, suh = trellis[start // TILE : stop // TILE], suh[start:stop]
    if out is None:
        out = torch.empty(suh.shape[0], svh.shape[0], dtype=dtype, device=trellis.device)
    elif out.shape[0] > suh.shape[0] or out.shape[1] > svh.shape[0]:
        raise ValueError(f"out: {list(out.shape)}, want at most [{suh.shape[0]}, {svh.shape[0]}]")
    work = torch.float64 if out.dtype == torch.float64 else torch.float32
    matrix = hadamard_matrix(work, trellis.device)
    for (top, bottom), (left, right) in _chunks(trellis):
        inputs, outputs = slice(top * TILE, bottom * TILE), slice(left * TILE, right * TILE)
        target = out[inputs, outputs]
        if not target.numel():
            continue
        piece = _decode(trellis[top:bottom, left:right], name, work)
        width = piece.shape[1]
        piece = (piece.view(-1, BLOCK) @ matrix).view(-1, width).mul_(svh[outputs].to(work))
        signed = matrix * suh[inputs].to(work).div(BLOCK).view(-1, BLOCK, 1)  # [blocks, 128, 128]: diag(suh) H / 128
        piece = torch.bmm(signed, piece.view(-1, BLOCK, width)).view(-1, width)
        target.copy_(piece[: target.shape[0], : target.shape[1]])
    return out


def dense_weight(
    trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, name: str, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """The whole dense weight [k, n] in the original basis, float64 unless float32 is asked for."""
    return decode_dense(trellis, suh, svh, name, dtype)


def forward(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    name: str,
    bias: torch.Tensor | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """y of an EXL3 linear.

    x        [..., k'] of any float dtype, k' up to k: missing channels count as zero
    trellis  [k/16, n/16, 16*K] i16;  suh [k] f16;  svh [n] f16;  bias [n'] of any float dtype, n' up to n, or None
    exact    False: as exllamav3's dense path does it, to the last rounding: x, x * suh and the transform of that are
             each rounded to fp16, all else is float32. True: float64 throughout: what error budgets are measured from.
    Returns  [..., n] float32, or float64 if exact; outputs beyond the true width are noise, the caller's to cut
    """
    check_linear(trellis, suh, svh, name)
    if x.shape[-1] > suh.shape[0]:
        raise ValueError(f"x: {x.shape[-1]} channels, want at most {suh.shape[0]}")
    work = torch.float64 if exact else torch.float32
    step = work if exact else torch.float16  # of the input side
    rows = torch.nn.functional.pad(x.reshape(-1, x.shape[-1]).to(step), (0, suh.shape[0] - x.shape[-1]))
    rotated = hadamard((rows * suh.to(step)).to(work)).to(step).to(work)
    y = rotated.new_zeros(rows.shape[0], svh.shape[0])
    for (top, bottom), (left, right) in _chunks(trellis):
        piece = _decode(trellis[top:bottom, left:right], name, work)
        y[:, left * TILE : right * TILE] += rotated[:, top * TILE : bottom * TILE] @ piece
    y = hadamard(y) * svh.to(work)
    if bias is not None:
        y[:, : bias.shape[0]] += bias.to(work)
    return y.view(*x.shape[:-1], svh.shape[0])
