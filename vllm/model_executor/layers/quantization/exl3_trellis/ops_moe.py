# SPDX-License-Identifier: Apache-2.0
"""The operators of routed experts in the compiled extension (csrc/exl3/moe.h), and their only caller.

`exl3::moe` writes y and changes the arena; nothing else. vLLM's own operator around a layer's experts is opaque to
torch.compile already, so this one needs no fake implementation. Knows numbers and tensors, not what chose them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_SLICES, MAX_EXPERTS, MAX_ROUTES = 8, 2048, 1 << 24
# vLLM's name of an activation with a gate -> its number.
ACTIVATIONS = {
    "silu": 0,
    "swigluoai": 0,
    "swigluoai_uninterleave": 0,
    "swiglustep": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu2": 4,
}
SLICE_TENSORS = ("w13_trellis", "w13_suh", "w13_svh", "w2_trellis", "w2_suh", "w2_svh")  # in the operator's order


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a layer is, in the operator's order."""

    k: int
    hidden: int
    width: int
    intermediate: int
    experts: int
    top_k: int
    codebook: int
    max_rate2: int  # twice the highest rate of any expert
    shared_h: bool
    weight_on_input: bool
    activation: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How its work is cut, in the operator's order."""

    decode: bool  # the kernels for few rows
    row_tile: int  # routes of one expert that are multiplied at once: 8 to decode, else 16, 32, 64, 128 or 256
    parts: int  # into which the depth of gate and up is cut
    window: int  # routes of one pass of gate and up
    down_columns: int  # columns of y of one pass of down
    grid: int  # thread blocks that run at once
    pairs: bool  # two column blocks at once in blocks of 64 and 128 rows, where a matrix has an even number (SM90)


def _numbers(of: Sizes | Cut) -> list[int]:
    return [int(number) for number in vars(of).values()]  # on every call, so nothing is copied


def arena_bytes(rows: int, slices: int, sizes: Sizes, cut: Cut) -> int:
    """Bytes of the arena for calls of up to `rows` rows, as csrc/exl3/moe_layout.cuh lays it out."""
    return torch.ops.exl3.moe_arena_bytes(rows, slices, _numbers(sizes), _numbers(cut))


def moe(
    y: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    slices: Sequence[torch.Tensor],
    sizes: Sizes,
    cut: Cut,
    numbers: tuple[float, float, float],
    dependent: bool,
) -> None:
    """Write y [m, hidden] from x [m, hidden], topk_weights [m, top_k] f32 and topk_ids [m, top_k] i32 or i64.

    Args:
        y: written whole.
        x: of y's dtype.
        topk_weights: contiguous.
        topk_ids: contiguous; what is not the number of an expert is nobody's.
        arena: [arena_bytes] u8, aligned to 256 bytes.
        table: [3, experts] i64: gate, up, down: the expert's first byte in its slab, times 32, plus 2K.
        slices: SLICE_TENSORS of each slice.
        sizes: the layer.
        cut: of the work.
        numbers: limit, alpha and beta of the activation; infinity where there is no limit.
        dependent: let the kernels of the call overlap (SM90 and newer).
    """
    torch.ops.exl3.moe(
        y, x, topk_weights, topk_ids, arena, table, list(slices), _numbers(sizes), _numbers(cut), *numbers, dependent
    )
