# SPDX-License-Identifier: Apache-2.0
"""Buffers of a call, one after the other in a caller's arena.  Knows shapes and dtypes, not what they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

ALIGNMENT = 256  # bytes, of every buffer

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape and dtype, in order


def layout_bytes(layout: Layout) -> int:
    """Of all buffers, each aligned."""
    return sum(_aligned(_bytes(*each)) for each in layout.values())


def views(layout: Layout, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """The buffers inside an arena of at least `layout_bytes` u8, itself aligned."""
    found, start = {}, 0
    for name, (shape, dtype) in layout.items():
        size = _bytes(shape, dtype)
        found[name] = arena[start : start + size].view(dtype).view(shape)
        start += _aligned(size)
    return found


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
