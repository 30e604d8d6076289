# SPDX-License-Identifier: Apache-2.0
"""Synthetic checkpoints: the tensors the format wants, loadable as the model they claim to be, the same every time."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from tests.oracle import Oracle
from tests.validate.checkpoints import config_of, headers, make, wrong_markers

# What to write -> tensors that must be there, as (dtype, shape), and tensors that must not (None).
BOTH = "moe --layout {} --rates 3,4 --tp 2"
CASES: dict[str, dict[str, tuple[str, list[int]] | None]] = {
    "dense": {
        "lm_head.trellis": ("I16", [16, 32, 48]),
        "lm_head.mcg": ("I32", []),
        "model.layers.1.self_attn.k_proj.suh": ("F16", [256]),
        "model.layers.1.self_attn.k_proj.svh": ("F16", [256]),
        "model.layers.1.self_attn.k_proj.weight": None,
        "model.embed_tokens.weight": ("BF16", [512, 256]),
    },
    "dense --codebook 3inst --rates 1,8 --head-rate 6": {
        "model.layers.0.self_attn.q_proj.trellis": ("I16", [16, 32, 16]),
        "model.layers.0.self_attn.k_proj.trellis": ("I16", [16, 16, 128]),
        "model.layers.0.self_attn.q_proj.mcg": None,
        "lm_head.trellis": ("I16", [16, 32, 96]),
    },
    "dense --codebook mul1 --rates 1.5,2.5,3.5 --arch qwen3": {
        "model.layers.0.self_attn.q_proj.trellis": ("I16", [16, 32, 24]),
        "model.layers.0.self_attn.k_proj.trellis": ("I16", [16, 16, 40]),
        "model.layers.0.self_attn.v_proj.trellis": ("I16", [16, 16, 56]),
        "model.layers.0.self_attn.v_proj.mul1": ("I32", []),
    },
    # No multiple of 128: hidden 320 -> 384, q 192 -> 256, kv 64 -> 128, MLP 650 -> 768, vocabulary 500 -> 512.
    "dense --arch qwen2 --hidden 320 --heads 3 --kv-heads 1 --head-dim 64 --intermediate 650 --vocab 500": {
        "model.layers.0.self_attn.q_proj.trellis": ("I16", [24, 16, 48]),
        "model.layers.0.self_attn.k_proj.trellis": ("I16", [24, 8, 48]),
        "model.layers.0.self_attn.k_proj.bias": ("F16", [128]),
        "model.layers.0.self_attn.o_proj.trellis": ("I16", [16, 24, 48]),
        "model.layers.0.mlp.down_proj.suh": ("F16", [768]),
        "lm_head.svh": ("F16", [512]),
        "model.embed_tokens.weight": ("BF16", [500, 320]),
    },
    "dense --signs packed": {
        "model.layers.0.mlp.gate_proj.su": ("I16", [16]),
        "model.layers.0.mlp.gate_proj.sv": ("I16", [32]),
        "model.layers.0.mlp.gate_proj.suh": None,
        "model.layers.0.mlp.gate_proj.svh": None,
    },
    "dense --signs packed-inputs --bias": {
        "model.layers.0.mlp.gate_proj.su": ("I16", [16]),
        "model.layers.0.mlp.gate_proj.svh": ("F16", [512]),
        "model.layers.0.mlp.down_proj.bias": ("F16", [256]),
    },
    "dense --tie --plain *.k_proj": {
        "model.layers.0.self_attn.k_proj.weight": ("BF16", [256, 256]),
        "model.layers.0.self_attn.k_proj.trellis": None,
        "lm_head.trellis": ("I16", [16, 32, 48]),
    },
    "dense --slices 2 --intermediate 700": {
        "model.layers.0.mlp.gate_proj.slice.0.trellis": ("I16", [16, 16, 48]),
        "model.layers.0.mlp.down_proj.slice.1.trellis": ("I16", [32, 16, 48]),
        "model.layers.0.mlp.down_proj.trellis": None,
    },
    "dense --arch llava": {
        "model.language_model.layers.0.mlp.up_proj.trellis": ("I16", [16, 32, 48]),
        "lm_head.trellis": ("I16", [16, 32, 48]),
    },
    "moe --family qwen3_moe --rates 2,3,4": {
        "model.layers.1.mlp.experts.0.gate_proj.trellis": ("I16", [16, 16, 64]),  # one rate a projection
        "model.layers.1.mlp.experts.7.gate_proj.trellis": ("I16", [16, 16, 64]),
        "model.layers.1.mlp.experts.7.up_proj.trellis": ("I16", [16, 16, 32]),
        "model.layers.1.mlp.gate.weight": ("BF16", [8, 256]),
        "model.layers.0.mlp.gate_proj.mcg": ("I32", []),
    },
    "moe --family deepseek_v2": {
        "model.layers.0.self_attn.q_proj.trellis": ("I16", [16, 48, 48]),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.svh": ("F16", [640]),  # 512 + 64 channels
        "model.layers.0.self_attn.kv_b_proj.weight": ("BF16", [1024, 512]),
    },
    "moe --family glm_moe_dsa": {
        "model.layers.0.self_attn.indexer.wq_b.trellis": ("I16", [16, 32, 48]),
        "model.layers.0.self_attn.indexer.wk.weight": ("BF16", [128, 256]),
    },
    BOTH.format("per_expert"): {
        "model.layers.1.mlp.experts.0.gate_proj.rank1.suh": ("F16", [256]),
        "model.layers.1.mlp.experts.0.gate_proj.rank1.svh": ("F16", [128]),
        "model.layers.1.mlp.experts.0.down_proj.rank1.suh": ("F16", [128]),
        "model.layers.1.mlp.experts.0.down_proj.rank1.mcg": ("I32", []),
        "model.layers.1.mlp.shared_experts.up_proj.weight": ("BF16", [256, 256]),
    },
    BOTH.format("shared_h"): {
        "model.layers.1.mlp.experts.0.gate_proj.rank1.suh": None,
        "model.layers.1.mlp.experts.0.gate_proj.rank1.svh": ("F16", [128]),
        "model.layers.1.mlp.experts.0.down_proj.rank1.svh": None,
        "model.layers.1.mlp.experts.shared_h.gate_proj.rank1.suh": ("F16", [256]),
        "model.layers.1.mlp.experts.shared_h.up_proj.rank0.suh": ("F16", [256]),
        "model.layers.1.mlp.experts.shared_h.down_proj.rank1.svh": ("F16", [256]),
        "model.layers.1.mlp.experts.shared_h.down_proj.rank1.suh": None,
    },
    "moe --family deepseek_v3 --layout shared_h --rates 4 --tp 4 --moe-intermediate 512 --mtp 1 --file-per-layer": {
        "model.layers.3.mlp.experts.7.down_proj.rank3.trellis": ("I16", [8, 16, 64]),
        "model.layers.3.eh_proj.weight": ("BF16", [256, 512]),
        "model.layers.3.shared_head.head.weight": ("BF16", [512, 256]),
    },
}


@pytest.mark.parametrize("form", CASES)
def test_tensors_and_model(form, tmp_path):
    """The tensors are those the format wants, and together exactly the model that config.json names."""
    found = headers(make(tmp_path / "made", form))
    assert {name: found.get(name) for name in CASES[form]} == CASES[form]
    assert wrong_markers(tmp_path / "made") == []
    ids = torch.randint(0, 500, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    logprobs = Oracle(tmp_path / "made").logprobs(ids)
    assert torch.isfinite(logprobs).all()
    assert 0.5 < float(logprobs.std()) < 4, (
        "weights of the wrong size make a model that says the same whatever it reads"
    )
    assert len(set(logprobs.argmax(-1).tolist())) > 12


@pytest.mark.parametrize("form", ["dense --rates 2,4 --signs packed-outputs", "moe --layout per_expert --rates 3,4"])
def test_same_seed_same_bytes(form, tmp_path):
    first, second, other = (
        make(tmp_path / name, f"{form} --seed {seed}") for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    files = sorted(path.name for path in first.iterdir())
    assert [(second / name).read_bytes() for name in files] == [(first / name).read_bytes() for name in files]
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_shards(tmp_path):
    whole = headers(make(tmp_path / "whole", "dense"))
    cut = make(tmp_path / "cut", "dense --shard-size 200KB")
    index = config_of(cut, "model.safetensors.index.json")
    files = sorted(path.name for path in cut.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert set(index["weight_map"]) == set(whole)
    assert headers(cut) == whole
    for name, file in index["weight_map"].items():
        with safe_open(cut / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - not a dictionary
    assert max((cut / file).stat().st_size for file in files) < 280_000, "the embedding alone has 262,144 bytes"
    layers = make(tmp_path / "layers", "dense --layers 3 --file-per-layer")
    assert len(list(layers.glob("*.safetensors"))) == 4, "one a layer, and the head"


def test_agreeing_draft(tmp_path):
    """The draft reads only the token's embedding and has the target's head; the target hardly leaves the embedding."""
    folder = make(tmp_path / "made", "moe --mtp 1 --agreeing")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("model.layers.3.eh_proj.weight").float(), torch.eye(256, 512))
        for kind in ("trellis", "suh", "svh"):
            head = file.get_tensor(f"lm_head.{kind}")
            assert torch.equal(file.get_tensor(f"model.layers.3.shared_head.head.{kind}"), head)
        embedding = file.get_tensor("model.embed_tokens.weight")
        assert torch.equal(file.get_tensor("model.layers.3.embed_tokens.weight"), embedding)
        norm = file.get_tensor("model.norm.weight").float()
    oracle = Oracle(folder)
    ids = torch.randint(0, 500, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    head = oracle.model.get_output_embeddings().weight
    alone = torch.nn.functional.rms_norm(embedding[ids].float(), (256,), norm, 1e-5) @ head.T
    agree = (alone.argmax(-1) == oracle.logprobs(ids).argmax(-1)).float().mean()
    assert agree > 0.75, agree
