# SPDX-License-Identifier: Apache-2.0
"""A small random linear and what the reference makes of it: what a provider's kernels are compared with at start.

Its sizes straddle the kernels' tiles, and fewer channels come in than the trellis has rows.  Milliseconds.  No vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import trellis_shape
from .reference import forward

K, N, WIDTH = 384, 256, 380


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One shard, rows for it, and what they make."""

    trellis: torch.Tensor  # [K/16, N/16, 16*rate] i16
    suh: torch.Tensor  # [K] f16
    svh: torch.Tensor  # [N] f16
    x: torch.Tensor  # [rows, WIDTH] of the activations' dtype
    truth: torch.Tensor  # [rows, N] f32
    shard: list[int]  # n, first, width and 2 * rate

    def error(self, y: torch.Tensor) -> float:
        """|y - truth| / |truth| of the first rows, as many as y has."""
        truth = self.truth[: y.shape[0]]
        return float((y.float() - truth).norm() / truth.norm())


def sample(device: torch.device, codebook: str, rate: float, io_dtype: str, rows: int) -> Sample:
    """Drawn from a fixed seed, the same for every provider."""
    seed = torch.Generator().manual_seed(7)
    words = torch.randint(-(1 << 15), 1 << 15, trellis_shape(K, N, rate), generator=seed)
    trellis = words.to(torch.int16).to(device)
    suh = (0.5 + torch.rand(K, generator=seed)).half().to(device)
    svh = (0.5 + torch.rand(N, generator=seed)).half().to(device)
    x = torch.randn(rows, WIDTH, generator=seed).to(getattr(torch, io_dtype)).to(device)
    truth = forward(x.float(), trellis, suh, svh, codebook)
    return Sample(trellis=trellis, suh=suh, svh=svh, x=x, truth=truth, shard=[N, 0, N, round(2 * rate)])
