# SPDX-License-Identifier: Apache-2.0
"""Experts of one rate, through b12x's plan, bind and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..plan import Device, MoeQuery
from .b12x_library import Tiles, torch_device

if TYPE_CHECKING:
    from .b12x import B12xPlan

TILES: Tiles = (64, 256, 64, 256)  # the library's own for native tiles
SHARED_RESERVE = 512  # bytes that its planner leaves alone
QUANT_MODE = "w4a16"  # its name for unquantized activations


def _weight_plan(query: MoeQuery) -> Any:
    """The library's description of the weights.  Rotations in fp16 are mandatory with bf16 activations."""
    from b12x.moe import fused_moe

    each = {"vectors": "per_expert", "gains": "none"}
    config = {
        "version": 2,
        "codebook": "mcg",
        "rate": {"granularity": "uniform"},
        "scale": {"input_scales": each, "intermediate_scales": each, "output_scales": each},
        "transform": {
            "projection": {"kind": "scaled_hadamard", "block_size": 128},
            "expert": {"kind": "none"},
        },
    }
    return fused_moe.plan_weights(
        source=fused_moe.TrellisSource(
            config=fused_moe.TrellisConfig.from_dict(config), uniform_bits=int(query.rates[0])
        ),
        activation=fused_moe.ActivationSpec(
            mode="a16",
            nonlinearity="silu",
            io_dtype=getattr(torch, query.io_dtype),
            rotation_dtype=torch.float16,
        ),
        geometry=fused_moe.MoEGeometry(num_experts=query.experts, hidden_size=query.k, intermediate_size=query.width),
    )._impl


def _caps(query: MoeQuery, rows: int, block: int, device: torch.device) -> Any:
    from b12x.moe import fused_moe

    return fused_moe.Caps(
        max_tokens=rows,
        num_topk=query.top_k,
        device=device,
        weight_plan=_weight_plan(query),
        quant_mode=QUANT_MODE,
        w4a16_block_size_m=block,
    )


def workspace_bytes(query: MoeQuery, device: Device, rows: int, block: int) -> int:
    """What the library will ask for."""
    from b12x.moe.fused_moe._impl import tp_moe_required_nbytes

    return tp_moe_required_nbytes(_caps(query, rows, block, torch_device()))


def load(plan: B12xPlan, device: torch.device) -> Any:
    """The library's plan, with every kernel that it may launch; seconds, or read from its cache on disk.

    Raises:
        RuntimeError: it asks for another arena than was planned.
    """
    from b12x.moe import fused_moe

    made = fused_moe.plan(_caps(plan.query, plan.window.rows, plan.block, device))
    (spec,) = made.scratch_specs()
    if spec.nbytes != plan.workspace_bytes:
        raise RuntimeError(f"b12x: {plan.query}: arena of {spec.nbytes} bytes, want {plan.workspace_bytes} as planned")
    return made


def run(
    plan: B12xPlan,
    programs: Any,
    prepared: Mapping[str, torch.Tensor],
    arena: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Bind the tensors, which makes views and clears one small buffer, and launch."""
    from b12x.moe import fused_moe

    binding = fused_moe.bind(
        programs,
        scratch=arena,
        a=x,
        experts=_experts(plan.query, programs.caps.weight_plan, prepared),
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        output=y,
    )
    fused_moe.run(binding=binding)


def _experts(query: MoeQuery, weight_plan: Any, prepared: Mapping[str, torch.Tensor]) -> Any:
    """The library's owner of weights, made of views: it is built for each call, since sleeping moves storage."""
    from b12x.moe._shared.execution import PreparedWeightLayout
    from b12x.moe._shared.kernels.w4a16.prepare import PreparedW4A16MoeWeights, TrellisWeightState
    from b12x.moe.fused_moe._impl import B12XFP4ExpertWeights, _PreparedWeightRepresentation

    ones, zeros, suh = prepared["ones"], prepared["zeros"], prepared["suh"]
    rotations = TrellisWeightState(
        codebook="mcg",
        bits=int(query.rates[0]),
        gate_suh=suh[0],
        up_suh=suh[1],
        intermediate_rotations=prepared["middle"],
        down_svh=prepared["svh"],
        tile_config=TILES,
    )
    value = PreparedW4A16MoeWeights(
        w13=prepared["w13"].view(torch.int32),
        w13_scale=zeros,
        w13_global_scale=ones,
        w2=prepared["w2"].view(torch.int32),
        w2_scale=zeros,
        w2_global_scale=ones,
        workspace=zeros,  # a placeholder: the live one is part of the arena
        hidden_size=query.k,
        intermediate_size=query.width,
        num_experts=query.experts,
        is_gated=True,
        params_dtype=torch.float16,
        fc1_tile_n=TILES[1],
        fc2_tile_n=TILES[3],
        w13_layout="trellis_t256_proj",
        trellis=rotations,
    )
    held = _PreparedWeightRepresentation(quant_mode=QUANT_MODE, layout=PreparedWeightLayout.TRELLIS_NATIVE, value=value)
    one = ones[:1].view(())
    return B12XFP4ExpertWeights(
        plan=weight_plan,
        a1_gscale=one,
        w1_fp4=value.w13,
        w1_blockscale=zeros,
        w1_alphas=ones,
        a2_gscale=one,
        w2_fp4=value.w2,
        w2_blockscale=zeros,
        w2_alphas=ones,
        representation=held,
    )
