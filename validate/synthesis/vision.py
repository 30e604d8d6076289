# SPDX-License-Identifier: Apache-2.0
"""A LLaVA wrapper around a dense model: a small CLIP tower and projector, unquantized, and the files of its processor.

It exists for its names: the checkpoint says `model.language_model.…` and `lm_head`, while the engine asks for
`language_model.model.…` and `language_model.lm_head`.
"""

from __future__ import annotations

from .files import Folder
from .recipe import Linears
from .tokenizer import IMAGE, SPECIAL, TAGS

TEXT_PREFIX = "model.language_model"
TOWER, PROJECTOR = "model.vision_tower.vision_model", "model.multi_modal_projector"

HIDDEN, INTERMEDIATE, LAYERS, HEADS = 64, 128, 2, 2
PATCH, PIXELS = 16, 64  # patch and image, pixels a side


def config(text: dict) -> dict:
    """config.json around the text model's own."""
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "image_size": PIXELS,
            "patch_size": PATCH,
            "projection_dim": HIDDEN,
        },
        "image_token_index": (SPECIAL + TAGS).index(IMAGE),
        "image_seq_length": (PIXELS // PATCH) ** 2,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        **{key: text[key] for key in shared},
    }


def build(linears: Linears, text_hidden: int) -> None:
    """Tower and projector."""
    weights = linears.weights
    embeddings = f"{TOWER}.embeddings"
    weights.normal(f"{embeddings}.class_embedding", (HIDDEN,), 1.0)
    weights.normal(f"{embeddings}.patch_embedding.weight", (HIDDEN, 3, PATCH, PATCH), (3 * PATCH * PATCH) ** -0.5)
    weights.normal(f"{embeddings}.position_embedding.weight", ((PIXELS // PATCH) ** 2 + 1, HIDDEN), 0.1)
    layers = [f"{TOWER}.encoder.layers.{layer}" for layer in range(LAYERS)]
    norms = [f"{TOWER}.pre_layrnorm", f"{TOWER}.post_layernorm"]  # the first is spelt so in every checkpoint
    for norm in norms + [f"{layer}.layer_norm{number}" for layer in layers for number in (1, 2)]:
        weights.normal(f"{norm}.weight", (HIDDEN,), 0.1, 1.0)
        weights.normal(f"{norm}.bias", (HIDDEN,), 0.1)
    for layer in layers:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights.plain(f"{layer}.self_attn.{name}", HIDDEN, HIDDEN, bias=True)
        weights.plain(f"{layer}.mlp.fc1", HIDDEN, INTERMEDIATE, bias=True)
        weights.plain(f"{layer}.mlp.fc2", INTERMEDIATE, HIDDEN, bias=True)
    weights.plain(f"{PROJECTOR}.linear_1", HIDDEN, text_hidden, bias=True)
    weights.plain(f"{PROJECTOR}.linear_2", text_hidden, text_hidden, bias=True)


def write_processor(folder: Folder) -> None:
    """processor_config.json and preprocessor_config.json."""
    image = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": PIXELS},
        "do_center_crop": True,
        "crop_size": {"height": PIXELS, "width": PIXELS},
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }
    folder.add_json("preprocessor_config.json", image)
    folder.add_json(
        "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,  # the class token, which "default" then drops
            "vision_feature_select_strategy": "default",
        },
    )
