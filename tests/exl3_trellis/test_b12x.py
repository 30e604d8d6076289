# SPDX-License-Identifier: Apache-2.0
"""b12x itself, as far as it shows without a card: where it places buffers, what it calls its arguments, what it checks.

Skipped where the package is not installed; the CUDA requirements bring it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.moe_layers import mixed, query
from vllm.model_executor.layers.quantization.exl3_trellis.backends import b12x, b12x_library, b12x_mixed, b12x_uniform
from vllm.model_executor.layers.quantization.exl3_trellis.expert_check import random_experts
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, Window

CPU = torch.device("cpu")
H200 = Device(kind="cuda", sm=90, sms=132, smem=232_448)
RTX = Device(kind="cuda", sm=120, sms=188, smem=101_376)
DECODE, PREFILL = Window(name="decode", rows=32, block=8), Window(name="prefill", rows=4096, block=64)
GLM = {"k": 6144, "width": 512, "top_k": 8}
UNIFORM, MIXED = query([3] * 256, **GLM), query(mixed(3, 4, 148, 108), **GLM)
SMALL = {"uniform": query([3] * 4, 256, 256, 2), "mixed": query([3, 4, 4, 3], 256, 256, 2)}
pytestmark = pytest.mark.skipif(importlib.util.find_spec("b12x") is None, reason="b12x is not installed")


@pytest.fixture
def card(monkeypatch):
    """132 multiprocessors, where the library asks the driver for them."""
    from b12x._lib import utils

    monkeypatch.setitem(utils._num_sm_cache, 0, 132)


def test_the_installed_b12x_is_the_pinned_one():
    assert b12x_library.missing() == ""
    assert b12x.can_run(UNIFORM, H200) == (True, "")
    assert b12x.can_run(MIXED, RTX) == (True, "")


def test_another_version_or_interface_is_refused(monkeypatch):
    try:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda name: "1.6.0")
            b12x_library.missing.cache_clear()
            assert b12x_library.missing() == "b12x 1.6.0 is installed, want 1.5.1"
        host = b12x_library.USED[f"{b12x_library.W4A16}.host"]
        monkeypatch.setitem(host, "max_packed_route_slots", ("numel", "rows"))
        b12x_library.missing.cache_clear()
        assert b12x_library.missing() == "b12x.moe._shared.kernels.w4a16.host.max_packed_route_slots lacks rows"
        monkeypatch.setitem(host, "max_packed_route_slots", ("numel",))
        monkeypatch.setitem(host, "gone", ("numel",))
        b12x_library.missing.cache_clear()
        assert b12x_library.missing() == "b12x.moe._shared.kernels.w4a16.host.gone lacks numel"
    finally:
        b12x_library.missing.cache_clear()


# layer, window, MiB to one decimal; the uniform ones were seen on the card itself
SIZES = [(UNIFORM, DECODE, 26.5), (UNIFORM, PREFILL, 1348.6), (MIXED, DECODE, 24.0), (MIXED, PREFILL, 1026.2)]


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("layer", "window", "mib"), SIZES)
def test_sizes(layer, window, mib):
    plan = b12x.plan(layer, H200, window)
    assert round(plan.workspace_bytes / 2**20, 1) == mib
    assert plan.block == window.block
    assert hash(plan) == hash(b12x.plan(layer, H200, window))


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("rows, block", [(1, 8), (32, 8), (33, 16), (4096, 64)])
def test_mixed_buffers_are_those_that_the_library_would_make(rows, block):
    """Name by name; the one of barriers is as large as any of its kernels may need."""
    from b12x.moe._shared.kernels.w4a16 import mixed_trellis

    layer = replace(MIXED, k=512, hidden=512)
    ours = b12x_mixed.buffers(layer, 132, rows, block)
    launch = SimpleNamespace(
        size_m=rows,
        top_k=layer.top_k,
        moe_block_size=block,
        intermediate_size=layer.width,
        hidden_size=layer.k,
        max_m_blocks=ours["block_expert_ids"][0][0],
        blocks_per_sm=4,
        topk_sum=SimpleNamespace(route_num_experts=layer.experts),
    )
    theirs = vars(mixed_trellis.make_mixed_trellis_buffers(launch, device=CPU, sms=132))
    assert theirs.pop("fc2") is theirs["rotation_gate"]
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in theirs.items()} == ours


def test_mixed_maps_are_those_of_the_library():
    from b12x.moe._shared.kernels.w4a16.mixed_trellis import build_tiered_maps

    prepared = b12x.prepare(SMALL["mixed"], random_experts(SMALL["mixed"], CPU))
    tiers, descriptors = build_tiered_maps((0, 3), (1, 2), device=CPU)
    assert torch.equal(prepared["tiers"], tiers)
    assert torch.equal(prepared["descriptors"], descriptors)


def test_tiers_pass_the_checks_of_the_library():
    from b12x.moe._shared.kernels.w4a16 import mixed_trellis

    layer = SMALL["mixed"]
    prepared = b12x.prepare(layer, random_experts(layer, CPU))
    for tier, bits in zip(b12x_mixed._tiers(layer, prepared, (2, 2)), (3, 4), strict=True):
        mixed_trellis._validate_mixed_trellis_tier_storage(
            name="tier",
            tier=tier,
            expected_experts=2,
            bits=bits,
            hidden_size=layer.k,
            intermediate_size=layer.width,
            device=CPU,
        )


@pytest.mark.usefixtures("card")
def test_weights_are_handed_over_as_views():
    layer = SMALL["uniform"]
    prepared = b12x.prepare(layer, random_experts(layer, CPU))
    experts = b12x_uniform._experts(layer, b12x_uniform._weight_plan(layer), prepared)
    assert experts.w1_fp4.data_ptr() == prepared["w13"].data_ptr()
    assert experts.representation_for("w4a16").down_svh is prepared["svh"]


# card, rates, wanted block, block that fits
BLOCKS = [(H200, (3,), 64, 64), (RTX, (3,), 64, 64), (RTX, (3, 4), 64, 64), (RTX, (3, 5), 64, 48), (RTX, (6,), 8, 8)]


@pytest.mark.parametrize(("device", "rates", "wanted", "fits"), BLOCKS)
def test_blocks_shrink_until_they_fit(device, rates, wanted, fits):
    layer = query([*rates] * 4, 256, 256, 2)
    kind = b12x_uniform if len(rates) == 1 else b12x_mixed
    assert b12x_library.fitting_block(layer, device, wanted, kind.TILES, kind.SHARED_RESERVE) == fits


def test_an_unknown_block_is_refused():
    with pytest.raises(ValueError, match="b12x: blocks of 24 rows, want one of 8, 16, 32, 48, 64"):
        b12x_library.fitting_block(UNIFORM, H200, 24, b12x_uniform.TILES, 0)


def test_buckets_reach_the_odd_and_the_even():
    assert b12x_library.row_buckets(9) == (1, 2, 3, 4, 5, 8, 9)
