# SPDX-License-Identifier: Apache-2.0
"""Experts of two rates in one launch of b12x.  How many there are of each is data, and nothing is compiled for it.

The library sizes and allocates the buffers of such a launch itself; here they lie in the caller's arena instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import arena_layout
from ..arena_layout import Layout, layout_bytes
from ..layout import trellis_shape
from ..plan import Device, MoeQuery
from .b12x_library import Tiles

if TYPE_CHECKING:
    from .b12x import B12xPlan

TILES: Tiles = (128, 128, 128, 128)  # less than 128 deep loses partial sums across tiers
# The library's estimate counts two stages of scales, which a trellis has not: K3 and K4 in blocks of 64 rows take
# exactly what SM120 has.
SHARED_RESERVE = -2 * (128 // 32) * 128 * 2
BLOCKS_PER_SM = 4  # the most that its kernels are launched with


@dataclass(frozen=True, kw_only=True)
class Tier:
    """The experts of one rate, in the library's terms."""

    num_experts: int
    w13: torch.Tensor  # flat i32: all gates, then all ups
    w2: torch.Tensor  # flat i32
    w13_scale: torch.Tensor  # [4] u8, and the three below: not read for a trellis, but checked
    w2_scale: torch.Tensor
    w13_global_scale: torch.Tensor  # [experts] f32
    w2_global_scale: torch.Tensor
    trellis_codebook: str = "mcg"


def buffers(query: MoeQuery, sms: int, rows: int, block: int) -> Layout:
    """Every buffer of a launch of up to `rows` rows: its shape and dtype."""
    from b12x.moe._shared.kernels.w4a16 import host

    routed = rows * query.top_k
    slots = host.max_packed_route_slots(routed, block, query.experts)

    def partial(columns: int) -> tuple[tuple[int, ...], torch.dtype]:
        count = host.packed_gemm_scratch_elements(size_n=columns, route_slots=slots, moe_block_size=block, sms=sms)
        return (count,), torch.float32

    half, integer = torch.float16, torch.int32
    return {
        "rotation_gate": ((routed, query.k), half),  # then the second product's output
        "rotation_up": ((routed, query.k), half),
        "fc1": ((routed, 2 * query.width), half),
        "activated": ((routed, query.width), half),
        "output": ((rows, query.k), torch.float32),
        "packed_route_indices": ((slots,), integer),
        "block_expert_ids": ((-(-slots // block),), integer),
        "packed_route_count": ((1,), integer),
        "expert_offsets": ((query.experts + 1,), integer),
        "expert_counts": ((query.experts,), integer),
        "fc1_scratch": partial(2 * query.width),
        "fc2_scratch": partial(query.k),
        "workspace": ((BLOCKS_PER_SM * sms + 2,), integer),
    }


def workspace_bytes(query: MoeQuery, device: Device, rows: int, block: int) -> int:
    """All buffers, each aligned."""
    return layout_bytes(buffers(query, device.sms, rows, block))


def maps(order: list[int], sizes: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """Where each expert is: `tiers` by its number, `descriptors` by its place, once for each projection."""
    places = torch.empty(len(order), dtype=torch.int32)
    places[torch.tensor(order)] = torch.arange(len(order), dtype=torch.int32)
    row = torch.cat([torch.arange(size, dtype=torch.int32) + 256 * tier for tier, size in enumerate(sizes)])
    return {"tiers": places.to(device), "descriptors": row.repeat(3).to(device)}


def load(plan: B12xPlan, device: torch.device) -> dict[torch.dtype, Any]:
    """The launches for 32-bit and 64-bit ids.

    Raises:
        RuntimeError: a kernel wants more workspace than was planned for any.
    """
    from b12x.moe._shared.kernels.w4a16.mixed_trellis import compile_mixed_trellis

    query, props = plan.query, torch.cuda.get_device_properties(device)
    layout = buffers(query, props.multi_processor_count, plan.window.rows, plan.block)
    first, second = (query.w1.rates.count(rate) for rate in query.rates)
    launches = {}
    with torch.cuda.device(device):
        for dtype in (torch.int32, torch.int64):
            launches[dtype] = compile_mixed_trellis(
                size_m=plan.window.rows,
                hidden_size=query.k,
                intermediate_size=query.width,
                tier0_num_experts=first,
                tier1_num_experts=second,
                tier0_bits=int(query.rates[0]),
                tier1_bits=int(query.rates[1]),
                top_k=query.top_k,
                max_m_blocks=layout["block_expert_ids"][0][0],
                sms=props.multi_processor_count,
                max_shared_mem=props.shared_memory_per_block_optin,
                force_tile_config=TILES,
                moe_block_size=plan.block,
                rotation_input_dtype={"bfloat16": "bf16", "float16": "fp16"}[query.io_dtype],
                route_ids_dtype=dtype,
                broadcast_suh=query.shared_h,
                broadcast_svh=query.shared_h,
            )
            if launches[dtype].blocks_per_sm > BLOCKS_PER_SM:
                found = launches[dtype].blocks_per_sm
                raise RuntimeError(f"b12x: {query}: {found} blocks a multiprocessor, planned for {BLOCKS_PER_SM}")
    return launches


def run(
    plan: B12xPlan,
    programs: dict[torch.dtype, Any],
    prepared: Mapping[str, torch.Tensor],
    arena: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Carve the buffers out of the arena, clear the barriers, bind and launch."""
    from b12x.moe._shared.kernels.w4a16 import mixed_trellis

    query, launch = plan.query, programs[topk_ids.dtype]
    views = arena_layout.views(buffers(query, launch.sms, plan.window.rows, plan.block), arena)
    views["workspace"].zero_()
    scratch = mixed_trellis.MixedTrellisBuffers(**views, fc2=views["rotation_gate"])
    descriptors = prepared["descriptors"].detach()
    sizes = tuple(query.w1.rates.count(rate) for rate in query.rates)
    descriptors._mt_projection_counts = (sizes, sizes)  # what the library would read back from the device
    rotations = mixed_trellis.MixedTrellisRotations(
        intermediate=prepared["middle"],
        gate_suh=prepared["suh"][0],
        up_suh=prepared["suh"][1],
        down_svh=prepared["svh"],
    )
    binding = mixed_trellis.bind_mixed_trellis(
        *_tiers(query, prepared, sizes), prepared["tiers"], descriptors, rotations, launch
    )
    y.copy_(mixed_trellis.run_bound_mixed_trellis(x, topk_weights, topk_ids, binding, scratch))


def _tiers(query: MoeQuery, prepared: Mapping[str, torch.Tensor], sizes: tuple[int, ...]) -> list[Tier]:
    """Views of the slabs: within each parameter the rates follow one another."""
    w13, w2 = prepared["w13"].view(torch.int32), prepared["w2"].view(torch.int32)
    tiers, first, second = [], 0, 0
    for rate, size in zip(query.rates, sizes, strict=True):
        each = math.prod(trellis_shape(query.k, query.width, rate)) // 2 * size
        ones, zeros = prepared["ones"][:size], prepared["zeros"]
        tiers.append(
            Tier(
                num_experts=size,
                w13=w13[first : first + 2 * each],
                w2=w2[second : second + each],
                w13_scale=zeros,
                w2_scale=zeros,
                w13_global_scale=ones,
                w2_global_scale=ones,
            )
        )
        first, second = first + 2 * each, second + each
    return tiers
