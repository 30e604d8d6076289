# SPDX-License-Identifier: Apache-2.0
"""Which tensors of routed experts a model wants, and under which names: one choke point for every loader and model.

    model.layers.3.mlp.experts.7.up_proj.rank2.trellis    ->  model.layers.3.mlp.experts.7.up_proj.rank2_trellis
    model.layers.3.mlp.experts.shared_h.up_proj.rank2.suh ->  model.layers.3.mlp.experts.0.up_proj.shared_h_rank2_suh

Models find an expert's parameter by replacing `experts.{e}.{projection}.` in the name of a tensor, so what follows must
be one word, and what all experts share must look like an expert's.  A target, a draft and a pipeline stage each have
some of a checkpoint's layers: experts of the others, and other ranks' slices, are skipped before they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .experts import EXPERT, SHARED, ExpertsSpec
from .layout import RankSlice
from .plain_layers import PlainLayers
from .safetensors_headers import CheckpointError

if TYPE_CHECKING:
    from torch.nn import Module

    from vllm.config import ModelConfig

Tensor = TypeVar("Tensor")


@dataclass(frozen=True, kw_only=True)
class HeldExperts:
    """What one layer of a model holds: kept on the layer as `exl3_experts` from its construction on."""

    prefix: str  # the experts' name in the checkpoint
    spec: ExpertsSpec
    parts: tuple[RankSlice, ...]


class WantedExperts:
    """What one model wants of a checkpoint's routed experts."""

    def __init__(self, held: Iterable[HeldExperts], plain: PlainLayers | None = None) -> None:
        self.plain = plain
        self.ranks: dict[str, set[str | None]] = {}  # prefix -> stored ranks; None stands for tensors without one
        for layer in held:
            sliced = layer.spec.ranks is not None
            ranks = {str(part.stored_rank) if sliced else None for part in layer.parts}
            self.ranks.setdefault(layer.prefix, set()).update(ranks)

    def skips(self, name: str) -> bool:
        """Whether the tensor belongs to experts, or to slices of them, that the model does not have."""
        match = EXPERT.fullmatch(name) if ".experts." in name else None
        return match is not None and match[4] not in self.ranks.get(match[1], ())

    def stream(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The wanted ones of `weights`, under the names that models look for; all else passes as it is."""
        if self.plain is not None:
            weights = self.plain.stream(weights)
        for name, tensor in weights:
            if not self.skips(name):
                yield local_name(name), tensor


LAYER = re.compile(r"\.layers\.(\d+)\.")


def find_experts(modules: Mapping[str, str], experts: Mapping[str, ExpertsSpec], name: str) -> str | None:
    """The checkpoint's prefix of the routed experts that vLLM calls `name`, None where they are stored unquantized.

    Args:
        modules: vLLM name -> checkpoint name.
        experts: the layers that are stored as EXL3, by checkpoint name.
        name: vLLM's name.  An MTP layer has its block in a `mtp_block` of its own; checkpoints do not name it.

    Raises:
        CheckpointError: the layer of this number is stored as EXL3, under a name that cannot be matched.
    """
    for alias in (name, name.replace(".mtp_block.", ".")):
        if modules.get(alias) in experts:
            return modules[alias]
    number = None if name.startswith("mtp.") else LAYER.search(name)  # mtp.layers.0 is not the target's layer 0
    for prefix in experts:
        stored = LAYER.search(prefix)
        if number and stored and stored[1] == number[1]:
            why = f"stored as EXL3, but the model looks for the layer's experts as {name}"
            raise CheckpointError([f"{prefix}: {why}"])
    return None


def local_name(name: str) -> str:
    """The name under which a model finds the parameter of a rank-sliced tensor; other names stay as they are."""
    match = EXPERT.fullmatch(name) if ".rank" in name else None
    if match is None or match[4] is None:
        return name
    prefix, expert, projection, rank, suffix = match.groups()
    if expert == SHARED:
        return f"{prefix}.0.{projection}.shared_h_rank{rank}_{suffix}"
    return f"{prefix}.{expert}.{projection}.rank{rank}_{suffix}"


def wanted_experts(model: Module, model_config: ModelConfig) -> WantedExperts | None:
    """What `model` wants, None for one that is not EXL3."""
    if model_config.quantization != "exl3":
        return None
    layers = (getattr(module, "exl3_experts", None) for module in model.modules())
    return WantedExperts((held for held in layers if held is not None), PlainLayers(model))
