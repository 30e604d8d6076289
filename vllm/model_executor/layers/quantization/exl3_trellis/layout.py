# SPDX-License-Identifier: Apache-2.0
"""Where things are inside EXL3 tensors: tiles, the bit ring, and cuts by channel. Shapes and indices only.

    key.trellis  # [k/16, n/16, 16*K] i16   one 16x16 tile of the rotated weight [k, n] per entry
    key.suh      # [k] f16                  input sign and scale      (legacy key.su: [k/16] i16, packed signs)
    key.svh      # [n] f16                  output sign and scale     (legacy key.sv: [n/16] i16, packed signs)

k (inputs) and n (outputs) are padded to multiples of 128, the length of a Hadamard block: a cut anywhere else would
split a block, so every cut here is checked to fall on one. This module imports neither torch nor vLLM, and does not
know what a module is called.
"""

from __future__ import annotations

from dataclasses import dataclass

from .codebook import tile_words

TILE = 16  # rows and columns of a tile
TILE_VALUES = TILE * TILE  # 256 positions on the ring of a tile
BLOCK = 128  # one Hadamard block; both channel counts are padded to it
STATE_BITS = 16  # a state is a window of this many ring bits

Span = tuple[int, int]  # channels [start, stop)

# Tensor kind -> (axis of the inputs, axis of the outputs, channels one entry covers). None: the kind lacks that axis.
AXES: dict[str, tuple[int | None, int | None, int]] = {
    "trellis": (0, 1, TILE),
    "suh": (0, None, 1),
    "su": (0, None, TILE),
    "svh": (None, 0, 1),
    "sv": (None, 0, TILE),
    "bias": (None, 0, 1),
}


def padded(channels: int) -> int:
    """`channels` rounded up to whole Hadamard blocks."""
    return -(-channels // BLOCK) * BLOCK


def tiles(channels: int) -> int:
    """Tiles along an axis of `channels` true channels, padding included."""
    return padded(channels) // TILE


def trellis_shape(k: int, n: int, rate: float) -> tuple[int, int, int]:
    """Shape of the int16 trellis of a linear of k true inputs and n true outputs at `rate` bits a weight."""
    return tiles(k), tiles(n), tile_words(rate)


def position_bits(rate: float) -> tuple[int, ...]:
    """D(i): how many new ring bits position i adds, for i in 0..255. Half rates alternate floor(K), floor(K) + 1."""
    tile_words(rate)  # refuses rates no codebook has
    low = int(rate)
    high = low if rate == low else low + 1
    return tuple(high if i % 2 else low for i in range(TILE_VALUES))


def state_starts(rate: float) -> tuple[int, ...]:
    """First ring bit of the 16-bit state of each position 0..255: S(i) - 16 modulo the ring's 256*K bits."""
    ring = tile_words(rate) * 16
    starts, end = [], 0
    for bits in position_bits(rate):
        end += bits
        starts.append((end - STATE_BITS) % ring)
    return tuple(starts)


def place(position: int) -> tuple[int, int]:
    """(row, column) inside the tile of ring position 0..255.

    Lane t = position // 8 of an m16n8k16 B fragment owns positions 8t..8t+7, so a warp decodes straight into
    tensor-core registers.
    """
    lane, j = position >> 3, position & 7
    row = (lane & 3) * 2 + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * ((j >> 2) & 1)
    return row, column


def positions_by_place() -> tuple[int, ...]:
    """The inverse of `place`: entry 16*row + column is the ring position stored there."""
    order = [0] * TILE_VALUES
    for position in range(TILE_VALUES):
        row, column = place(position)
        order[row * TILE + column] = position
    return tuple(order)


def check_span(span: Span, channels: int, what: str = "channels") -> Span:
    """Return `span`, or raise ValueError unless it is a non-empty range of whole blocks inside `channels`."""
    start, stop = span
    if start % BLOCK or stop % BLOCK or not 0 <= start < stop <= channels:
        raise ValueError(f"{what} [{start}, {stop}) of {channels}: want a non-empty range of whole blocks of {BLOCK}")
    return span


def window(kind: str, inputs: Span | None = None, outputs: Span | None = None) -> tuple[slice, ...]:
    """Index that cuts input and output channels out of a tensor of `kind` (a key of AXES); None keeps an axis whole.

    Works on torch tensors and on safetensors slices alike. An axis that the kind lacks is ignored, so one pair of spans
    cuts every tensor of a linear. ValueError if a span does not fall on blocks; upper bounds are the caller's to check.
    """
    input_axis, output_axis, step = AXES[kind]
    cuts: dict[int, slice] = {}
    for axis, span, what in ((input_axis, inputs, "inputs"), (output_axis, outputs, "outputs")):
        if axis is not None and span is not None:
            start, stop = check_span(span, span[1], what)
            cuts[axis] = slice(start // step, stop // step)
    return tuple(cuts.get(axis, slice(None)) for axis in range(max(cuts, default=-1) + 1))


def shard_span(channels: int, shards: int, shard: int) -> Span:
    """Padded channels that tensor-parallel shard `shard` of `shards` owns, of `channels` true ones.

    One shard owns all, padding included. Several must each own the same number of whole blocks, else ValueError.
    """
    if shards == 1:
        return 0, padded(channels)
    if channels % (shards * BLOCK):
        raise ValueError(f"{channels} channels over {shards} shards: each needs the same number of blocks of {BLOCK}")
    size = channels // shards
    return shard * size, (shard + 1) * size


@dataclass(frozen=True, kw_only=True)
class RankSlice:
    """What one tensor-parallel rank takes of one stored rank of a rank-sliced expert.

    stored_rank   which `.rank{r}` tensors
    span          intermediate channels inside that stored slice: outputs of gate and up, inputs of down
    """

    stored_rank: int
    span: Span


def rank_slices(stored: int, width: int, shards: int, shard: int) -> tuple[RankSlice, ...]:
    """The stored slices, or the part of one, that make up shard `shard` of `shards`.

    `stored` ranks of `width` intermediate channels each are on disk. Fewer shards than ranks: a shard runs several
    slices and sums them, since each was encoded with its own Hadamard blocks. More shards: a slice is cut on blocks.
    ValueError names the shard counts that would work.
    """
    if shards not in legal_shards(stored, width):
        legal = ", ".join(map(str, legal_shards(stored, width)))
        raise ValueError(f"{shards} shards of {stored} stored ranks of {width} channels: want one of {legal}")
    if shards <= stored:
        each = stored // shards
        return tuple(RankSlice(stored_rank=r, span=(0, width)) for r in range(shard * each, (shard + 1) * each))
    parts = shards // stored
    return (RankSlice(stored_rank=shard // parts, span=shard_span(width, parts, shard % parts)),)


def legal_shards(stored: int, width: int) -> tuple[int, ...]:
    """Shard counts that `stored` ranks of `width` channels can serve: divisors of the one, and multiples by block."""
    fewer = [n for n in range(1, stored + 1) if stored % n == 0]
    more = [stored * parts for parts in range(2, width // BLOCK + 1) if width % (parts * BLOCK) == 0]
    return tuple(fewer + more)
