# SPDX-License-Identifier: Apache-2.0
"""Dense transformers: configuration and weights of the Llama-shaped families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..trellis import layout
from . import vision
from .recipe import LOGIT_GAIN, Linears
from .tokenizer import BOS, EOS


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between Llama-shaped architectures.

    architecture  class name in config.json
    qkv_bias      q, k and v always have a bias
    any_bias      config.json can ask for biases (attention_bias, mlp_bias)
    head_norms    q and k have a norm over each head
    """

    architecture: str
    qkv_bias: bool = False
    any_bias: bool = False
    head_norms: bool = False
    vision: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", any_bias=True),
    "mistral": Family(architecture="MistralForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(architecture="Qwen3ForCausalLM", head_norms=True),
    "llava": Family(architecture="LlamaForCausalLM", any_bias=True, vision=True),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a dense model, in channels and counts; `slices` cuts each MLP as converters do when it is very wide."""

    hidden: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    intermediate: int = 512
    vocabulary: int = 512
    context: int = 2048
    slices: int = 1


def config(family: str, shape: Shape, *, tied: bool, bias: bool) -> dict:
    """config.json, without the quantization section."""
    keys = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": "llama" if FAMILIES[family].vision else family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": bias and FAMILIES[family].any_bias,
        "mlp_bias": bias and FAMILIES[family].any_bias,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
    }
    return vision.config(keys) if FAMILIES[family].vision else keys


class Heads(Protocol):
    """The sizes of grouped-query attention, by whatever model they come with."""

    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def attention(
    linears: Linears, key: str, head_norms: bool, shape: Heads, *, bias: bool = False, qkv_bias: bool = False
) -> None:
    """q, k, v and o of one layer, with its head norms."""
    for name, heads in (("q_proj", shape.heads), ("k_proj", shape.kv_heads), ("v_proj", shape.kv_heads)):
        linears.linear(f"{key}.{name}", shape.hidden, heads * shape.head_dim, bias=bias or qkv_bias, zeros=True)
    linears.linear(f"{key}.o_proj", shape.heads * shape.head_dim, shape.hidden, gain=linears.recipe.residual, bias=bias)
    if head_norms:
        linears.norm(f"{key}.q_norm", shape.head_dim)
        linears.norm(f"{key}.k_norm", shape.head_dim)


def slice_widths(intermediate: int, slices: int) -> list[int]:
    """Channels of each slice of a wide MLP: equal whole blocks, what is left over in the last."""
    width = intermediate // slices // layout.BLOCK * layout.BLOCK
    if not width:
        raise ValueError(f"{intermediate} channels in {slices} slices: want at least {layout.BLOCK} each")
    return [width] * (slices - 1) + [intermediate - width * (slices - 1)]


def mlp(linears: Linears, key: str, hidden: int, intermediate: int, *, slices: int = 1, bias: bool = False) -> None:
    """gate, up and down of one MLP, whole or in slices `.slice.{i}` along the intermediate channels."""
    widths = slice_widths(intermediate, slices)
    for number, width in enumerate(widths):
        part = f".slice.{number}" if slices > 1 else ""
        linears.linear(f"{key}.gate_proj{part}", hidden, width, bias=bias, zeros=True)
        linears.linear(f"{key}.up_proj{part}", hidden, width, bias=bias)
        # Partial outputs of the slices are summed; a bias belongs to one of them.
        gain = linears.recipe.residual * (width / intermediate) ** 0.5
        linears.linear(f"{key}.down_proj{part}", width, hidden, gain=gain, bias=bias and number == 0)


def build(linears: Linears, family: str, shape: Shape) -> None:
    """All tensors of a dense model, in the order of its layers; each layer may end a file."""
    row = FAMILIES[family]
    bias = linears.recipe.bias and row.any_bias
    prefix = vision.TEXT_PREFIX if row.vision else "model"
    if row.vision:
        vision.build(linears, shape.hidden)
        vision.write_processor(linears.weights.folder)
    linears.embedding(f"{prefix}.embed_tokens", shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        key = f"{prefix}.layers.{layer}"
        linears.norm(f"{key}.input_layernorm", shape.hidden, feeds_linears=True)
        attention(linears, f"{key}.self_attn", row.head_norms, shape, bias=bias, qkv_bias=row.qkv_bias)
        linears.norm(f"{key}.post_attention_layernorm", shape.hidden, feeds_linears=True)
        mlp(linears, f"{key}.mlp", shape.hidden, shape.intermediate, slices=shape.slices, bias=bias)
        linears.weights.folder.end_layer()
    linears.norm(f"{prefix}.norm", shape.hidden, feeds_linears=True)
    linears.linear("lm_head", shape.hidden, shape.vocabulary, gain=LOGIT_GAIN)
