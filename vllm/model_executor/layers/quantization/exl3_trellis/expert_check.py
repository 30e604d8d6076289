# SPDX-License-Identifier: Apache-2.0
"""Compare a provider of routed experts with the reference, on a few random experts of a layer's own sizes.

The sizes, rates, routes a row and dtypes are the layer's, so the kernels compared are those that will serve it; only
there are fewer experts.  Milliseconds, once these kernels are compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .expert_intake import ExpertSlice
from .plan import Bank, Device, MoeQuery, Window, self_check
from .slabs import MATRICES, slabs

if TYPE_CHECKING:
    from .backends import MoeBackend

ROWS = 5
OF_EACH_KIND = 4  # experts


def few_experts(query: MoeQuery) -> MoeQuery:
    """The query with as few experts as show every kind of each projection, and can be a row's top k."""
    kinds = {shard: sorted(set(zip(bank.rates, bank.codebooks, strict=True))) for shard, bank in query.banks.items()}
    count = max(query.top_k, OF_EACH_KIND * max(map(len, kinds.values())))

    def bank(shard: str) -> Bank:
        chosen = [kinds[shard][expert % len(kinds[shard])] for expert in range(count)]
        return Bank(rates=tuple(rate for rate, _ in chosen), codebooks=tuple(book for _, book in chosen))

    return replace(query, w1=bank("w1"), w2=bank("w2"), w3=bank("w3") if query.w3 else None, max_rows=ROWS)


def random_experts(query: MoeQuery, device: torch.device, seed: int = 0) -> tuple[ExpertSlice, ...]:
    """Every slice, of random weights: any bits are a trellis.  The scales keep the size of activations."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rates = {shard: bank.rates for shard, bank in query.banks.items()}
    sizes = {shard: query.sizes(shard) for shard in query.banks}

    def trellis(matrix: str) -> torch.Tensor:
        count = slabs(matrix, rates, sizes)[-1].stop
        words = torch.empty(count // 4, dtype=torch.int64, device=device)
        return words.random_(-(1 << 63), (1 << 63) - 1, generator=generator).view(torch.int16)

    def vectors(*shape: int, scale: float) -> torch.Tensor:
        values = torch.rand(shape, generator=generator, dtype=torch.float32, device=device) + 0.5
        signs = torch.randn(shape, generator=generator, dtype=torch.float32, device=device).sign()
        return (values * signs * scale).half()

    experts, into = query.experts, sum(shard in query.banks for shard in MATRICES["w13"])
    heads = () if query.shared_h else (experts,)
    return tuple(
        ExpertSlice(
            w13_trellis=trellis("w13"),
            w2_trellis=trellis("w2"),
            w13_suh=vectors(*heads, into, query.k, scale=1.0),
            w13_svh=vectors(experts, into, query.width, scale=1 / math.sqrt(query.k)),
            w2_suh=vectors(experts, query.width, scale=1.0),
            w2_svh=vectors(*heads, query.k, scale=1 / math.sqrt(query.intermediate)),
        )
        for _ in range(query.slices)
    )


def reference(
    query: MoeQuery,
    weights: tuple[ExpertSlice, ...],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """y [m, hidden] f32 of the reference mathematics in float32; `weights` are left as they are."""
    from .backends import torch_moe

    exact = replace(query, io_dtype="float32")
    window = Window(name="parity", rows=x.shape[0], block=x.shape[0])
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    torch_moe.run(
        torch_moe.plan(exact, Device.of(x.device), window),
        torch_moe.prepare(exact, tuple(replace(part) for part in weights), decode_once=True),
        torch.empty(0, dtype=torch.uint8, device=x.device),
        x.float(),
        topk_weights,
        topk_ids,
        y,
    )
    return y


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A few random experts of a layer, rows for them, and what they make of those."""

    query: MoeQuery
    weights: tuple[ExpertSlice, ...]
    x: torch.Tensor  # [ROWS, hidden] of the query's dtype
    topk_weights: torch.Tensor  # [ROWS, top_k] f32
    topk_ids: torch.Tensor  # [ROWS, top_k] i64
    truth: torch.Tensor  # [ROWS, hidden] f32


def sample(query: MoeQuery, device: torch.device) -> Sample:
    """Drawn from fixed seeds, the same for every provider."""
    few = few_experts(query)
    weights = random_experts(few, device)
    generator = torch.Generator(device=device).manual_seed(1)
    # vLLM loads models under a default dtype of 16 bits, so this one is named.
    single = {"generator": generator, "dtype": torch.float32, "device": device}
    x = torch.randn(ROWS, query.hidden, **single).to(getattr(torch, query.io_dtype))
    routing, ids = torch.rand(ROWS, few.experts, **single).topk(query.top_k)
    truth = reference(few, weights, x, routing, ids)
    return Sample(query=few, weights=weights, x=x, topk_weights=routing, topk_ids=ids, truth=truth)


def compare(provider: MoeBackend, query: MoeQuery, device: torch.device, limit: float) -> None:
    """Run a provider once, from an arena full of NaN.

    Args:
        provider: it can run the query.
        query: a layer.
        device: where it will run.
        limit: the largest relative error allowed.

    Raises:
        NoBackendError: it disagrees with the reference.
    """
    one = sample(query, device)
    plan = provider.plan(one.query, Device.of(device), Window(name="decode", rows=ROWS, block=8))
    arena = torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=device)
    y = torch.empty_like(one.x)
    prepared = provider.prepare(one.query, one.weights)
    provider.run(plan, prepared, arena, one.x, one.topk_weights, one.topk_ids, y)
    self_check(float((y - one.truth).norm() / one.truth.norm()), limit, f"{provider.name}: {query}")
