# SPDX-License-Identifier: Apache-2.0
"""The providers of routed experts that come from libraries, as far as it shows without the libraries."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from bench.moe_layers import Truth, error, mixed, modules, query, routing
from vllm.model_executor.layers.quantization.exl3_trellis.backends import (
    b12x,
    b12x_library,
    exllamav3_library,
    exllamav3_moe,
)
from vllm.model_executor.layers.quantization.exl3_trellis.expert_check import few_experts, random_experts, reference
from vllm.model_executor.layers.quantization.exl3_trellis.layout import trellis_shape
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Activation, Bank, Device, Window
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_rotated

CPU = torch.device("cpu")
H200 = Device(kind="cuda", sm=90, sms=132, smem=232_448)
GLM = {"k": 6144, "width": 512, "top_k": 8}
UNIFORM, MIXED = query([3] * 256, **GLM), query(mixed(3, 4, 148, 108), **GLM)
SMALL = {
    "uniform": query([3] * 4, 256, 256, 2),
    "mixed": query([3, 4, 4, 3], 256, 256, 2),
    "shared": query([4, 3, 3, 3], 256, 256, 2, shared_h=True),
    "sliced": query([4, 3, 3, 3], 256, 128, 2, slices=2),
}


def bank(rates, codebook: str = "mcg") -> Bank:
    return Bank(rates=tuple(map(float, rates)), codebooks=(codebook,) * len(rates))


def limited(limit: float | None) -> Activation:
    return Activation(name="silu", limit=limit)


# provider, layer, card, what the refusal says
REFUSALS = [
    (b12x, UNIFORM, Device(kind="cpu"), "runs on CUDA, not on cpu"),
    (b12x, UNIFORM, replace(H200, sm=80), "measured on SM90, SM120, SM121; this card is SM80"),
    (b12x, UNIFORM, replace(H200, sm=100), "measured on SM90, SM120, SM121; this card is SM100"),
    (b12x, query([3] * 4, 256, 256, 2, codebook="mul1"), H200, "codebook mul1, want mcg"),
    (b12x, query([2] * 4, 256, 256, 2), H200, "rates 2, want each one of 3, 4, 5, 6"),
    (b12x, query([7] * 4, 256, 256, 2), H200, "rates 7, want each one of 3, 4, 5, 6"),
    (b12x, replace(SMALL["uniform"], w2=bank([4] * 4)), H200, "an expert's gate, up and down must have the same rate"),
    (b12x, replace(SMALL["uniform"], w3=None), H200, "an expert's gate, up and down must have the same rate"),
    (b12x, query([3, 4, 5, 3], 256, 256, 2), H200, "3 rates in one layer, want at most 2"),
    (b12x, query(mixed(3, 4, 257, 3), 256, 256, 2), H200, "257 experts of one rate among others, want at most 256"),
    (b12x, query([3] * 4, 384, 256, 2), H200, "sizes 384 x 256, want multiples of 256"),
    (b12x, query([3] * 4, 256, 128, 2), H200, "sizes 256 x 128, want multiples of 256"),
    (b12x, query([3] * 4, 256, 256, 2, slices=2), H200, "2 slices an expert, want 1"),
    (b12x, replace(SMALL["uniform"], hidden=200), H200, "sizes 200 x 256 padded to 256 x 256, want no padding"),
    (b12x, replace(SMALL["uniform"], intermediate=250), H200, "sizes 256 x 250 padded to 256 x 256, want no padding"),
    (b12x, replace(UNIFORM, activation=Activation(name="gelu")), H200, "activation gelu, limit None, want silu"),
    (b12x, replace(UNIFORM, activation=limited(7.0)), H200, "activation silu, limit 7.0, want silu without a limit"),
    (b12x, replace(UNIFORM, weight_on_input=True), H200, "weights on the input, want them on the output"),
    (b12x, replace(UNIFORM, io_dtype="float32"), H200, "activations are float32, want one of bfloat16, float16"),
    (exllamav3_moe, UNIFORM, Device(kind="cpu"), "runs on CUDA, not on cpu"),
    (exllamav3_moe, UNIFORM, replace(H200, sm=75), "needs SM80 or newer, this card is SM75"),
    (exllamav3_moe, query([3] * 4, 256, 128, 2, codebook="3inst"), H200, "codebook 3inst, want mcg or mul1"),
    (
        exllamav3_moe,
        replace(SMALL["uniform"], w2=bank([3] * 4, "mul1")),
        H200,
        "an expert has the codebooks mcg and mul1, want one",
    ),
    (exllamav3_moe, replace(SMALL["uniform"], intermediate=250), H200, "250 channels in the middle, padded to 256"),
    (exllamav3_moe, replace(UNIFORM, activation=limited(7.0)), H200, "activation silu, limit 7.0, want silu without"),
    (exllamav3_moe, replace(UNIFORM, weight_on_input=True), H200, "weights on the input, want them on the output"),
]


@pytest.mark.parametrize(("provider", "layer", "device", "why"), REFUSALS)
def test_refusals(provider, layer, device, why):
    ok, found = provider.can_run(layer, device)
    assert not ok
    assert found.startswith(why)


def test_a_library_that_is_missing_is_the_last_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for module, why in (
        (b12x_library, "the package b12x is not installed"),
        (exllamav3_library, "the module exllamav3_ext is not installed"),
    ):
        module.missing.cache_clear()
        try:
            assert module.missing() == why
        finally:
            module.missing.cache_clear()


@pytest.mark.parametrize("name", SMALL)
def test_the_two_references_agree(name):
    """The one of start-up checks, and the float64 truth of tests and bench."""
    layer = SMALL[name]
    weights = random_experts(layer, CPU)
    x = torch.randn(5, layer.hidden)
    routes, ids = routing("zipf", 5, layer.experts, layer.top_k, CPU)
    ids[1, 0] = -1
    expected = Truth(layer, weights)(x, routes, ids)
    assert error(reference(layer, weights, x, routes, ids), expected) < 1e-5
    assert expected.std() == pytest.approx(1.0, rel=0.8)  # the scales keep the size of activations


@pytest.mark.parametrize(("name", "rows"), [("balanced", 64), ("zipf", 64), ("one_hot", 9)])
def test_routings(name, rows):
    weights, ids = routing(name, rows, 16, 4, CPU)
    counts = ids.long().flatten().bincount(minlength=16)
    assert torch.allclose(weights.sum(1), torch.ones(rows))
    assert all(len(set(row)) == 4 for row in ids.tolist())
    if name == "balanced":
        assert counts.tolist() == [16] * 16
    if name == "zipf":
        assert counts.max() > 2 * counts.float().mean()
    if name == "one_hot":
        assert counts.tolist() == [9] * 4 + [0] * 12


def test_nothing_depends_on_the_default_dtype():
    """vLLM loads models under one of 16 bits."""
    layer = SMALL["mixed"]
    (part,) = random_experts(layer, CPU)
    torch.set_default_dtype(torch.bfloat16)
    try:
        (again,) = random_experts(layer, CPU)
        prepared = b12x.prepare(layer, (again,))
        exllamav3_moe.prepare(layer, (again,))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(part.w13_svh, again.w13_svh)
    assert prepared["ones"].dtype == torch.float32


def test_few_experts_show_every_kind():
    few = few_experts(MIXED)
    assert few.w1.rates == (3.0, 4.0) * 4
    assert few_experts(replace(UNIFORM, top_k=11)).experts == 11


@pytest.mark.parametrize("name", SMALL)
def test_exllamav3_finds_every_tensor_of_every_expert(name):
    """The bytes at the places that its kernel would be told are those of the expert."""
    layer = SMALL[name]
    weights = random_experts(layer, CPU)
    prepared = exllamav3_moe.prepare(layer, weights)
    for index, part in enumerate(weights):
        for expert, found in modules(layer, part, range(layer.experts)):
            for place, shard in zip(prepared["places"], ("w1", "w3", "w2"), strict=True):
                k, n = layer.sizes(shard)
                matrix = "w2" if shard == "w2" else "w13"
                rate = layer.banks[shard].rates[expert]
                for row, kind, shape in ((0, "trellis", trellis_shape(k, n, rate)), (1, "suh", (k,)), (2, "svh", (n,))):
                    held = prepared[f"slice{index}_{matrix}_{kind}"].flatten()
                    start = int(place[row, expert]) // 2
                    tensor = held[start : start + torch.Size(shape).numel()].view(shape)
                    got = decode_rotated(tensor, "mcg") if kind == "trellis" else tensor
                    assert torch.equal(got, found[shard][row])


def test_exllamav3_takes_one_tier_at_a_time():
    prepared = exllamav3_moe.prepare(SMALL["mixed"], random_experts(SMALL["mixed"], CPU))
    assert prepared["tiers"].tolist() == [[0, 4, 4, 3], [4, 1, 2, 4]]


def test_exllamav3_stages_a_block_for_each_expert_at_once():
    plan = exllamav3_moe.plan(UNIFORM, H200, Window(name="parity", rows=4096, block=128))
    assert (plan.rows, plan.block, plan.groups) == (4096, 128, 16)
    assert plan.workspace_bytes == 4096 * 6144 * (2 + 4) + 16 * 128 * 2 * 2 * (6144 + 512)
    assert exllamav3_moe.plan(UNIFORM, H200, Window(name="parity", rows=7, block=128)).block == 7


def test_exllamav3_launches_every_route_once():
    """Two tiers; experts 0 and 1 have more rows than a block, and one route is nobody's."""
    layer = SMALL["mixed"]
    plan = exllamav3_moe.plan(layer, H200, Window(name="parity", rows=9, block=4))
    prepared = exllamav3_moe.prepare(layer, random_experts(layer, CPU))
    ids = torch.tensor([[0, 1]] * 6 + [[0, 3], [-1, 2], [3, 0]])
    weights = torch.arange(18.0).view(9, 2)
    routes, seen = [], []
    for part in exllamav3_moe.launches(plan, prepared, weights, ids):
        counts = part.counts.tolist()
        assert max(counts) <= 4
        assert sum(counts) == len(part.rows)
        experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
        assert {layer.w1.rates[expert] for expert in experts} == {part.rates[0]}
        routes += zip(part.rows.tolist(), experts, part.weights.tolist(), strict=True)
        seen.append((part.rates[0], counts))
    want = [(row, int(ids[row, k]), float(weights[row, k])) for row in range(9) for k in range(2) if ids[row, k] >= 0]
    assert sorted(routes) == sorted(want)
    assert seen == [
        (3.0, [4, 0, 0, 2, 0]),
        (3.0, [4, 0, 0, 0, 0]),
        (4.0, [0, 4, 1, 0, 0]),
        (4.0, [0, 2, 0, 0, 0]),
    ]


@pytest.mark.parametrize("name", ("uniform", "mixed", "shared"))
def test_b12x_prepares_views_in_the_order_of_tiers(name):
    layer = SMALL[name]
    (part,) = random_experts(layer, CPU)
    prepared = b12x.prepare(layer, (part,))
    order = sorted(range(4), key=lambda expert: (layer.w1.rates[expert], expert))
    assert prepared["w13"].data_ptr() == part.w13_trellis.data_ptr()
    assert prepared["w2"].data_ptr() == part.w2_trellis.data_ptr()
    for place, expert in enumerate(order):
        middle = torch.cat((*part.w13_svh[expert], part.w2_suh[expert]))
        assert torch.equal(prepared["middle"][place], middle)
        if not layer.shared_h:
            assert torch.equal(prepared["suh"][:, place], part.w13_suh[expert])
            assert torch.equal(prepared["svh"][place], part.w2_svh[expert])
    if layer.shared_h:
        assert torch.equal(prepared["suh"][:, 0], part.w13_suh)
        assert torch.equal(prepared["svh"][0], part.w2_svh)
    assert all(tensor.is_contiguous() for tensor in prepared.values())
    assert ("tiers" in prepared) == (len(layer.rates) > 1)
