# SPDX-License-Identifier: Apache-2.0
"""Provider `native` of routed experts: this project's grouped kernels (csrc/exl3/moe.h), SM80 and newer.

The decode plan has blocks of eight rows and cuts the depth of gate and up, so that few rows fill the card; the prefill
plan has blocks as high as the routing fills and runs in passes, so that its arena stays small.  Both take every rate,
mixed within a launch: rates and offsets of experts are a table on the device.  Within a plan a row's bytes do not
depend on the rows around it; the two plans round differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .. import ops_moe
from ..expert_check import ROWS, sample
from ..expert_intake import ExpertSlice
from ..layout import BLOCK
from ..ops import CODEBOOK_CODES, runs_on
from ..ops_moe import SLICE_TENSORS, Cut, Sizes
from ..plan import Device, MoeQuery, Window, self_check
from ..slabs import MATRIX, slabs

name = "native"
capturable = True

# The largest prefill kernel at 8 bits: two stages of 128 rows of x and of 128 x 128 weights, and what aligns them. SM90
# has room for weights of twice as many columns.
SHARED_BYTES = 2 * (128 * 256 + 16_384) + 1_024
IO_TYPES = ("float16", "bfloat16", "float32")
BLOCKS_PER_SM = 2  # what the registers of the prefill kernels allow
DECODE_BLOCKS_PER_SM = 4  # and of the decode kernel, if its shared memory does:
DECODE_FIXED_BYTES, DECODE_RATE2_BYTES = 6_224, 3_072  # of a block, and for each half bit of the largest rate
DECODE_BLOCK = 8
PREFILL_TILES = (16, 32, 64, 128)
TALL_TILE = 256  # on SM90
TALL_RATE2 = 8  # twice the rate up to which its products go in steps of 32 rows, above in steps of 128
TALL_ROUTES = 112  # of an average expert of higher rates, above which such a block pays
PASSES = 4  # of gate and up and a slice, at capacity: a quarter of the routes still fills the card
ERROR_LIMIT = 5e-3  # relative, of the start-up check; bfloat16 outputs alone round by 2e-3
LEAST_WINDOW = 2048  # routes of a pass, below which memory is not worth another one


@dataclass(frozen=True, kw_only=True)
class NativeMoePlan:
    """Everything a call needs besides tensors."""

    sizes: Sizes
    cut: Cut  # of the largest call; smaller ones may have lower row tiles
    slices: int
    numbers: tuple[float, float, float]  # limit, alpha and beta of the activation
    dependent: bool
    rows: int
    io_dtype: str
    workspace_bytes: int

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Of the kernels that calls may reach."""
        if self.cut.decode:
            return (self.cut.row_tile,)
        return tuple(tile for tile in _tiles(self.sizes, self.cut.pairs) if tile <= self.cut.row_tile)

    def cut_for(self, rows: int) -> Cut:
        """For a call of so many rows."""
        if self.cut.decode:
            return self.cut
        average = rows * self.sizes.top_k / self.sizes.experts
        return replace(self.cut, row_tile=row_tile(_tiles(self.sizes, self.cut.pairs), average))


def can_run(query: MoeQuery, device: Device) -> tuple[bool, str]:
    """SM80 and newer with the extension installed; one codebook a layer, and an activation with a gate."""
    if query.io_dtype not in IO_TYPES:
        return False, f"activations are {query.io_dtype}, want one of {', '.join(IO_TYPES)}"
    if len(query.codebooks) != 1:
        return False, f"experts have the codebooks {' and '.join(sorted(query.codebooks))}, want one"
    if query.w3 is None or query.activation.name not in ops_moe.ACTIVATIONS:
        return False, f"activation {query.activation.name}, want one of {', '.join(ops_moe.ACTIVATIONS)}"
    if query.slices > ops_moe.MAX_SLICES:
        return False, f"{query.slices} slices of each expert, want at most {ops_moe.MAX_SLICES}"
    if query.experts > ops_moe.MAX_EXPERTS:
        return False, f"{query.experts} experts, want at most {ops_moe.MAX_EXPERTS}"
    if query.max_rows * query.top_k >= ops_moe.MAX_ROUTES:
        return False, f"{query.max_rows} rows of {query.top_k} experts, want less than {ops_moe.MAX_ROUTES} in all"
    return runs_on(device, SHARED_BYTES)


def plan(query: MoeQuery, device: Device, window: Window) -> NativeMoePlan:
    """Cut the work for this card.  The kernels choose their own row tiles; `window.block` is not needed."""
    sizes = Sizes(
        k=query.k,
        hidden=query.hidden,
        width=query.width,
        intermediate=query.intermediate,
        experts=query.experts,
        top_k=query.top_k,
        codebook=CODEBOOK_CODES[next(iter(query.codebooks))],
        max_rate2=round(2 * max(query.rates)),
        shared_h=query.shared_h,
        weight_on_input=query.weight_on_input,
        activation=ops_moe.ACTIVATIONS[query.activation.name],
    )
    cut = (
        _decode(query, window.rows, device) if window.name == "decode" else _prefill(query, sizes, window.rows, device)
    )
    limit = math.inf if query.activation.limit is None else query.activation.limit
    return NativeMoePlan(
        sizes=sizes,
        cut=cut,
        slices=query.slices,
        numbers=(limit, query.activation.alpha, query.activation.beta),
        dependent=device.sm >= 90,
        rows=window.rows,
        io_dtype=query.io_dtype,
        workspace_bytes=ops_moe.arena_bytes(window.rows, query.slices, sizes, cut),
    )


def _decode(query: MoeQuery, rows: int, device: Device) -> Cut:
    """One pass of everything; depth cut so that one row's experts occupy the card, the same for every row count."""
    block_bytes = DECODE_FIXED_BYTES + DECODE_RATE2_BYTES * round(2 * max(query.rates))
    grid = device.sms * max(1, min(DECODE_BLOCKS_PER_SM, device.smem // block_bytes))
    items = query.top_k * query.slices * 2 * query.width // BLOCK
    parts = max(1, min(grid // items, query.k // BLOCK))
    return Cut(
        decode=True,
        row_tile=DECODE_BLOCK,
        parts=parts,
        window=max(1, rows * query.top_k),
        down_columns=query.k,
        grid=grid,
        pairs=False,
    )


def _prefill(query: MoeQuery, sizes: Sizes, rows: int, device: Device) -> Cut:
    """Windows of routes and ranges of columns whose memory is a fraction of the whole, and the same for both."""
    routes = max(1, rows * query.top_k)
    window = max(min(routes, LEAST_WINDOW), -(-routes // (PASSES * query.slices)))
    inputs = rows if query.shared_h and not query.weight_on_input else window
    pairs = device.sm == 90
    step = BLOCK * (1 + pairs)  # an even number of column blocks
    columns = inputs * 2 * query.k // routes // step * step  # what fits where the inputs were
    return Cut(
        decode=False,
        row_tile=row_tile(_tiles(sizes, pairs), routes / query.experts),
        parts=1,
        window=window,
        down_columns=max(BLOCK, min(columns, query.k)),
        grid=BLOCKS_PER_SM * device.sms,
        pairs=pairs,
    )


def _tiles(sizes: Sizes, pairs: bool) -> tuple[int, ...]:
    """Rows of the prefill blocks that calls may reach: the highest take rows that lie in the order of routes."""
    if not pairs or (sizes.shared_h and not sizes.weight_on_input):
        return PREFILL_TILES
    lower = PREFILL_TILES if sizes.max_rate2 > TALL_RATE2 else PREFILL_TILES[:-1]
    return (*lower, TALL_TILE)


def row_tile(tiles: tuple[int, ...], average: float) -> int:
    """Rows of a prefill block for so many routes an expert: the least that 2.5 times as many fit into, for routing is
    uneven.

    H200, GLM-5.2 at TP4, 3 bits, microseconds of a layer, balanced and Zipf. Blocks of 32 and 64 rows: 512 rows take
    1028 and 1020, 1286 and 1190. Of 64 and 256: 512 rows 953 and 975, 1065 and 1037; 768 rows 1037 and 1054, 1208 and
    1157. Of 128 and 256: 1,024 rows 1156 and 1101, 1361 and 1267; 2,048 rows 1429 and 1407, 1766 and 1634
    (csrc/exl3/README.md).
    """
    tile = next((tile for tile in tiles if tile < TALL_TILE and average * 2.5 <= tile), tiles[-1])
    if tile == TALL_TILE and PREFILL_TILES[-1] in tiles and average <= TALL_ROUTES:
        return PREFILL_TILES[-1]
    return tile


def prepare(query: MoeQuery, weights: tuple[ExpertSlice, ...]) -> dict[str, torch.Tensor]:
    """The slabs as they are, and the table of where each expert lies in them."""
    prepared = {f"slice{i}_{kind}": getattr(part, kind) for i, part in enumerate(weights) for kind in SLICE_TENSORS}
    return {"table": table_of(query).to(weights[0].w2_trellis.device)} | prepared


def table_of(query: MoeQuery) -> torch.Tensor:
    """[3, experts] i64: gate, up, down: first byte of the expert in its slab, times 32, plus twice its rate."""
    table = torch.zeros(3, query.experts, dtype=torch.int64)
    sizes = {shard: query.sizes(shard) for shard in query.banks}
    rates = {shard: bank.rates for shard, bank in query.banks.items()}
    for matrix in set(MATRIX.values()):
        for slab in slabs(matrix, rates, sizes):
            row = ("w1", "w3", "w2").index(slab.shard)
            for expert, first in slab.places():
                table[row, expert] = 2 * first * 32 + round(2 * slab.rate)
    return table


def run(
    plan: NativeMoePlan,
    prepared: Mapping[str, torch.Tensor],
    arena: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Enqueue the kernels of one call on the current stream."""
    _run(plan, plan.cut_for(x.shape[0]), prepared, arena, x, topk_weights, topk_ids, y)


def _run(
    plan: NativeMoePlan,
    cut: Cut,
    prepared: Mapping[str, torch.Tensor],
    arena: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> None:
    slices = [prepared[f"slice{i}_{kind}"] for i in range(plan.slices) for kind in SLICE_TENSORS]
    ops_moe.moe(
        y,
        x,
        topk_weights,
        topk_ids,
        arena,
        prepared["table"],
        slices,
        plan.sizes,
        cut,
        plan.numbers,
        plan.dependent,
    )


def warm(plan: NativeMoePlan, prepared: Mapping[str, torch.Tensor], arena: torch.Tensor) -> int:
    """Run every kernel that calls may reach on one row that is nobody's: the driver loads a kernel at its first launch.

    Row counts and the types of ids are data to the kernels; only row tiles are not.
    """
    device, top_k = arena.device, plan.sizes.top_k
    x = torch.zeros(1, plan.sizes.hidden, dtype=getattr(torch, plan.io_dtype), device=device)
    weights = torch.zeros(1, top_k, dtype=torch.float32, device=device)
    ids = torch.full((1, top_k), -1, dtype=torch.int32, device=device)
    for tile in plan.row_tiles:
        _run(plan, replace(plan.cut, row_tile=tile), prepared, arena, x, weights, ids, torch.empty_like(x))
    return len(plan.row_tiles)


def _kernels(plan: NativeMoePlan) -> list[tuple[int, bool]]:
    """(row tile, pairs) of every kernel that plans of this layer may reach."""
    if plan.cut.decode:
        return [(DECODE_BLOCK, False)]
    tiles = _tiles(plan.sizes, plan.cut.pairs)
    larger = [tile for tile in tiles if tile >= 64] if plan.cut.pairs else []
    return [(tile, False) for tile in tiles if tile < TALL_TILE] + [(tile, True) for tile in larger]


def check(query: MoeQuery, device: torch.device) -> None:
    """Compare every kernel that a layer like this may reach with the reference, on this very device.

    Raises:
        NoBackendError: one disagrees.
    """
    one, card = sample(query, device), Device.of(device)
    prepared = prepare(one.query, one.weights)
    for window in ("decode", "prefill"):
        planned = plan(one.query, card, Window(name=window, rows=ROWS, block=DECODE_BLOCK))
        for tile, pairs in _kernels(planned):
            y, cut = torch.empty_like(one.x), replace(planned.cut, row_tile=tile, pairs=pairs)
            size = ops_moe.arena_bytes(ROWS, planned.slices, planned.sizes, cut)
            arena = torch.full((size,), 255, dtype=torch.uint8, device=device)
            _run(planned, cut, prepared, arena, one.x, one.topk_weights, one.topk_ids, y)
            error = float((y - one.truth).norm() / one.truth.norm())
            self_check(error, ERROR_LIMIT, f"native: {window} in blocks of {tile} rows, {query}")
