# SPDX-License-Identifier: Apache-2.0
"""What `bench loading` compares with: experts kept one by one and joined afterwards lie as the loader's slabs do."""

from __future__ import annotations

import torch

from bench.loading import median, repacking
from tests.exl3_trellis.moe_layers import PREFIX, load, make_layer, make_spec, slices_of, stored_tensors
from vllm.model_executor.layers.quantization.exl3_trellis import moe_method

SPEC = make_spec({"w1": [3, 4, 3], "w3": [3, 4, 3], "w2": [3, 4, 3]})


def loaded() -> tuple[int, list[dict[str, torch.Tensor]]]:
    """How many elements a layer holds when all tensors have arrived, and its slices afterwards."""
    _, parts = make_layer(SPEC, 256)
    layer = torch.nn.Module()
    moe_method.create_expert_params(layer, SPEC, parts, PREFIX)
    load(layer, stored_tensors(SPEC))
    before = sum(param.numel() for param in layer.parameters())
    moe_method.require_all_experts(layer)
    return before, [vars(part) for part in slices_of(layer, SPEC, parts)]


def test_repacked_experts_are_the_same():
    whole, slabs = loaded()
    with repacking():
        empty, joined = loaded()
    assert whole > empty == 0
    for one, other in zip(slabs, joined, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert loaded()[0] == whole  # nothing stays replaced


def test_the_run_in_the_middle_counts_unless_one_failed():
    assert median([{"seconds": 3.0}, {"seconds": 1.0}, {"seconds": 2.0}]) == {"seconds": 2.0}
    assert median([{"seconds": 3.0}, {"error": "no"}]) == {"error": "no"}
