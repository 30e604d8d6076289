"""Random routed experts, what they mean in float64, and calls of operator `moe` in hostile surroundings."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tests.csrc.calls import under_both_schedules
from tests.csrc.emulation import load
from tests.csrc.memory import Arena
from vllm.model_executor.layers.quantization.exl3_trellis import ops_moe
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native_moe
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import ExpertSlice
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Activation, Bank, Device, MoeQuery, Window
from vllm.model_executor.layers.quantization.exl3_trellis.reference import dense_weight
from vllm.model_executor.layers.quantization.exl3_trellis.slabs import slabs

DEVICE = Device(kind="cuda", sm=90, sms=3, smem=232_448)  # few multiprocessors: every thread block has several items
PROJECTIONS = ("w1", "w3", "w2")


def query(
    rates: Sequence[Sequence[float]],
    book: str = "mcg",
    k: int = 256,
    width: int = 128,
    slices: int = 1,
    top_k: int = 2,
    activation: Activation | None = None,
    **changes: object,
) -> MoeQuery:
    """A layer; rates: of each expert, those of gate, up and down. Its true sizes are not whole blocks."""
    banks = [
        Bank(rates=tuple(map(float, column)), codebooks=(book,) * len(rates)) for column in zip(*rates, strict=True)
    ]
    made = MoeQuery(
        k=k,
        hidden=k - 19,
        slices=slices,
        width=width,
        intermediate=slices * width - 37,
        w1=banks[0],
        w3=banks[1],
        w2=banks[2],
        shared_h=False,
        top_k=top_k,
        activation=activation or Activation(name="silu"),
        weight_on_input=False,
        io_dtype="float32",
        max_rows=64,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@functools.cache
def random_weights(of: MoeQuery, seed: int = 0) -> tuple[ExpertSlice, ...]:
    """Random bits; scales of both signs and of many sizes, so that no two channels may be confused."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {shard: of.sizes(shard) for shard in of.banks}
    rates = {shard: bank.rates for shard, bank in of.banks.items()}

    def trellis(matrix: str) -> torch.Tensor:
        count = slabs(matrix, rates, sizes)[-1].stop
        return torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, generator=generator)

    def vectors(*shape: int, scale: float) -> torch.Tensor:
        values = 0.5 + torch.rand(shape, generator=generator)
        return (values * torch.randn(shape, generator=generator).sign() * scale).half()

    heads = () if of.shared_h else (of.experts,)
    return tuple(
        ExpertSlice(
            w13_trellis=trellis("w13"),
            w2_trellis=trellis("w2"),
            w13_suh=vectors(*heads, 2, of.k, scale=1.0),
            w13_svh=vectors(of.experts, 2, of.width, scale=1 / math.sqrt(of.k)),
            w2_suh=vectors(of.experts, of.width, scale=1.0),
            w2_svh=vectors(*heads, of.k, scale=1 / math.sqrt(of.width)),
        )
        for _ in range(of.slices)
    )


@functools.cache
def _dense(of: MoeQuery, seed: int) -> dict[tuple[int, str, int], torch.Tensor]:
    """(slice, projection, expert) -> [in, out] f64."""
    found = {}
    sizes = {shard: of.sizes(shard) for shard in of.banks}
    rates = {shard: bank.rates for shard, bank in of.banks.items()}
    for index, part in enumerate(random_weights(of, seed)):
        for matrix in ("w13", "w2"):
            for slab in slabs(matrix, rates, sizes):
                tiles = getattr(part, f"{matrix}_trellis")[slab.start : slab.stop].view(slab.shape)
                for place, expert in enumerate(slab.experts):
                    which = (0 if slab.shard == "w1" else 1,) if matrix == "w13" else ()
                    suh, svh = getattr(part, f"{matrix}_suh"), getattr(part, f"{matrix}_svh")
                    suh = suh if of.shared_h and matrix == "w13" else suh[expert]
                    svh = svh if of.shared_h and matrix == "w2" else svh[expert]
                    book = of.w1.codebooks[expert]
                    found[index, slab.shard, expert] = dense_weight(
                        tiles[place], suh[which[0]] if which else suh, svh[which[0]] if which else svh, book
                    )
    return found


def truth(of: MoeQuery, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """[m, hidden] f64."""
    dense = _dense(of, seed)
    y = torch.zeros(x.shape[0], of.k, dtype=torch.float64)
    wide = F.pad(x.double(), (0, of.k - of.hidden))
    for row in range(x.shape[0]):
        for slot in range(of.top_k):
            expert, weight = int(ids[row, slot]), float(weights[row, slot])
            if not 0 <= expert < of.experts:
                continue
            given = wide[row] * weight if of.weight_on_input else wide[row]
            for index in range(of.slices):
                gate, up = (given @ dense[index, shard, expert] for shard in ("w1", "w3"))
                middle = _activated(of.activation, gate, up)
                middle[max(0, of.intermediate - index * of.width) :] = 0
                part = middle @ dense[index, "w2", expert]
                y[row] += part if of.weight_on_input else part * weight
    return y[:, : of.hidden]


def _activated(act: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    limit = math.inf if act.limit is None else act.limit
    if act.name == "swiglustep":
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if act.name.startswith("gelu"):
        return F.gelu(gate, approximate="tanh" if act.name == "gelu_tanh" else "none") * up
    if act.name == "relu2":
        return F.relu(gate).square() * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(act.alpha * gate) * (up + act.beta)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Rows and where they go."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def random_call(of: MoeQuery, rows: int, ids: torch.Tensor | None = None, seed: int = 0) -> Call:
    """Distinct experts a row, and weights that do not sum to one."""
    generator = torch.Generator().manual_seed(100 * seed + rows)
    x = torch.randn(rows, of.hidden, generator=generator).to(getattr(torch, of.io_dtype))
    routing, chosen = torch.rand(rows, of.experts, generator=generator).topk(of.top_k)
    return Call(x=x, weights=routing.contiguous(), ids=chosen.int() if ids is None else ids)


def skewed(rows: int, experts: int, top_k: int) -> torch.Tensor:
    """Distinct experts a row, as often as one over their rank, which is not their number's order."""
    generator = torch.Generator().manual_seed(rows)
    odds = 1 / (1 + torch.randperm(experts, generator=generator))
    ids = torch.multinomial(odds.expand(rows, -1), top_k, generator=generator).int()
    ids[::7, 1] = -1
    return ids


def run(
    of: MoeQuery,
    call: Call,
    plan: str,
    row_tile: int | None = None,
    capacity: int | None = None,
    target: str = "warp",
    dependent: bool = True,
    pad: int = 0,
    look: Callable[[torch.Tensor], None] | None = None,
    **cut: int,
) -> torch.Tensor:
    """y of operator `moe` under both schedules.

    plan: "decode" or "prefill"; cut: what to change in it; look: is shown the operator's arena after each call.
    """
    m = call.x.shape[0]
    native_moe.ops_moe.arena_bytes = functools.partial(arena_bytes, target)
    planned = native_moe.plan(of, DEVICE, Window(name=plan, rows=capacity or m, block=8))
    pairs = target == "warpgroup"
    here = {"pairs": pairs, "row_tile": row_tile or min(planned.cut.row_tile, 256 if pairs else 128)}
    changed = replace(planned.cut, **(here | cut))
    table = native_moe.table_of(of)

    def enqueue(arena: Arena) -> torch.Tensor:
        y = arena.empty((m, of.hidden + pad), call.x.dtype)[:, : of.hidden]
        x = arena.empty((m, of.hidden + pad), call.x.dtype)[:, : of.hidden].copy_(call.x)
        slices = [arena.copy(getattr(part, kind)) for part in random_weights(of) for kind in ops_moe.SLICE_TENSORS]
        scratch = arena.empty((arena_bytes(target, m, of.slices, planned.sizes, changed),), torch.uint8, align=256)
        load(target).ops.moe(
            y,
            x,
            arena.copy(call.weights),
            arena.copy(call.ids),
            scratch,
            arena.copy(table),
            slices,
            ops_moe._numbers(planned.sizes),
            ops_moe._numbers(changed),
            *planned.numbers,
            dependent,
        )
        load(target).synchronize()
        if look:
            look(scratch)
        return y

    return under_both_schedules(enqueue, target)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What the prefill plan's sort leaves in the arena, as moe_layout.cuh lays it out."""

    first: list[int]  # block of each window, then of none
    blocks: list[list[int]]  # expert, start, count
    weights: torch.Tensor  # [blocks, 3] i64: entries of the table
    routes: list[list[int]]  # route, expert

    @staticmethod
    def of(arena: torch.Tensor, call: Call, experts: int, window: int) -> Listed:
        routes, chunk = call.ids.numel(), 2048
        windows, chunks = -(-routes // window), -(-routes // chunk)
        most_blocks = routes // 8 + min(routes, experts) + windows
        blocks_at = _aligned(4 * (2 + windows))
        counts_at = _aligned(blocks_at + 48 * most_blocks)
        sorted_at = _aligned(counts_at + (4 * chunks * experts if chunks > 1 else 0))
        valid, *first = arena[: 4 * (2 + windows)].view(torch.int32).tolist()
        blocks = arena[blocks_at : blocks_at + 48 * first[-1]].view(-1, 48)
        return Listed(
            first=first,
            blocks=blocks[:, :12].contiguous().view(torch.int32).tolist(),
            weights=blocks[:, 16:40].contiguous().view(torch.int64),
            routes=arena[sorted_at : sorted_at + 8 * valid].view(torch.int32).view(-1, 2).tolist(),
        )

    @staticmethod
    def share_flags(arena: torch.Tensor, windows: int, grid: int, row_tile: int) -> torch.Tensor:
        """[windows, 1 + grid] i32: shares taken, then 1 for each that left sums to the next."""
        end = arena.numel() - 2 * (grid + grid % 2) * min(row_tile, 128) * 128
        first = end - _aligned(4 * windows * (1 + grid))
        return arena[first:].view(torch.int32)[: windows * (1 + grid)].view(windows, 1 + grid)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def arena_bytes(target: str, rows: int, slices: int, sizes: ops_moe.Sizes, cut: ops_moe.Cut) -> int:
    """As ops_moe.arena_bytes, by the emulated operator."""
    return load(target).ops.moe_arena_bytes(rows, slices, ops_moe._numbers(sizes), ops_moe._numbers(cut))
