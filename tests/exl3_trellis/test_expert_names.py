# SPDX-License-Identifier: Apache-2.0
"""Names of routed experts' tensors: which a model wants, and what its loaders find them as."""

from __future__ import annotations

import pytest
import torch

from tests.exl3_trellis.moe_layers import make_spec
from vllm.model_executor.layers.quantization.exl3_trellis.expert_names import (
    HeldExperts,
    WantedExperts,
    find_experts,
    local_name,
    wanted_experts,
)
from vllm.model_executor.layers.quantization.exl3_trellis.layout import RankSlice
from vllm.model_executor.layers.quantization.exl3_trellis.safetensors_headers import CheckpointError

L3 = "model.layers.3.mlp.experts"
LOCAL = {
    f"{L3}.0.down_proj.rank0.mcg": f"{L3}.0.down_proj.rank0_mcg",
    f"{L3}.255.up_proj.rank12.trellis": f"{L3}.255.up_proj.rank12_trellis",
    f"{L3}.shared_h.gate_proj.rank3.suh": f"{L3}.0.gate_proj.shared_h_rank3_suh",
    f"{L3}.17.gate_proj.trellis": f"{L3}.17.gate_proj.trellis",
    "model.layers.3.mlp.shared_experts.gate_proj.weight": "model.layers.3.mlp.shared_experts.gate_proj.weight",
    "model.rank0.weight": "model.rank0.weight",
}


@pytest.mark.parametrize("stored, local", LOCAL.items())
def test_local_name(stored, local):
    assert local_name(stored) == local


def _held(prefix: str, ranks: int | None, *mine: int) -> HeldExperts:
    spec = make_spec({"w1": [3], "w3": [3], "w2": [3]}, ranks=ranks)
    return HeldExperts(prefix=prefix, spec=spec, parts=tuple(RankSlice(stored_rank=r, span=(0, 128)) for r in mine))


def test_other_ranks_and_layers_are_skipped():
    wanted = WantedExperts([_held(L3, 4, 2, 3), _held("model.layers.4.mlp.experts", None, 0)])
    kept = [
        f"{L3}.0.up_proj.rank2.suh",
        f"{L3}.shared_h.up_proj.rank3.suh",
        "model.layers.4.mlp.experts.9.up_proj.trellis",
        "model.layers.9.mlp.gate_proj.trellis",
        "model.layers.3.mlp.shared_experts.up_proj.trellis",
        "model.layers.9.mlp.experts.3.up_proj.weight",  # unquantized experts are none of ours
        "lm_head.trellis",
    ]
    skipped = [
        f"{L3}.0.up_proj.rank1.suh",
        f"{L3}.shared_h.up_proj.rank0.suh",
        f"{L3}.0.up_proj.trellis",
        "model.layers.4.mlp.experts.9.up_proj.rank0.trellis",
        "model.layers.9.mlp.experts.9.up_proj.trellis",  # another stage's layer, or the MTP layer
        "model.layers.13.mlp.experts.0.up_proj.rank2.mcg",
    ]
    assert [name for name in kept + skipped if not wanted.skips(name)] == kept
    streamed = list(wanted.stream((name, index) for index, name in enumerate(kept + skipped)))
    assert streamed == [(local_name(name), index) for index, name in enumerate(kept)]


def test_what_a_model_wants_is_told_by_its_layers():
    class Config:
        quantization = "exl3"

    model = torch.nn.Sequential(torch.nn.Module(), torch.nn.Module())
    model[0].exl3_experts = _held(L3, 2, 1)
    wanted = wanted_experts(model, Config())
    assert wanted.ranks == {L3: {"1"}}
    Config.quantization = "fp8"
    assert wanted_experts(model, Config()) is None


def test_finding_a_layers_experts():
    experts = {L3: object(), "model.layers.5.mlp.experts": object()}
    modules = {L3: L3, "language_model.model.layers.5.mlp.experts": "model.layers.5.mlp.experts", "lm_head": "lm_head"}
    assert find_experts(modules, experts, L3) == L3
    assert find_experts(modules, experts, "model.layers.3.mtp_block.mlp.experts") == L3
    found = find_experts(modules, experts, "language_model.model.layers.5.mlp.experts")
    assert found == "model.layers.5.mlp.experts"
    assert find_experts(modules, experts, "model.layers.4.mlp.experts") is None
    assert find_experts(modules, experts, "mtp.layers.3.mlp.experts") is None
    with pytest.raises(CheckpointError, match=r"but the model looks for the layer's experts as other\.layers\.3"):
        find_experts(modules, experts, "other.layers.3.experts")
