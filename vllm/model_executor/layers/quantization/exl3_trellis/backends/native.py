# SPDX-License-Identifier: Apache-2.0
"""Provider `native`: this project's CUDA kernels (csrc/exl3), SM80 and newer, every codebook and rate.

Up to `fused_rows` rows one fused product decodes the trellis into tensor core fragments.  Above, up to `many_rows`,
SM90 has a kernel whose warps decode and multiply side by side.  Other cards, and still more rows, decode the weights
once to the original basis and leave the product to the library.  Fused results do not depend on the batch: the cut of a
product over thread blocks follows from the layer and the card alone.
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

name = "native"
for_graphs = True

# Four stages of 32 rows at 8 bits: the most shared memory any fused kernel asks for.
SHARED_BYTES = 98_304
MAX_SHARDS = 8
CHUNK_BYTES = 288 << 20  # of dense weights at a time: 5120 x 27648 in one piece, so that the library's tiles stay many
BLOCKS_PER_SM = 2  # what the registers of the fused kernels allow; more blocks would run in a second wave

EVERY_ROW = 1 << 30
# SM; most rows fused; most rows of SM90's kernel for many; the measurement that chose them.  The first that fits.
CROSSOVERS = (
    ((90, 90), 128, 256, "one H200, where each way was the fastest on average: csrc/exl3/README.md, bench/results"),
    ((80, 999), 128, 0, "not measured: one row tile of the widest kernel, so that each weight is decoded once"),
)

ERROR_LIMITS = {"float32": 1e-3, "float16": 1e-3, "bfloat16": 5e-3}  # relative, of the start-up check
CHECK_ROWS = (1, 12, 24, 48, 80)  # one for each row tile


@dataclass(frozen=True, kw_only=True)
class NativePlan:
    """Everything a call needs besides tensors."""

    query: LinearQuery
    shards: tuple[int, ...]  # n, first, width and 2 * rate of each
    codebook: int
    splits: int
    fused_rows: int
    many_rows: int
    chunk_columns: int
    sm: int
    sms: int


def installed() -> bool:
    """Whether the extension is there."""
    return ops.EXTENSION.is_file()


def can_run(query: LinearQuery, device: Device) -> tuple[bool, str]:
    """SM80 and newer with the extension installed; one codebook and at most eight shards a call."""
    if query.io_dtype not in ERROR_LIMITS:
        return False, f"activations are {query.io_dtype}, want one of {', '.join(ERROR_LIMITS)}"
    codebooks = sorted({shard.codebook for shard in query.shards})
    if len(codebooks) != 1:
        return False, f"one call has the codebooks {' and '.join(codebooks)}, want one"
    if len(query.shards) > MAX_SHARDS:
        return False, f"{len(query.shards)} merged outputs, want at most {MAX_SHARDS}"
    return ops.runs_on(device, SHARED_BYTES)


def plan(query: LinearQuery, device: Device) -> NativePlan:
    """Cut the product for this card."""
    splits = splits_for(query, device)
    rows, many = crossover(device)
    if not query.fused:
        rows, many = 0, 0
    if query.io_dtype == "float32" and many < query.max_rows:  # the library multiplies 16-bit types here
        rows, many = query.max_rows, 0
    return NativePlan(
        query=query,
        shards=query.numbers,
        codebook=ops.CODEBOOK_CODES[query.shards[0].codebook],
        splits=splits,
        fused_rows=min(rows, query.max_rows),
        many_rows=min(many, query.max_rows),
        chunk_columns=chunk_columns(query),
        sm=device.sm,
        sms=device.sms,
    )


def crossover(device: Device) -> tuple[int, int]:
    """The numbers of CROSSOVERS for a card."""
    return next(row[1:3] for row in CROSSOVERS if row[0][0] <= device.sm <= row[0][1])


def chunk_columns(query: LinearQuery) -> int:
    """Columns to decode at a time for many rows: few and equal chunks of the widest shard, within CHUNK_BYTES."""
    widest = max(shard.n for shard in query.shards) // 128
    most = max(1, CHUNK_BYTES // (2 * 128 * query.width))
    return -(-widest // -(-widest // most)) * 128


def splits_for(query: LinearQuery, device: Device) -> int:
    """Thread blocks of a fused product: all that run at once, but none with less than one unit of 128 x 128 weights."""
    units = query.k // 128 * sum(shard.n // 128 for shard in query.shards)
    return min(BLOCKS_PER_SM * device.sms, units)


def prepare(plan: NativePlan, weights: LinearWeights) -> dict[str, torch.Tensor]:
    """The tensors as they are: the kernels read the stored order.  Checks the kernels on this card, once each."""
    for shard in plan.query.shards:
        check_kernels(weights.trellis.device, shard.codebook, shard.rate, plan.query.io_dtype)
    return {"trellis": weights.trellis, "suh": weights.suh, "svh": weights.svh}


def run(plan: NativePlan, prepared: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """y [m, out_width] from x [m, width]."""
    return ops.linear(
        x,
        prepared["trellis"],
        prepared["suh"],
        prepared["svh"],
        plan.query.k,
        list(plan.shards),
        plan.codebook,
        plan.splits,
        plan.fused_rows,
        plan.many_rows,
        plan.chunk_columns,
        plan.sm,
        plan.sms,
    )


@functools.cache
def check_kernels(device: torch.device, codebook: str, rate: float, io_dtype: str) -> None:
    """Compare every kernel a layer of this codebook and rate may reach with the reference, on this very card.

    Raises NoBackendError if one disagrees: a card nobody has tested fails loudly.  Weights are being loaded, so what
    the check works in, and what libraries keep of it, must not lie in their pool.
    """
    outside_pools(device, lambda: _compare(device, codebook, rate, io_dtype))


def _compare(device: torch.device, codebook: str, rate: float, io_dtype: str) -> None:
    one, where = sample(device, codebook, rate, io_dtype, max(CHECK_ROWS)), Device.of(device)
    ways = [(m, m, 0) for m in CHECK_ROWS]
    _, many = crossover(where)
    if many:
        ways.append((max(CHECK_ROWS), 0, EVERY_ROW))
    if io_dtype != "float32":
        ways += [(m, 0, 0) for m in (min(CHECK_ROWS), max(CHECK_ROWS))]
    weights = (one.trellis.view(-1), one.suh, one.svh, one.suh.shape[0], one.shard, ops.CODEBOOK_CODES[codebook])
    for m, fused_rows, many_rows in ways:
        y = ops.linear(one.x[:m], *weights, 5, fused_rows, many_rows, 128, where.sm, where.sms)
        how = "fused" if fused_rows else "many rows" if many_rows else "reconstructed"
        what = f"native: {codebook}, {rate:g} bit, {io_dtype}, {m} rows, {how},"
        self_check(one.error(y), ERROR_LIMITS[io_dtype], what)
