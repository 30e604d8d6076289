# SPDX-License-Identifier: Apache-2.0
"""Whose layer it is: the target's or a draft's, stamped while the layer is built and the same ever after.

A draft may be given the target's configuration object and layers of the target's shapes, and by the time a layer first
runs nothing tells them apart.  While it is built something does: the tag that vLLM sets around a draft's construction.
Knows how vLLM marks drafts, not what they are used for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from .scratch import Model, Owner

if TYPE_CHECKING:
    from torch.nn import Module

    from vllm.config import VllmConfig

Role = Literal["target", "draft"]

DRAFT_PREFIX = "draft_model."  # vLLM puts it before every name of a draft that is a whole model
# Tags that vLLM sets around the construction of a draft.
DRAFT_TAGS = frozenset(
    ("eagle_head", "draft_model", "medusa_head", "dflash_head", "dspark_head", "lilicorr_head", "extract_hidden_states")
)
# Tags of parts of a model, which may belong to either.
PART_TAGS = frozenset(("backbone", "self_decoder", "cross_decoder", "dflash2_candidate_selector"))

_LAYER = re.compile(r"(?:^|\.)(?:model|language_model)\.layers\.(\d+)(?:\.|$)")  # not those of a vision tower


def role_of(prefix: str, tag: str, layers: int | None, runner: str = "") -> Role:
    """The role of the layer that is being built.

    Args:
        prefix: vLLM's name of the layer.
        tag: `vllm.compilation.backends.model_tag` at this moment.
        layers: decoder layers of the target, None if its config does not say.
        runner: `runner_type` of the model configuration that is set at this moment.
    """
    if tag in DRAFT_TAGS or runner == "draft":
        return "draft"
    if prefix.startswith("mtp.") or ".mtp." in prefix:
        return "draft"
    found = _LAYER.search(prefix)
    return "draft" if found and layers is not None and int(found[1]) >= layers else "target"


def drafts_with_exl3(vllm_config: VllmConfig) -> bool:
    """Whether a draft with a model of its own runs beside the target, and either is an EXL3 checkpoint."""
    speculation = vllm_config.speculative_config
    if speculation is None or not (speculation.use_eagle() or speculation.uses_draft_model()):
        return False
    models = (vllm_config.model_config, speculation.draft_model_config)
    return any(model is not None and model.quantization == "exl3" for model in models)


def capacity_of(vllm_config: VllmConfig | None) -> int:
    """Most rows that a step brings to a layer.

    Raises:
        ValueError: no configuration is set, or it has no scheduler part; a guess would size arenas wrongly.
    """
    scheduler = getattr(vllm_config, "scheduler_config", None)
    rows = getattr(scheduler, "max_num_batched_tokens", None)
    if not rows:
        found = "no vLLM configuration" if vllm_config is None else f"scheduler_config {scheduler!r}"
        raise ValueError(f"EXL3 layers are planned for scheduler_config.max_num_batched_tokens rows: found {found}")
    return rows


def stamp(layer: Module, prefix: str, model: Model) -> Owner:
    """Mark `layer`, which is being built, with its owner.

    Raises:
        ValueError: it was stamped before, for another owner.
    """
    import torch

    import vllm.compilation.backends as compilation
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    capacity = capacity_of(config)
    model_config = config.model_config if config is not None else None
    owner = Owner(
        model=model,
        role=role_of(
            prefix,
            compilation.model_tag,
            getattr(model_config.hf_text_config, "num_hidden_layers", None) if model_config else None,
            model_config.runner_type if model_config else "",
        ),
        device=str(torch.empty(0).device),
        capacity=capacity,
    )
    before = getattr(layer, "exl3_owner", owner)
    if before != owner:
        raise ValueError(f"{prefix}: stamped {before} when it was built, now {owner}")
    layer.exl3_owner = owner
    return owner
