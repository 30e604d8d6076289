# SPDX-License-Identifier: Apache-2.0
"""What of the b12x library is used, whether it is there, and the few questions that need no kernel.

Everything is imported inside functions: the library is heavy, and a server without it must start.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect

import torch

from ..plan import Device, MoeQuery

VERSION = "1.5.1"
BLOCKS = (8, 16, 32, 48, 64)  # rows of a block that its kernels know
Tiles = tuple[int, int, int, int]  # depth and columns of a tile of the first product, then of the second

W4A16 = "b12x.moe._shared.kernels.w4a16"
# Module -> name -> parameters that must be there.  Names that begin with an underscore are no public API.
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "b12x.moe.fused_moe": {
        "Caps": ("max_tokens", "num_topk", "device", "weight_plan", "quant_mode", "w4a16_block_size_m"),
        "TrellisSource": ("config", "uniform_bits"),
        "ActivationSpec": ("mode", "nonlinearity", "io_dtype", "rotation_dtype"),
        "MoEGeometry": ("num_experts", "hidden_size", "intermediate_size"),
        "plan": ("caps",),
        "run": ("binding",),
    },
    "b12x.moe.fused_moe._impl": {
        "B12XFP4ExpertWeights": ("plan", "w1_fp4", "w1_blockscale", "w1_alphas", "w2_fp4", "representation"),
        "_PreparedWeightRepresentation": ("quant_mode", "layout", "value"),
        "tp_moe_required_nbytes": ("caps",),
    },
    f"{W4A16}.prepare": {
        "PreparedW4A16MoeWeights": ("w13", "w13_scale", "w13_global_scale", "w2", "workspace", "trellis"),
        "TrellisWeightState": ("codebook", "bits", "gate_suh", "up_suh", "intermediate_rotations", "down_svh"),
    },
    f"{W4A16}.mixed_trellis": {
        "compile_mixed_trellis": ("size_m", "tier0_bits", "tier1_bits", "route_ids_dtype", "broadcast_suh"),
        "bind_mixed_trellis": ("tier0", "tier1", "global_to_combined", "descriptor_map", "rotations", "launch"),
        "run_bound_mixed_trellis": ("x", "topk_weights", "topk_ids", "binding", "buffers"),
        "MixedTrellisBuffers": ("rotation_gate", "fc2", "output", "packed_route_indices", "workspace"),
        "MixedTrellisRotations": ("intermediate", "gate_suh", "up_suh", "down_svh"),
    },
    f"{W4A16}.host": {
        "max_packed_route_slots": ("numel", "block_size", "num_experts"),
        "packed_gemm_scratch_elements": ("size_n", "route_slots", "moe_block_size", "sms"),
        "route_pack_warmup_token_counts": ("capacity",),
    },
    f"{W4A16}.kernel": {
        "_candidate_tile_fits": ("problem_n", "problem_k", "cta_m_blocks", "tile_n", "tile_k", "max_shared_mem"),
    },
}


@functools.cache
def missing() -> str:
    """Why the library cannot be used, or an empty string."""
    if importlib.util.find_spec("b12x") is None:
        return "the package b12x is not installed"
    version = importlib.metadata.version("b12x")
    if version != VERSION:
        return f"b12x {version} is installed, want {VERSION}"
    for module, members in USED.items():
        try:
            held = importlib.import_module(module)
        except (ImportError, OSError) as error:
            return f"{module} does not import: {error}"
        for member, wanted in members.items():
            lacking = set(wanted) - set(_parameters(getattr(held, member, None)))
            if lacking:
                return f"{module}.{member} lacks {', '.join(sorted(lacking))}"
    return ""


def _parameters(member: object) -> tuple[str, ...]:
    return tuple(inspect.signature(member).parameters) if callable(member) else ()


def torch_device() -> torch.device:
    """The current card, as the library names it; the first where there is none, which is enough for sizes."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def fitting_block(query: MoeQuery, device: Device, wanted: int, tiles: Tiles, reserve: int) -> int:
    """The largest block of rows, up to the wanted one, whose tiles of both products fit into shared memory.

    Args:
        query: the layer.
        device: the card.
        wanted: rows a block.
        tiles: of the kernel.
        reserve: bytes of shared memory that it leaves alone, beyond the library's estimate of what it takes.

    Raises:
        ValueError: the wanted block is none that the kernels know.
    """
    from b12x.moe._shared.kernels.w4a16 import kernel

    if wanted not in BLOCKS:
        raise ValueError(f"b12x: blocks of {wanted} rows, want one of {', '.join(map(str, BLOCKS))}")
    products = ((2 * query.width, query.k, *tiles[:2]), (query.k, query.width, *tiles[2:]))
    for block in BLOCKS[BLOCKS.index(wanted) :: -1]:
        if all(
            kernel._candidate_tile_fits(
                problem_n=n,
                problem_k=k,
                cta_m_blocks=-(-block // 16),
                tile_n=columns,
                tile_k=depth,
                cta_threads=depth * columns // 64,
                max_shared_mem=device.smem - reserve,
                scale_format="e4m3_k32",
                weight_layout="trellis_t256",
                weight_bits=max(4, int(query.rates[-1])),
            )
            for n, k, depth, columns in products
        ):
            return block
    raise ValueError(f"b12x: {query}: no block of rows fits into {device.smem} bytes of shared memory")


def row_buckets(rows: int) -> tuple[int, ...]:
    """Row counts that together reach every specialisation of a window of `rows`."""
    from b12x.moe._shared.kernels.w4a16.host import route_pack_warmup_token_counts

    return route_pack_warmup_token_counts(rows)
