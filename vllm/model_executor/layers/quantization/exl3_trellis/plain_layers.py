# SPDX-License-Identifier: Apache-2.0
"""EXL3 modules of a checkpoint that a model holds as plain layers: decoded while it loads, under the name `weight`.

Most MTP layers combine token and state in a `torch.nn.Linear`, and some models build their head without asking for a
quantization method.  No method can serve those, and their loaders end at a tensor called `trellis`.
A layer is matched to its module by its number and by its own name, since models rename what lies between.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from .checkpoint import MARKERS, SUFFIXES
from .reference import decode_dense, unpack_signs
from .safetensors_headers import CheckpointError

if TYPE_CHECKING:
    from torch.nn import Module

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Key = tuple[str | None, str]  # number of the layer, name within it


class PlainLayers:
    """The plain layers of one model, and how what is stored as EXL3 gets into them.

    Args:
        model: built, its EXL3 layers stamped with their owners.
    """

    def __init__(self, model: Module) -> None:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.shapes: dict[Key, tuple[int, int, torch.dtype]] = {}  # true inputs, outputs
        taken: set[Key] = set()
        # An MTP draft without a head of its own is given the target's once it is loaded.
        lent = not hasattr(model, "has_own_lm_head") and is_draft(model)
        self.lent: set[Key] = set()
        self.unwanted: set[str] = set()
        for path, layer in model.named_modules():
            key = key_of(path)
            if isinstance(layer, LinearBase) or hasattr(layer, "exl3_owner"):
                taken.add(key)
                if lent and isinstance(layer, ParallelLMHead):
                    self.unwanted.add("lm_head.weight")  # some load it into their own head, as if that were plain too
            elif isinstance(layer, ParallelLMHead):
                self.shapes[key] = (layer.embedding_dim, layer.org_vocab_size, layer.weight.dtype)
                self.lent |= {key} if lent else set()
            elif type(layer) is torch.nn.Linear:
                self.shapes[key] = (layer.in_features, layer.out_features, layer.weight.dtype)
        for key in taken:
            self.shapes.pop(key, None)

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`weights`, where the EXL3 tensors of plain layers are replaced by one `weight` [outputs, inputs] each."""
        parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in weights:
            module, _, suffix = name.rpartition(".")
            if suffix not in SUFFIXES or key_of(module) not in self.shapes:
                if name not in self.unwanted:
                    yield name, tensor
            elif key_of(module) not in self.lent:
                parts[module][suffix] = tensor.clone()  # a loader may reuse its buffers
        for module, stored in parts.items():
            yield f"{module}.weight", _decode(module, stored, *self.shapes[key_of(module)])


def is_draft(model: Module) -> bool:
    """Whether the model's EXL3 layers were stamped as a draft's."""
    owners = (getattr(layer, "exl3_owner", None) for layer in model.modules())
    return any(owner is not None and owner.role == "draft" for owner in owners)


def key_of(path: str) -> Key:
    """What a layer of a model and its module in a checkpoint have in common."""
    layer = _LAYER.search(path)
    return layer[1] if layer else None, path.rpartition(".")[2]


def _decode(
    module: str, stored: dict[str, torch.Tensor], inputs: int, outputs: int, dtype: torch.dtype
) -> torch.Tensor:
    """The dense weight [outputs, inputs] of the true size.

    Raises:
        CheckpointError: the stored module is smaller.
    """
    book = next((marker for marker in MARKERS if marker in stored), "3inst")
    suh, svh = (stored[v] if v in stored else unpack_signs(stored[v[:2]]) for v in ("suh", "svh"))
    weight = decode_dense(stored["trellis"], suh, svh, book)
    if weight.shape[0] < inputs or weight.shape[1] < outputs:
        raise CheckpointError([f"{module}.trellis: {list(weight.shape)} channels, want at least [{inputs}, {outputs}]"])
    return weight[:inputs, :outputs].t().to(dtype)
