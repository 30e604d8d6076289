# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts transformers: the weights of every family, ordinary EXL3 or rank-sliced, MTP layers included."""

from __future__ import annotations

import numpy as np

from . import dense, rank_sliced
from .files import bfloat16
from .moe_configs import FAMILIES, Family, Shape
from .recipe import LOGIT_GAIN, Linears

ROUTER_GAIN = 3.0  # router logits far enough apart that rounding does not choose other experts


class Builder:
    """Adds the tensors of one model.

    linears   how all but rank-sliced experts are stored
    slicing   of the routed experts; None: they are ordinary modules too
    agreeing  an MTP layer predicts what the target will, from the token's own embedding; else its input is random
    """

    def __init__(self, linears: Linears, name: str, shape: Shape, slicing: rank_sliced.Slicing | None, agreeing: bool):
        self.linears = linears
        self.weights = linears.weights
        self.family: Family = FAMILIES[name]
        self.shape = shape
        self.slicing = slicing
        self.agreeing = agreeing
        if shape.drafts and not self.family.drafts:
            having = ", ".join(name for name, family in FAMILIES.items() if family.drafts)
            raise ValueError(f"family {name} has no MTP layers; want one of {having}")

    def build(self) -> None:
        """All tensors, layer by layer; each layer may end a file."""
        shape, linears = self.shape, self.linears
        linears.embedding("model.embed_tokens", shape.vocabulary, shape.hidden)
        for layer in range(shape.layers):
            self.layer(layer)
            self.weights.folder.end_layer()
        linears.norm("model.norm", shape.hidden, feeds_linears=True)
        linears.linear("lm_head", shape.hidden, shape.vocabulary, gain=LOGIT_GAIN)
        for layer in range(shape.layers, shape.layers + shape.drafts):
            self.weights.folder.end_layer()
            self.draft(layer)

    def layer(self, layer: int) -> None:
        """One decoder layer."""
        key, shape, linears = f"model.layers.{layer}", self.shape, self.linears
        linears.norm(f"{key}.input_layernorm", shape.hidden, feeds_linears=True)
        if self.family.latent:
            self.latent_attention(f"{key}.self_attn")
        else:
            dense.attention(linears, f"{key}.self_attn", self.family.head_norms, shape)
        linears.norm(f"{key}.post_attention_layernorm", shape.hidden, feeds_linears=True)
        if layer < shape.first_dense:
            dense.mlp(linears, f"{key}.mlp", shape.hidden, shape.intermediate)
        else:
            self.experts(layer, f"{key}.mlp")

    def latent_attention(self, key: str) -> None:
        """MLA: queries with or without compression, one compressed key and value, the indexer if there is one."""
        shape, linears = self.shape, self.linears
        q_width = shape.heads * (shape.nope_dim + shape.rope_dim)
        if self.family.q_lora:
            linears.linear(f"{key}.q_a_proj", shape.hidden, shape.q_lora)
            linears.norm(f"{key}.q_a_layernorm", shape.q_lora, feeds_linears=True)
            linears.linear(f"{key}.q_b_proj", shape.q_lora, q_width)
        else:
            linears.linear(f"{key}.q_proj", shape.hidden, q_width)
        linears.linear(f"{key}.kv_a_proj_with_mqa", shape.hidden, shape.kv_lora + shape.rope_dim)
        linears.norm(f"{key}.kv_a_layernorm", shape.kv_lora)
        # Engines multiply this one into the queries and outputs, so converters leave it unquantized.
        self.weights.plain(f"{key}.kv_b_proj", shape.kv_lora, shape.heads * (shape.nope_dim + shape.v_dim))
        linears.linear(f"{key}.o_proj", shape.heads * shape.v_dim, shape.hidden, gain=linears.recipe.residual)
        if self.family.indexer:
            self.indexer(f"{key}.indexer")

    def indexer(self, key: str) -> None:
        """The indexer of sparse attention: only its query projection is quantized."""
        shape = self.shape
        self.linears.linear(f"{key}.wq_b", shape.q_lora, shape.index_heads * shape.index_dim)
        self.weights.plain(f"{key}.wk", shape.hidden, shape.index_dim)
        self.weights.plain(f"{key}.weights_proj", shape.hidden, shape.index_heads)
        self.weights.normal(f"{key}.k_norm.weight", (shape.index_dim,), 0.1, 1.0)
        self.weights.normal(f"{key}.k_norm.bias", (shape.index_dim,), 0.1)

    def experts(self, layer: int, key: str) -> None:
        """Router, routed experts and shared expert of one layer."""
        shape, linears = self.shape, self.linears
        self.weights.plain(f"{key}.gate", shape.hidden, shape.experts, gain=ROUTER_GAIN)
        if self.family.score_bias:
            self.weights.normal(f"{key}.gate.e_score_correction_bias", (shape.experts,), 0.05, dtype="F32")
        if self.slicing:
            rates = self.expert_rates(layer)
            rank_sliced.add_experts(
                self.weights,
                f"{key}.experts",
                shape.hidden,
                shape.moe_intermediate,
                rates,
                self.slicing,
                linears.recipe.residual,
            )
        else:
            self.ordinary_experts(f"{key}.experts")
        if self.family.shared_expert:
            dense.mlp(linears, f"{key}.shared_experts", shape.hidden, shape.moe_intermediate)

    def ordinary_experts(self, key: str) -> None:
        """Experts as modules of their own, each projection of the layer at one rate."""
        shape = self.shape
        for name, k, n, gain in (
            ("gate_proj", shape.hidden, shape.moe_intermediate, 1.0),
            ("up_proj", shape.hidden, shape.moe_intermediate, 1.0),
            ("down_proj", shape.moe_intermediate, shape.hidden, self.linears.recipe.residual),
        ):
            encoding = self.linears.encoding(f"{key}.{name}")
            for expert in range(shape.experts):
                self.linears.store(f"{key}.{expert}.{name}", k, n, encoding, gain=gain)

    def expert_rates(self, layer: int) -> list[int]:
        """Rates of a rank-sliced layer's experts; MTP layers have the base rate."""
        assert self.slicing
        if layer >= self.shape.layers:
            return [int(self.slicing.rates[0])] * self.shape.experts
        return rank_sliced.expert_rates(self.slicing, self.weights.seed, layer, self.shape.experts)

    def draft(self, layer: int) -> None:
        """An MTP layer: embedding and head repeat the target's, as families that share them store it."""
        key, shape, linears = f"model.layers.{layer}", self.shape, self.linears
        self.weights.copies |= {
            f"{key}.embed_tokens": "model.embed_tokens",
            f"{key}.shared_head.head": "lm_head",
            f"{key}.shared_head.norm": "model.norm",
        }
        linears.embedding(f"{key}.embed_tokens", shape.vocabulary, shape.hidden)
        linears.norm(f"{key}.enorm", shape.hidden)
        linears.norm(f"{key}.hnorm", shape.hidden)
        if self.agreeing:
            both = np.eye(shape.hidden, 2 * shape.hidden, dtype=np.float32)  # takes the embedding, drops the state
            self.weights.folder.add(f"{key}.eh_proj.weight", "BF16", bfloat16(both))
        else:
            self.weights.plain(f"{key}.eh_proj", 2 * shape.hidden, shape.hidden)
        self.layer(layer)
        linears.norm(f"{key}.shared_head.norm", shape.hidden, feeds_linears=True)
        linears.linear(f"{key}.shared_head.head", shape.hidden, shape.vocabulary, gain=LOGIT_GAIN)
