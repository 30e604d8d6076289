# SPDX-License-Identifier: Apache-2.0
"""Layers of routed experts for tests, without vLLM: random tensors, the slabs they load into, their plain meaning."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Module

from vllm.model_executor.layers.quantization.exl3_trellis.checkpoint import SUFFIXES
from vllm.model_executor.layers.quantization.exl3_trellis.codebook import CODEBOOKS, tile_words
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import create_expert_params, take_slices
from vllm.model_executor.layers.quantization.exl3_trellis.experts import ExpertsSpec, Projection
from vllm.model_executor.layers.quantization.exl3_trellis.layout import RankSlice
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Activation, Bank, MoeQuery
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_dense
from vllm.model_executor.layers.quantization.exl3_trellis.slabs import local_parts

PREFIX = "model.layers.3.mlp.experts"
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
HIDDEN_SIDE = {"w1": "suh", "w3": "suh", "w2": "svh"}


def mask(*suffixes: str) -> int:
    return sum(1 << SUFFIXES.index(suffix) for suffix in suffixes)


def make_spec(
    rates: dict[str, list[float]],
    *,
    hidden: int = 256,
    width: int = 128,
    ranks: int | None = 2,
    shared: bool = False,
    codebook: str = "mcg",
    signs: tuple[str, str] = ("suh", "svh"),
) -> ExpertsSpec:
    """Experts whose projections have these rates; `width` is one slice's."""
    projections = {}
    for shard, row in rates.items():
        kept = [s for s in signs if not (shared and s == HIDDEN_SIDE[shard])]
        stored = mask("trellis", *kept, *([codebook] if codebook != "3inst" else []))
        halves = bytes(round(2 * rate) for rate in row)
        projections[shard] = Projection(name=NAMES[shard], halves=halves, stored=bytes([stored] * len(row)))
    count = len(rates["w2"])
    return ExpertsSpec(count=count, hidden=hidden, width=width, projections=projections, ranks=ranks, shared_h=shared)


Tensors = dict[tuple[str, int, int, str], torch.Tensor]  # (shard, expert or -1 for shared, stored rank, suffix)


def stored_tensors(spec: ExpertsSpec, seed: int = 0) -> Tensors:
    """Random tensors of every expert and rank, as a checkpoint holds them."""
    random = torch.Generator().manual_seed(seed)

    def tensor(suffix: str, k: int, n: int, rate: float) -> torch.Tensor:
        if suffix == "trellis":
            shape = (k // 16, n // 16, tile_words(rate))
            return torch.randint(-(2**15), 2**15, shape, generator=random, dtype=torch.int16)
        if suffix in ("su", "sv"):
            length = (k if suffix == "su" else n) // 16
            return torch.randint(-(2**15), 2**15, (length,), generator=random, dtype=torch.int16)
        if suffix in CODEBOOKS:
            return torch.tensor(CODEBOOKS[suffix].marker_int32, dtype=torch.int32)
        return torch.randn(k if suffix == "suh" else n, generator=random).mul(0.2).half()

    tensors: Tensors = {}
    for shard, projection in spec.projections.items():
        k, n = spec.sizes(shard)
        for rank in range(spec.ranks or 1):
            for expert in range(spec.count):
                for suffix in SUFFIXES:
                    if projection.has(expert, suffix):
                        tensors[shard, expert, rank, suffix] = tensor(suffix, k, n, projection.rate(expert))
            if spec.shared_h:
                side = HIDDEN_SIDE[shard]
                tensors[shard, -1, rank, side] = tensor(side, k, n, 0)
    return tensors


Parts = tuple[RankSlice, ...]


def make_layer(spec: ExpertsSpec, intermediate: int, tp: int = 1, rank: int = 0) -> tuple[Module, Parts]:
    """An empty layer with the parameters of one rank, and the slices it runs."""
    layer = Module()
    parts = local_parts(spec, intermediate, tp, rank, PREFIX)
    create_expert_params(layer, spec, parts, PREFIX)
    return layer, parts


def params_of(layer: Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return layer.named_parameters(recurse=False)


def load(layer: Module, tensors: Tensors) -> None:
    """Hand every tensor that the rank wants to its loader."""
    for _, param in list(params_of(layer)):
        held = param.exl3_expert_param
        for (shard, expert, rank, suffix), tensor in tensors.items():
            same = suffix == held.suffix and shard in held.shards and rank == held.part.stored_rank
            if same and held.shared == (expert == -1):
                param.weight_loader(param, tensor, "name", shard, max(expert, 0))


def query_of(spec: ExpertsSpec, parts: tuple[RankSlice, ...], **changes: object) -> MoeQuery:
    """What the layer asks of a provider, in float32."""
    banks = {
        shard: Bank(
            rates=tuple(p.rate(e) for e in range(spec.count)),
            codebooks=tuple(p.codebook(e) for e in range(spec.count)),
        )
        for shard, p in spec.projections.items()
    }
    width = parts[0].span[1] - parts[0].span[0]
    fields = {
        "k": spec.hidden,
        "hidden": spec.hidden,
        "slices": len(parts),
        "width": width,
        "intermediate": width * len(parts),
        "w1": banks["w1"],
        "w3": banks.get("w3"),
        "w2": banks["w2"],
        "shared_h": spec.shared_h,
        "top_k": 2,
        "activation": Activation(name="silu"),
        "weight_on_input": False,
        "io_dtype": "float32",
        "max_rows": 64,
    }
    return MoeQuery(**(fields | changes))


def dense(spec: ExpertsSpec, tensors: Tensors, shard: str, expert: int) -> torch.Tensor:
    """float32 [in, out]: one projection of one expert, all ranks together."""
    slices = []
    for rank in range(spec.ranks or 1):
        vectors = []
        for side in ("suh", "svh"):
            shared = spec.shared_h and side == HIDDEN_SIDE[shard]
            vectors.append(tensors[shard, -1 if shared else expert, rank, side])
        book = spec.projections[shard].codebook(expert)
        slices.append(decode_dense(tensors[shard, expert, rank, "trellis"], *vectors, book))
    return torch.cat(slices, dim=0 if shard == "w2" else 1)


def slices_of(layer: Module, spec: ExpertsSpec, parts: tuple[RankSlice, ...]) -> tuple:
    return take_slices(layer, spec, parts)
