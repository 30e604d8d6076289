# SPDX-License-Identifier: Apache-2.0
"""Slabs of routed experts: the documented order, loaded in place, complete or refused, one storage up to a kernel."""

from __future__ import annotations

import pytest
import torch

from tests.exl3_trellis.moe_layers import (
    PREFIX,
    load,
    make_layer,
    make_spec,
    params_of,
    query_of,
    slices_of,
    stored_tensors,
)
from vllm.model_executor.layers.quantization.exl3_trellis import backends, slabs
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import require_all_experts
from vllm.model_executor.layers.quantization.exl3_trellis.reference import unpack_signs
from vllm.model_executor.layers.quantization.exl3_trellis.safetensors_headers import CheckpointError

MIXED = {"w1": [3, 4, 3, 4, 4], "w3": [3, 4, 3, 4, 4], "w2": [3, 4, 3, 4, 4]}


def test_order_is_shard_major_then_offset_in_the_group():
    found = slabs.slabs("w13", {"w1": (3, 4, 3), "w3": (4, 4, 3)}, {"w1": (256, 128), "w3": (256, 128)})
    assert [(s.shard, s.rate, s.experts, s.shape) for s in found] == [
        ("w1", 3, (0, 2), (2, 16, 8, 48)),
        ("w3", 3, (2,), (1, 16, 8, 48)),
        ("w1", 4, (1,), (1, 16, 8, 64)),
        ("w3", 4, (0, 1), (2, 16, 8, 64)),
    ]
    assert [s.start for s in found] == [0, *(s.stop for s in found[:-1])]


@pytest.mark.parametrize("shared", [False, True])
def test_every_tensor_lies_where_the_layout_says(shared):
    spec = make_spec(MIXED, shared=shared)
    tensors = stored_tensors(spec)
    layer, parts = make_layer(spec, 256, tp=2, rank=1)
    load(layer, tensors)
    require_all_experts(layer)
    (part,) = slices_of(layer, spec, parts)
    query = query_of(spec, parts)
    rates = {shard: bank.rates for shard, bank in query.banks.items()}
    for matrix in ("w13", "w2"):
        for slab in slabs.slabs(matrix, rates, {shard: query.sizes(shard) for shard in query.banks}):
            view = getattr(part, f"{matrix}_trellis")[slab.start : slab.stop].view(slab.shape)
            for offset, expert in enumerate(slab.experts):
                assert torch.equal(view[offset], tensors[slab.shard, expert, 1, "trellis"])
    for expert in range(spec.count):
        who = -1 if shared else expert
        for index, shard in enumerate(("w1", "w3")):
            suh = part.w13_suh if shared else part.w13_suh[expert]
            assert torch.equal(suh[index], tensors[shard, who, 1, "suh"])
            assert torch.equal(part.w13_svh[expert, index], tensors[shard, expert, 1, "svh"])
        assert torch.equal(part.w2_suh[expert], tensors["w2", expert, 1, "suh"])
        assert torch.equal(part.w2_svh if shared else part.w2_svh[expert], tensors["w2", who, 1, "svh"])


def test_a_kernel_gets_the_very_storage_that_was_loaded():
    spec = make_spec(MIXED)
    layer, parts = make_layer(spec, 256)  # one rank runs both stored slices
    held = [param.data for name, param in params_of(layer) if not name.endswith("mcg")]
    load(layer, stored_tensors(spec))
    (backend,) = [b for b in backends.moe_candidates() if b.name == "torch"]
    prepared = backend.prepare(query_of(spec, parts), slices_of(layer, spec, parts), decode_once=False)
    assert sorted(tensor.data_ptr() for tensor in prepared.values()) == sorted(tensor.data_ptr() for tensor in held)
    assert sum(tensor.nbytes for tensor in prepared.values()) == sum(tensor.nbytes for tensor in held)


def test_tensor_parallel_cuts_both_sides_of_the_middle():
    """Stored whole, run on two ranks: columns of gate and up, rows of down, with the vectors of that side."""
    spec = make_spec({"w1": [3, 2.5], "w3": [4, 3], "w2": [2, 3]}, width=256, ranks=None, codebook="mul1")
    tensors = stored_tensors(spec)
    for rank in (0, 1):
        layer, parts = make_layer(spec, 256, tp=2, rank=rank)
        load(layer, tensors)
        (part,) = slices_of(layer, spec, parts)
        cut = slice(8 * rank, 8 * rank + 8)
        slab = slabs.slabs("w2", {"w2": (2, 3)}, {"w2": (128, 256)})[1]
        assert torch.equal(part.w2_trellis[slab.start :].view(slab.shape)[0], tensors["w2", 1, 0, "trellis"][cut])
        slab = slabs.slabs("w13", {"w1": (3, 2.5), "w3": (4, 3)}, {"w1": (256, 128), "w3": (256, 128)})[0]
        assert torch.equal(part.w13_trellis[: slab.stop].view(slab.shape)[0], tensors["w1", 1, 0, "trellis"][:, cut])
        channels = slice(128 * rank, 128 * rank + 128)
        assert torch.equal(part.w13_svh[0, 1], tensors["w3", 0, 0, "svh"][channels])
        assert torch.equal(part.w13_suh[0, 1], tensors["w3", 0, 0, "suh"])
        assert torch.equal(part.w2_suh[0], tensors["w2", 0, 0, "suh"][channels])


def test_packed_signs_become_vectors():
    spec = make_spec({"w1": [3, 3], "w3": [3, 3], "w2": [3, 3]}, ranks=None, signs=("su", "svh"), codebook="3inst")
    tensors = stored_tensors(spec)
    layer, parts = make_layer(spec, 128)
    load(layer, tensors)
    (part,) = slices_of(layer, spec, parts)
    assert torch.equal(part.w13_suh[1, 1], unpack_signs(tensors["w3", 1, 0, "su"]))
    assert torch.equal(part.w2_suh[0], unpack_signs(tensors["w2", 0, 0, "su"]))


def test_288_experts_in_one_tier():
    rates = [3] * 288
    spec = make_spec({"w1": rates, "w3": rates, "w2": rates}, hidden=128, ranks=1)
    tensors = {key: tensor for key, tensor in stored_tensors(spec).items() if key[1] in (0, 255, 256, 287)}
    layer, parts = make_layer(spec, 128)
    param = layer.w2_rank0_trellis
    load(layer, tensors)
    (part,) = slices_of(layer, spec, parts)
    tiles = part.w2_trellis.view(288, 8, 8, 48)
    for expert in (0, 255, 256, 287):
        assert torch.equal(tiles[expert], tensors["w2", expert, 0, "trellis"])
    with pytest.raises(CheckpointError, match="x: expert 288, shard w2: not among the tensors of"):
        param.weight_loader(param, tensors["w2", 0, 0, "trellis"], "x", "w2", 288)


def test_what_the_loader_was_given_may_change_afterwards():
    spec = make_spec({"w1": [3], "w3": [3], "w2": [3]}, ranks=1)
    tensors = stored_tensors(spec)
    layer, _ = make_layer(spec, 128)
    param, buffer = layer.w2_rank0_trellis, tensors["w2", 0, 0, "trellis"].clone()
    param.weight_loader(param, buffer, "x", "w2", 0)
    buffer.zero_()
    assert torch.equal(param.view(buffer.shape), tensors["w2", 0, 0, "trellis"])


NAME = f"{PREFIX}.1.down_proj.rank1"
AT = "expert 1, shard w2"
REFUSED = {
    "dtype of a trellis": ("trellis", lambda t: t.int(), f"{NAME}.trellis: {AT}: dtype torch.int32, want torch.int16"),
    "dtype of a vector": ("suh", lambda t: t.float(), f"{NAME}.suh: {AT}: dtype torch.float32, want torch.float16"),
    "rate": ("trellis", lambda t: t[..., :48], f"{NAME}.trellis: {AT}: shape [8, 16, 48], want [8, 16, 64]"),
    "marker": ("mcg", lambda t: torch.full_like(t, 5), f"{NAME}.mcg: {AT}: value 0x00000005, want 0xCBAC1FED"),
}


@pytest.mark.parametrize("suffix, change, message", REFUSED.values(), ids=REFUSED.keys())
def test_a_tensor_unlike_its_header_is_refused(suffix, change, message):
    """Whatever came before it: the dtype is the tensor kind's, not the first one's."""
    spec = make_spec({"w1": [3, 4], "w3": [3, 4], "w2": [3, 4]})
    tensors = stored_tensors(spec)
    layer, _ = make_layer(spec, 256, tp=2, rank=1)
    param = getattr(layer, f"w2_rank1_{suffix}")
    with pytest.raises(CheckpointError) as refused:
        param.weight_loader(param, change(tensors["w2", 1, 1, suffix]), "x", "w2", 1)
    assert refused.value.problems == [message]


@pytest.mark.parametrize("missing", ["trellis", "suh", "svh", "mcg"])
def test_an_unfilled_slab_is_not_handed_out(missing):
    spec = make_spec(MIXED)
    tensors = stored_tensors(spec)
    layer, _ = make_layer(spec, 256, tp=2, rank=0)
    held_back = tensors.pop(("w3", 2, 0, missing))
    load(layer, tensors)
    with pytest.raises(CheckpointError) as refused:
        require_all_experts(layer)
    assert refused.value.problems == [f"{PREFIX}.2.up_proj.rank0.{missing}: expert 2, shard w3: never loaded"]
    load(layer, {("w3", 2, 0, missing): held_back})
    require_all_experts(layer)
    with pytest.raises(CheckpointError, match="never loaded"):  # a reload starts from nothing
        require_all_experts(layer)


WHOLE = "cut between Hadamard blocks of 128: want one of"
TP = {
    "stored for 4, run on 3": ({"ranks": 4}, 512, 3, "4 stored ranks of 128 channels: want one of 1, 2, 4"),
    "stored for 2, run on 8": (
        {"ranks": 2, "width": 256},
        512,
        8,
        "2 stored ranks of 256 channels: want one of 1, 2, 4",
    ),
    "ordinary": ({"ranks": None, "width": 384}, 384, 2, f"intermediate size 384, {WHOLE} 1, 3"),
    "ordinary, padded": ({"ranks": None, "width": 256}, 192, 2, f"intermediate size 192, {WHOLE} 1"),
}


@pytest.mark.parametrize("sizes, intermediate, tp, message", TP.values(), ids=TP.keys())
def test_refused_tensor_parallel_sizes_name_those_that_work(sizes, intermediate, tp, message):
    spec = make_spec({"w1": [3], "w3": [3], "w2": [3]}, **sizes)
    with pytest.raises(CheckpointError) as refused:
        slabs.local_parts(spec, intermediate, tp, 0, PREFIX)
    assert refused.value.problems == [f"{PREFIX}: tensor parallel size {tp} for experts with {message}"]


def test_another_intermediate_size_is_refused():
    spec = make_spec({"w1": [3], "w3": [3], "w2": [3]}, ranks=2)
    with pytest.raises(CheckpointError, match=r"intermediate size 2 x 128 stored, want 512 as the model says"):
        slabs.local_parts(spec, 512, 2, 0, PREFIX)
