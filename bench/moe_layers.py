# SPDX-License-Identifier: Apache-2.0
"""Layers of experts, routings and the float64 truth: what the bench and the tests of routed experts have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import ExpertSlice
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Activation, Bank, MoeQuery
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_rotated, hadamard
from vllm.model_executor.layers.quantization.exl3_trellis.slabs import MATRIX, slabs

SILU = Activation(name="silu")


def query(
    rates: Sequence[float],
    k: int,
    width: int,
    top_k: int,
    codebook: str = "mcg",
    io_dtype: str = "bfloat16",
    shared_h: bool = False,
    slices: int = 1,
) -> MoeQuery:
    """A layer whose experts each have one rate and one codebook, and which is not padded."""
    bank = Bank(rates=tuple(map(float, rates)), codebooks=(codebook,) * len(rates))
    return MoeQuery(
        k=k,
        hidden=k,
        slices=slices,
        width=width,
        intermediate=slices * width,
        w1=bank,
        w3=bank,
        w2=bank,
        shared_h=shared_h,
        top_k=top_k,
        activation=SILU,
        weight_on_input=False,
        io_dtype=io_dtype,
        max_rows=4096,
    )


def mixed(low: float, high: float, first: int, second: int) -> list[float]:
    """`first` experts of the low rate and `second` of the high one, interleaved as evenly as they go."""
    total = first + second
    return [low if (i + 1) * first // total > i * first // total else high for i in range(total)]


def routing(
    name: str, rows: int, experts: int, top_k: int, device: torch.device, seed: int = 0, turn: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights [rows, top_k] f32, each row's sum 1, and topk_ids [rows, top_k] i32.

    balanced  every expert gets as many routes as any other, or one more: rows choose among experts / top_k sets of
              top_k experts, each set anywhere among the experts
    zipf      the chance of the r-th expert falls as 1 / r
    one_hot   every row chooses the same experts

    Args:
        name: one of these.
        rows: how many.
        experts: how many.
        top_k: experts a row.
        device: of the tensors.
        seed: of all that is random.
        turn: goes on by so many rows' worth of experts, so that other ones are chosen.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    if name == "balanced":
        # Of one seed, so that turns choose different experts. In their order a row's experts would be neighbours, and a
        # kernel that goes through the experts would find its rows of x together, as no router leaves them.
        anywhere = torch.randperm(experts, generator=torch.Generator(device=device).manual_seed(0), device=device)
        flat = torch.arange(turn * rows * top_k, (turn + 1) * rows * top_k, device=device) % experts
        ids = anywhere[flat].view(rows, top_k)[torch.randperm(rows, generator=generator, device=device)]
    elif name == "zipf":
        odds = 1 / torch.arange(1, experts + 1, device=device, dtype=torch.float32)
        ids = torch.multinomial(odds.expand(rows, -1), top_k, generator=generator)
        ids = torch.randperm(experts, generator=generator, device=device)[ids]
    elif name == "one_hot":
        ids = torch.arange(top_k, device=device).expand(rows, -1)
    else:
        raise ValueError(f"routing {name!r}, want balanced, zipf or one_hot")
    if name != "balanced":
        ids = (ids + turn * top_k) % experts
    weights = torch.rand(rows, top_k, generator=generator, device=device) + 0.1
    return weights / weights.sum(1, keepdim=True), ids.to(torch.int32).contiguous()


Module = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # Wr [k, n], suh [k], svh [n], all f16


def modules(layer: MoeQuery, part: ExpertSlice, experts: Sequence[int]) -> Iterator[tuple[int, dict[str, Module]]]:
    """(expert, shard -> module) of one slice."""
    rates = {shard: bank.rates for shard, bank in layer.banks.items()}
    sizes = {shard: layer.sizes(shard) for shard in layer.banks}
    tiles: dict[tuple[str, int], torch.Tensor] = {}
    for matrix in ("w13", "w2"):
        trellis = getattr(part, f"{matrix}_trellis")
        for slab in slabs(matrix, rates, sizes):
            views = trellis[slab.start : slab.stop].view(slab.shape)
            tiles |= {(slab.shard, expert): views[index] for index, expert in enumerate(slab.experts)}
    for expert in experts:
        found = {}
        for shard, bank in layer.banks.items():
            vectors = []
            for side in ("suh", "svh"):
                vector = getattr(part, f"{MATRIX[shard]}_{side}")
                shared = layer.shared_h and side == ("svh" if shard == "w2" else "suh")
                vector = vector if shared else vector[expert]
                vectors.append(vector if shard == "w2" else vector[int(shard == "w3")])
            found[shard] = (decode_rotated(tiles[shard, expert], bank.codebooks[expert]), *vectors)
        yield expert, found


class Truth:
    """A layer in float64, everything of it; decodes each expert once, when it is first chosen."""

    def __init__(self, layer: MoeQuery, weights: Sequence[ExpertSlice]) -> None:
        self.layer, self.weights = layer, weights
        self.decoded: list[dict[int, dict[str, Module]]] = [{} for _ in weights]

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """y [m, hidden] f64; ids below 0 are nobody's."""
        layer = self.layer
        y = torch.zeros(x.shape[0], layer.k, dtype=torch.float64, device=x.device)
        wide = torch.nn.functional.pad(x.double(), (0, layer.k - x.shape[1]))
        chosen = sorted(set(topk_ids.unique().tolist()) - {-1})
        for part, decoded in zip(self.weights, self.decoded, strict=True):
            decoded |= modules(layer, part, [expert for expert in chosen if expert not in decoded])
            for expert in chosen:
                row, place = (topk_ids == expert).nonzero(as_tuple=True)
                gate = _apply(wide[row], decoded[expert]["w1"])
                middle = gate * torch.sigmoid(gate) * _apply(wide[row], decoded[expert]["w3"])
                out = _apply(middle, decoded[expert]["w2"]) * topk_weights[row, place].double().unsqueeze(1)
                y.index_add_(0, row, out)
        return y[:, : layer.hidden]


def _apply(x: torch.Tensor, module: Module) -> torch.Tensor:
    rotated, suh, svh = (tensor.double() for tensor in module)
    return hadamard(hadamard(x * suh) @ rotated) * svh


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """|y - expected| / |expected|; NaN where it is NaN."""
    return float((y.double() - expected).norm() / expected.norm()) if expected.numel() else math.nan
