# SPDX-License-Identifier: Apache-2.0
"""Provider `torch`: the reference mathematics on any device.

On a CPU the weights are decoded once, at load, and a layer is then one dense product.  Elsewhere they are decoded in
every call, which is slow and needs no memory: for comparison, and where no kernels are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import ops
from ..plan import Device, LinearQuery
from ..reference import decode_dense
from . import LinearWeights

name = "torch"
# They can, once its tables are there.  But decoding is a dozen launches for each million weights: dozens of graphs
# would hold millions of them, in gigabytes, to save what is little beside the decoding itself.
for_graphs = False
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    """Nothing to decide but when to decode."""

    query: LinearQuery
    decode_once: bool
    shards: tuple[int, ...]  # n, first, width and 2 * rate of each
    codebooks: tuple[int, ...]  # of each


def installed() -> bool:
    """It needs nothing."""
    return True


def can_run(query: LinearQuery, device: Device) -> tuple[bool, str]:
    """Always, for the dtypes vLLM serves."""
    if query.io_dtype not in DTYPES:
        return False, f"activations are {query.io_dtype}, want one of {', '.join(DTYPES)}"
    return True, ""


def plan(query: LinearQuery, device: Device) -> TorchPlan:
    """Decode once where memory is the host's."""
    codebooks = tuple(ops.CODEBOOK_CODES[shard.codebook] for shard in query.shards)
    return TorchPlan(query=query, decode_once=device.kind == "cpu", shards=query.numbers, codebooks=codebooks)


def prepare(plan: TorchPlan, weights: LinearWeights) -> dict[str, torch.Tensor]:
    """Decode to one dense [out_width, width] matrix, or keep the trellis as it is."""
    if not plan.decode_once:
        return {"trellis": weights.trellis, "suh": weights.suh, "svh": weights.svh}
    query = plan.query
    dense = torch.empty(query.out_width, query.width, dtype=DTYPES[query.io_dtype], device=weights.trellis.device)
    row = 0
    parts = ops.split(weights.trellis, weights.suh, weights.svh, query.k, plan.shards)
    for shard, (trellis, suh, svh, kept) in zip(query.shards, parts, strict=True):
        target = dense[row : row + shard.width].t()  # [width of x, width of the shard]
        if shard.first == 0:
            decode_dense(trellis, suh, svh, shard.codebook, out=target)
        else:  # a cut inside a block: the columns before it are decoded too
            matrix = decode_dense(trellis, suh, svh, shard.codebook, dense.dtype)
            target.copy_(matrix[: query.width, kept])
        row += shard.width
    return {"weight": dense}


def run(plan: TorchPlan, prepared: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """y[m, out_width] from x[m, width]."""
    if plan.decode_once:
        return F.linear(x, prepared["weight"])
    tensors = (prepared["trellis"], prepared["suh"], prepared["svh"])
    return ops.reference_linear(x, *tensors, plan.query.k, list(plan.shards), list(plan.codebooks))
