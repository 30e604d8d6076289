# SPDX-License-Identifier: Apache-2.0
"""The metadata of rank-sliced containers: what is accepted, and each refusal word for word."""

from __future__ import annotations

import copy
import re

import pytest

from vllm.model_executor.layers.quantization.exl3_trellis import rank_sliced
from vllm.model_executor.layers.quantization.exl3_trellis.safetensors_headers import CheckpointError

SECTION = {
    "format": "exl3-trellis",
    "bits": "mixed",
    "codebook": "mcg",
    "experts_per_layer": 4,
    "moe_layers": [1, 3],
    "tensor_schema": "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}",
    "tp": 2,
    "k_values": [3, 4],
    "bits_per_expert": "tier_bitmap.json:k",
    "scope": "anything",
}
CONFIG = {"n_routed_experts": 4, "num_hidden_layers": 3, "num_nextn_predict_layers": 1, "hybrid_tr3_tail": SECTION}
BITMAP = {
    "1": {"k": [3, 4, 3, 4], "tail_tr3": [0, 1, 2, 3]},
    "2": {"k": [4, 4, 4, 4]},
    "3": {"tail_tr3": [3, 2, 1, 0]},
}
SHARED_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"


def read(section: dict, bitmap: object = BITMAP, **config: object) -> rank_sliced.RankSliced | None:
    """The container of CONFIG with the keys of `section` changed; None removes one."""
    merged = {key: value for key, value in (SECTION | section).items() if value is not None}

    def read_json(name: str) -> object:
        if name != "tier_bitmap.json" or bitmap is None:
            raise FileNotFoundError(f"no {name}")
        return bitmap

    return rank_sliced.read_metadata(CONFIG | {"hybrid_tr3_tail": merged} | config, read_json)


def test_no_section_is_no_container():
    assert rank_sliced.read_metadata({"n_routed_experts": 4}, lambda name: None) is None


def test_mixed():
    container = read({})
    assert (container.ranks, container.experts, container.layers, container.rates) == (2, 4, (1, 3), (3, 4))
    assert container.by_layer == {1: bytes([3, 4, 3, 4]), 2: bytes([4, 4, 4, 4])}
    assert not container.shared_h
    assert container.names() == {f"model.layers.{layer}.mlp.experts": layer for layer in (1, 2, 3)}


@pytest.mark.parametrize("layout", [None, "per_expert_v1"])
def test_uniform(layout):
    container = read({"bits": 3, "k_values": None, "bits_per_expert": None, "rotation_layout": layout}, bitmap=None)
    assert (container.rates, container.by_layer, container.shared_h) == ((3,), {}, False)


def test_shared_rotations():
    assert read({"rotation_layout": "shared_h_v1", "shared_h_tensor_schema": SHARED_SCHEMA}).shared_h


def test_counts_of_a_wrapped_model():
    text = {"num_experts": 4, "num_hidden_layers": 4}
    config = {"hybrid_tr3_tail": SECTION, "text_config": text}
    assert rank_sliced.read_metadata(config, lambda name: BITMAP).experts == 4


UNIFORM = {"k_values": None, "bits_per_expert": None}
RATES = 'want a whole number 1..8, or "mixed"'

# name -> (keys changed, message after "config.json: hybrid_tr3_tail.")
BROKEN = {
    "unknown format": ({"format": "exl4"}, "format: 'exl4', want 'exl3-trellis'"),
    "no format": ({"format": None}, "format: missing, want 'exl3-trellis'"),
    "unknown codebook": ({"codebook": "mul1"}, "codebook: 'mul1', want 'mcg'"),
    "unknown schema": (
        {"tensor_schema": "model.layers.{L}.experts.{E}"},
        "tensor_schema: 'model.layers.{L}.experts.{E}', want '" + SECTION["tensor_schema"] + "'",
    ),
    "unknown layout": (
        {"rotation_layout": "shared_h_v2"},
        "rotation_layout: 'shared_h_v2', want no such key or 'per_expert_v1' or 'shared_h_v1'",
    ),
    "shared rotations without their schema": (
        {"rotation_layout": "shared_h_v1"},
        f"shared_h_tensor_schema: missing, want '{SHARED_SCHEMA}'",
    ),
    "a schema without shared rotations": (
        {"shared_h_tensor_schema": SHARED_SCHEMA},
        f"shared_h_tensor_schema: '{SHARED_SCHEMA}', want no such key",
    ),
    "half rate": (UNIFORM | {"bits": 2.5}, f"bits: 2.5, {RATES}"),
    "rate 9": (UNIFORM | {"bits": 9}, f"bits: 9, {RATES}"),
    "rate true": (UNIFORM | {"bits": True}, f"bits: True, {RATES}"),
    "rates of a uniform one": (
        {"bits": 3, "bits_per_expert": None},
        'k_values: [3, 4], want no such key unless bits is "mixed"',
    ),
    "half rate among rates": (
        {"k_values": [2.5, 4]},
        "k_values: [2.5, 4], want a list of different whole numbers 1..8",
    ),
    "rate twice": ({"k_values": [3, 3]}, "k_values: [3, 3], want a list of different whole numbers 1..8"),
    "no rates": ({"k_values": None}, "k_values: missing, want a list of different whole numbers 1..8"),
    "no ranks": ({"tp": 0}, "tp: 0, want a whole number, 1 or more"),
    "experts of another model": ({"experts_per_layer": 8}, "experts_per_layer: 8, want 4, as n_routed_experts says"),
    "layers beyond the MTP layer": (
        {"moe_layers": [1, 4]},
        "moe_layers: [1, 4], want first <= last < 4, the model's layers with its MTP layers",
    ),
    "one layer": ({"moe_layers": [1]}, "moe_layers: [1], want [first, last]"),
    "bitmap elsewhere": (
        {"bits_per_expert": "../tier_bitmap.json:k"},
        "bits_per_expert: '../tier_bitmap.json:k', want \"file.json:field\", a file beside config.json",
    ),
}


@pytest.mark.parametrize("change, message", BROKEN.values(), ids=BROKEN.keys())
def test_refusal(change, message):
    with pytest.raises(CheckpointError) as refused:
        read(change)
    assert refused.value.problems == [f"config.json: hybrid_tr3_tail.{message}"]


def _bitmap(layer: str, **changes: object) -> dict:
    table = copy.deepcopy(BITMAP)
    table[layer].update(changes)
    return table


BROKEN_BITMAPS = {
    "missing file": (
        None,
        "tier_bitmap.json: unreadable (no tier_bitmap.json); hybrid_tr3_tail.bits_per_expert names it",
    ),
    "not an object": ([], "tier_bitmap.json: list, want an object with an entry per layer"),
    "missing layer": (
        {"1": BITMAP["1"], "3": BITMAP["3"]},
        "tier_bitmap.json: layer 2: missing, want an object with 'k'",
    ),
    "too few": (_bitmap("1", k=[3, 4]), "tier_bitmap.json: layer 1: k: 2 entries, want 4, one for each expert"),
    "rate not listed": (
        _bitmap("1", k=[3, 5, 5, 4]),
        "tier_bitmap.json: layer 1: k: expert 1 has 5 and 1 more experts, want 3 or 4",
    ),
    "rate 2.5": (_bitmap("2", k=[4, 4, 4, 2.5]), "tier_bitmap.json: layer 2: k: expert 3 has 2.5, want 3 or 4"),
    "experts in another format": (
        _bitmap("1", tail_tr3=[0, 1]),
        "tier_bitmap.json: layer 1: tail_tr3: 2 experts, want all 4: experts kept in another format are not supported",
    ),
    "nothing said": ({**BITMAP, "3": {}}, "tier_bitmap.json: layer 3: neither 'k' nor 'tail_tr3', want one of them"),
}


@pytest.mark.parametrize("bitmap, message", BROKEN_BITMAPS.values(), ids=BROKEN_BITMAPS.keys())
def test_refusal_of_a_bitmap(bitmap, message):
    with pytest.raises(CheckpointError) as refused:
        read({}, bitmap)
    assert refused.value.problems == [message]


def test_every_fault_at_once():
    with pytest.raises(CheckpointError) as refused:
        read({"format": "x", "tp": "2", "k_values": [], "moe_layers": None})
    keys = [re.match(r"config.json: hybrid_tr3_tail.(\w+)", problem)[1] for problem in refused.value.problems]
    assert sorted(keys) == ["format", "k_values", "moe_layers", "tp"]


@pytest.mark.parametrize("name", ["r7_routed_experts", "exl3-v1", "btx"])
def test_other_containers_are_refused_by_name(name):
    message = f"config.json: {name}: another container, which is not supported; want EXL3 tensors"
    configs = [{name: {}}, {"quantization_config": {"quant_method": name}}, {"hybrid_tr3_tail": {"format": name}}]
    for config in configs:
        with pytest.raises(CheckpointError) as refused:
            rank_sliced.believed_quantization(config, config.get("quantization_config"))
        assert refused.value.problems == [message]


def test_the_section_wins_over_what_is_claimed():
    for claimed in (None, {"quant_method": "modelopt"}):
        believed = rank_sliced.believed_quantization(CONFIG, claimed)
        assert believed == {"quant_method": "exl3", "hybrid_tr3_tail": SECTION}
    assert rank_sliced.believed_quantization({}, {"quant_method": "fp8"}) == {"quant_method": "fp8"}
    assert rank_sliced.believed_quantization({}, None) is None
