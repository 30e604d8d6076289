# SPDX-License-Identifier: Apache-2.0
"""Provider `exllamav3`: the extension of exllamav3, as an oracle and an eager fallback.

Never inside a CUDA graph, and never on two streams at once: its kernels share one buffer of locks a device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import ops
from ..linear_check import sample
from ..plan import Device, LinearQuery, self_check
from ..pools import outside_pools
from . import LinearWeights
from . import exllamav3_library as library

name = "exllamav3"
for_graphs = False  # and none can
KERNELS = ("exl3_gemm", "reconstruct", "had_r_128")  # what ops.parity_linear calls
CHECK_ROWS = (5, ops.PARITY_ROWS + 1)  # its fused kernel, and the decoded matrix
ERROR_LIMIT = 4e-3  # relative, of the start-up check; rounding to bfloat16 is 1.7e-3 of it


@dataclass(frozen=True, kw_only=True)
class ParityPlan:
    """Which shards, in the extension's terms."""

    query: LinearQuery
    shards: tuple[int, ...]  # n, first, width and 2 * rate of each
    codebook: int


def installed() -> bool:
    """Whether the extension would be found."""
    return library.installed()


def can_run(query: LinearQuery, device: Device) -> tuple[bool, str]:
    """On CUDA, where `exllamav3_ext` can be imported and has the kernels wanted; one codebook a call."""
    if device.kind != "cuda":
        return False, f"runs on CUDA, not on {device.kind}"
    if device.sm < library.MIN_SM:
        return False, f"needs SM{library.MIN_SM} or newer, this card is SM{device.sm}"
    codebooks = sorted({shard.codebook for shard in query.shards})
    if len(codebooks) != 1:
        return False, f"one call has the codebooks {' and '.join(codebooks)}, want one"
    why = library.missing(*KERNELS)
    return not why, why


def plan(query: LinearQuery, device: Device) -> ParityPlan:
    """The shards as they are: the extension chooses how to cut a product itself."""
    return ParityPlan(query=query, shards=query.numbers, codebook=ops.CODEBOOK_CODES[query.shards[0].codebook])


def prepare(plan: ParityPlan, weights: LinearWeights) -> dict[str, torch.Tensor]:
    """The tensors as they are.  Checks the kernels on this card, once for each codebook and rate."""
    for shard in plan.query.shards:
        check_kernels(weights.trellis.device, shard.codebook, shard.rate, plan.query.io_dtype)
    return {"trellis": weights.trellis, "suh": weights.suh, "svh": weights.svh}


def run(plan: ParityPlan, prepared: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """y [m, out_width] from x [m, width]."""
    return ops.parity_linear(
        x, prepared["trellis"], prepared["suh"], prepared["svh"], plan.query.k, list(plan.shards), plan.codebook
    )


@functools.cache
def check_kernels(device: torch.device, codebook: str, rate: float, io_dtype: str) -> None:
    """Compare both ways of a product with the reference, on this very card.

    Raises NoBackendError if one disagrees.  Weights are being loaded, so what the check works in, and what libraries
    keep of it, must not lie in their pool.
    """
    outside_pools(device, lambda: _compare(device, codebook, rate, io_dtype))


def _compare(device: torch.device, codebook: str, rate: float, io_dtype: str) -> None:
    one = sample(device, codebook, rate, io_dtype, max(CHECK_ROWS))
    weights = (one.trellis.view(-1), one.suh, one.svh, one.suh.shape[0], one.shard, ops.CODEBOOK_CODES[codebook])
    for rows in CHECK_ROWS:
        y = ops.parity_linear(one.x[:rows], *weights)
        self_check(one.error(y), ERROR_LIMIT, f"exllamav3: {codebook}, {rate:g} bit, {io_dtype}, {rows} rows,")
