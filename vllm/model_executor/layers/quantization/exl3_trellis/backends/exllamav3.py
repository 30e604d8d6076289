# SPDX-License-Identifier: Apache-2.0
"""Provider `exllamav3`: the extension of exllamav3, as an oracle and an eager fallback.

Never inside a CUDA graph, and never on two streams at once: its kernels share one buffer of locks a device.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import ops
from ..plan import Device, LinearQuery
from . import LinearWeights

name = "exllamav3"
for_graphs = False  # and none can
MIN_SM = 80


@dataclass(frozen=True, kw_only=True)
class ParityPlan:
    """Which shards, in the extension's terms."""

    query: LinearQuery
    shards: tuple[int, ...]  # n, first, width and 2 * rate of each
    codebook: int


def installed() -> bool:
    """Whether the extension would be found."""
    return importlib.util.find_spec("exllamav3_ext") is not None


def can_run(query: LinearQuery, device: Device) -> tuple[bool, str]:
    """On CUDA, where `exllamav3_ext` can be imported; one codebook a call."""
    if device.kind != "cuda":
        return False, f"runs on CUDA, not on {device.kind}"
    if device.sm < MIN_SM:
        return False, f"needs SM{MIN_SM} or newer, this card is SM{device.sm}"
    codebooks = sorted({shard.codebook for shard in query.shards})
    if len(codebooks) != 1:
        return False, f"one call has the codebooks {' and '.join(codebooks)}, want one"
    if importlib.util.find_spec("exllamav3_ext") is None:
        return False, "the module exllamav3_ext is not installed"
    return True, ""


def plan(query: LinearQuery, device: Device) -> ParityPlan:
    """Turn off the extension's int8 and GEMV shortcuts, which deviate from the format's arithmetic."""
    os.environ.setdefault("EXL3_INT8_GEMV", "0")
    os.environ.setdefault("EXL3_GEMV", "0")
    shards: list[int] = []
    for shard in query.shards:
        shards += (shard.n, shard.first, shard.width, round(2 * shard.rate))
    return ParityPlan(query=query, shards=tuple(shards), codebook=ops.CODEBOOK_CODES[query.shards[0].codebook])


def prepare(plan: ParityPlan, weights: LinearWeights) -> dict[str, torch.Tensor]:
    """The tensors as they are."""
    return {"trellis": weights.trellis, "suh": weights.suh, "svh": weights.svh}


def run(plan: ParityPlan, prepared: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """y [m, out_width] from x [m, width]."""
    return ops.parity_linear(
        x, prepared["trellis"], prepared["suh"], prepared["svh"], plan.query.k, list(plan.shards), plan.codebook
    )
