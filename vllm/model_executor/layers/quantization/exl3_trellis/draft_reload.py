# SPDX-License-Identifier: Apache-2.0
"""After sleeping at level 2 target and draft have lost their weights: say so, and reload the draft with its target.

What a draft shares with its target (embedding, head) is reloaded with the target.  The draft's own stored copies of it
are left out: they may differ in rate, or in value.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from .role import drafts_with_exl3

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from vllm.config import VllmConfig

logger = init_logger(__name__)
SHARED = ("embed_tokens", "lm_head", "shared_head.head")  # module names that drafts share, in checkpoints and in vLLM


def warn_of_discarded(vllm_config: VllmConfig) -> None:
    """Say what is to be done, if target or draft is an EXL3 checkpoint; for a worker that wakes from level 2."""
    if vllm_config.model_config.quantization == "exl3" or drafts_with_exl3(vllm_config):
        logger.warning("EXL3: sleeping at level 2 discarded the weights; every answer is noise until reload_weights")


def reload_draft(
    worker: Any, weights_iterator: object = None, weights_path: str | None = None, is_checkpoint_format: bool = True
) -> None:
    """Reload the draft of `worker` if it has one with EXL3 layers and weights come from disk; takes what reloading the
    target takes, and must be called before that, which may point the target's configuration elsewhere.
    """
    draft = worker.get_draft_model()
    if draft is None or weights_iterator is not None or not drafts_with_exl3(worker.vllm_config):
        return
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    config = copy.copy(worker.vllm_config)
    config.model_config = copy.copy(config.speculative_config.draft_model_config)
    config.load_config = get_draft_load_config(config)
    if weights_path is not None and config.model_config.model == worker.model_config.model:
        config.model_config.model, config.model_config.revision = weights_path, None
    stream = getattr(get_model_loader(config.load_config), "get_all_weights", None)
    if stream is None:
        return  # reloading the target will say that this format cannot
    own = _without(stream(config.model_config, draft), _shared(draft, worker.get_model()))
    reload_weights(config, draft, own, None, is_checkpoint_format)


def _shared(draft: Module, target: Module) -> set[str]:
    """Which of SHARED the draft takes from the target."""
    modules = {id(module) for module in target.modules()}
    lent = [path for path, module in draft.named_modules(remove_duplicate=False) if id(module) in modules]
    return {name for name in SHARED for path in lent if f".{path}".endswith(f".{name}")}


def _without(weights: Iterable[tuple[str, torch.Tensor]], modules: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if not any(f".{module}." in f".{name}" for module in modules):
            yield name, tensor
