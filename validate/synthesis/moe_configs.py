# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts families: sizes and config.json."""

from __future__ import annotations

from dataclasses import dataclass

from .tokenizer import BOS, EOS


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between mixture-of-experts architectures.

    architecture   class name in config.json
    latent         attention is multi-head latent attention (MLA), else grouped-query attention
    q_lora         MLA compresses the queries too
    head_norms     q and k have a norm over each head
    score_bias     the router has a correction bias for choosing experts
    shared_expert  every MoE layer has an expert that all tokens use
    drafts         the family has MTP layers
    indexer        sparse attention with an indexer in every layer
    """

    architecture: str
    latent: bool = False
    q_lora: bool = False
    head_norms: bool = False
    score_bias: bool = False
    shared_expert: bool = True
    drafts: bool = False
    indexer: bool = False


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", head_norms=True, shared_expert=False),
    "glm4_moe": Family(architecture="Glm4MoeForCausalLM", score_bias=True, drafts=True),
    "deepseek_v2": Family(architecture="DeepseekV2ForCausalLM", latent=True),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM", latent=True, q_lora=True, score_bias=True, drafts=True),
    "glm_moe_dsa": Family(
        architecture="GlmMoeDsaForCausalLM", latent=True, q_lora=True, score_bias=True, drafts=True, indexer=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, in channels and counts. The latent ones matter to MLA only, kv_heads and head_dim to the rest.

    moe_intermediate  of one routed or shared expert, all ranks together
    first_dense       leading layers with a dense MLP
    drafts            MTP layers after the last
    """

    hidden: int = 256
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    intermediate: int = 384
    experts: int = 8
    experts_per_token: int = 2
    moe_intermediate: int = 256
    first_dense: int = 1
    vocabulary: int = 512
    context: int = 2048
    q_lora: int = 256
    kv_lora: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    index_heads: int = 4
    index_dim: int = 128
    index_topk: int = 2048
    drafts: int = 0

    @property
    def moe_layers(self) -> range:
        """Indices of the layers with experts, MTP layers included."""
        return range(self.first_dense, self.layers + self.drafts)


def config(name: str, shape: Shape, *, tied: bool) -> dict:
    """config.json of family `name`, without quantization sections."""
    family = FAMILIES[name]
    common = {
        "architectures": [family.architecture],
        "model_type": name,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads if family.latent else shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.moe_intermediate,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
        "output_router_logits": False,
    }
    return common | (_latent(family, shape) if family.latent else {"head_dim": shape.head_dim}) | _router(name, shape)


def _latent(family: Family, shape: Shape) -> dict:
    """What MLA adds."""
    keys = {
        "q_lora_rank": shape.q_lora if family.q_lora else None,
        "kv_lora_rank": shape.kv_lora,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.v_dim,
        "rope_interleave": True,
    }
    if family.indexer:
        keys |= {
            "index_n_heads": shape.index_heads,
            "index_head_dim": shape.index_dim,
            "index_topk": shape.index_topk,
            "indexer_rope_interleave": True,
        }
    return keys


def _router(name: str, shape: Shape) -> dict:
    """What the routers of the families add, each under its own names."""
    if name == "qwen3_moe":
        return {
            "num_experts": shape.experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(shape.first_dense)),
            "router_aux_loss_coef": 0.0,
            "sliding_window": None,
            "use_sliding_window": False,
        }
    keys = {
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": shape.first_dense,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    }
    if name == "deepseek_v2":  # its softmax router neither groups nor normalizes
        return keys | {
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
            "routed_scaling_factor": 1.0,
        }
    keys |= {"num_nextn_predict_layers": shape.drafts}
    if name == "glm4_moe":
        partial = {"partial_rotary_factor": 0.5}
        rope = {"rope_type": "default", "rope_theta": 10000.0} | partial
        return keys | partial | {"use_qk_norm": False, "rope_parameters": rope}
    return keys | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
