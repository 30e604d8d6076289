# SPDX-License-Identifier: Apache-2.0
"""EXL3 (ExLlamaV3 trellis) checkpoints in vLLM: recognise the checkpoint, route each layer to its method.

    y = had(had(x * suh) @ decode(trellis)) * svh + bias

Reading order: exl3_trellis/checkpoint -> layout -> placement -> intake -> plan -> backends; for routed experts
rank_sliced -> experts -> slabs -> expert_intake -> moe_plan -> moe_startup -> moe_dispatch -> backends.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

import vllm.exl3_upstream  # noqa: F401 - before whatever another version may lack
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from .exl3_trellis.backends import moe_candidates
from .exl3_trellis.checkpoint import SUFFIXES, LinearSpec, find_module, storage_disagreements
from .exl3_trellis.expert_names import find_experts
from .exl3_trellis.experts import ExpertsSpec
from .exl3_trellis.linear_method import EXL3LinearMethod
from .exl3_trellis.moe_method import EXL3MoEMethod
from .exl3_trellis.placement import Source
from .exl3_trellis.progress import Progress
from .exl3_trellis.repository import local_folder, model_contents
from .exl3_trellis.role import DRAFT_PREFIX, stamp
from .exl3_trellis.safetensors_headers import CheckpointError
from .exl3_trellis.scratch import ModelRef
from .exl3_trellis.support import draft_problems, limit_graphs, limit_linear_graphs, require_supported, split_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import QuantizationMethods
    from vllm.model_executor.models.utils import WeightsMapper

logger = init_logger(__name__)

# What vLLM merges in most models. A draft's class often says nothing of it, and relies on its target's having said so.
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
SLICE = re.compile(rf"\.slice\.(\d+)\.({'|'.join(SUFFIXES)})$")


class EXL3Config(QuantizationConfig):
    """What a checkpoint's headers say, by the names of vLLM's modules.  Holds no tensor, so it crosses processes."""

    moe_providers = staticmethod(
        moe_candidates
    )  # returns every kernel provider of routed experts; a subclass may differ

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.linears: dict[str, LinearSpec] = {}  # by checkpoint name
        self.experts: dict[str, ExpertsSpec] = {}  # by checkpoint name of a layer's routed experts
        self.modules: dict[str, str] = {}  # vLLM name -> checkpoint name, of linears and of a layer's experts
        self.progress = Progress()
        self.dummy = False
        self.model = ModelRef()

    def __repr__(self) -> str:
        return f"EXL3Config({len(self.linears)} modules, {len(self.experts)} layers of experts)"

    @classmethod
    def get_name(cls) -> QuantizationMethods:
        return "exl3"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.half, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EXL3Config:
        return cls(config)

    def maybe_update_config(
        self, model_name: str, hf_config: PretrainedConfig | None = None, revision: str | None = None
    ) -> None:
        """Read the checkpoint's headers; vLLM calls this while it makes its configuration, before any worker starts.

        Raises:
            CheckpointError: the checkpoint cannot be served as it is.
        """
        contents = model_contents(model_name, revision)
        self.linears, self.experts = contents.linears, contents.experts
        if folder := local_folder(model_name, revision):
            self._warn_of_disagreements(folder)
        self.modules = {name: name for name in (*self.linears, *self.experts)}
        if hf_config is not None and find_module(self.linears, "lm_head"):
            # A stored head wins over a config that calls the embeddings tied; vLLM itself seeks lm_head.weight only.
            hf_config.tie_word_embeddings = False
            hf_config.get_text_config().tie_word_embeddings = False

    def _warn_of_disagreements(self, folder: Path) -> None:
        found = storage_disagreements(folder, self.linears)
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            logger.warning("quantization_config.json disagrees with the tensors, which win: %s%s", found[0], more)

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Names of tensors that are not those of a parameter: `.slice.{i}.trellis` is a layer's `slice{i}_trellis`."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex={SLICE: r".slice\1_\2"})

    def verify_with_vllm_config(self, vllm_config: VllmConfig) -> None:
        """Refuse what EXL3 does not work with, before anything is loaded."""
        require_supported(vllm_config, bool(self.experts))
        problems = split_model(self, vllm_config.model_config, vllm_config.parallel_config)
        if problems := problems + draft_problems(vllm_config):
            raise CheckpointError(problems)
        if self.experts:
            limit_graphs(vllm_config)
        if self.linears:
            limit_linear_graphs(vllm_config)
        self.dummy = vllm_config.load_config.load_format == "dummy"

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Rename modules as the model renames their tensors.

        A mapper is written for names of tensors, so a module goes through it as one of its own.
        """
        for name in self.linears:
            mapped = hf_to_vllm_mapper.map_name(f"{name}.trellis")
            if mapped is not None:
                self.modules[mapped.removesuffix(".trellis")] = name
        for name in self.experts:
            mapped = hf_to_vllm_mapper.map_name(f"{name}.0.")
            if mapped is not None:
                self.modules[mapped.removesuffix(".0.")] = name

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for one layer: EXL3 where its weights, or some of its merged weights, are stored so."""
        name = prefix.removeprefix(DRAFT_PREFIX)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, name)
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        components = self._components(name)
        if any(source.spec for sources in components for source in sources):
            stamp(layer, prefix, self.model.get())
            self.progress.expect()
            return EXL3LinearMethod(components, self.progress.step, dummy=self.dummy)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> EXL3MoEMethod | None:
        """The method for a layer's routed experts; None where they are stored unquantized."""
        stored = find_experts(self.modules, self.experts, prefix)
        if stored is None:
            return None
        stamp(layer, prefix, self.model.get())
        self.progress.expect()
        spec, step = self.experts[stored], self.progress.step
        return EXL3MoEMethod(layer.moe_config, spec, stored, step, self.dummy, self.moe_providers)

    def _components(self, prefix: str) -> list[list[Source]]:
        """The stored modules of the layer `prefix`, in the order of its outputs; several where vLLM merges them."""
        if own := self._sources(prefix):
            return [own]
        parent, dot, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last) or MERGED.get(last, ())
        merged = [f"{parent}{dot}{name}" for name in parts]
        return [self._sources(name) or [Source(module=name, spec=None)] for name in merged]

    def _sources(self, name: str) -> list[Source]:
        """The stored module called `name` by vLLM: itself, or the slices of a very wide one."""
        if module := find_module(self.modules, name):
            stored = self.modules[module]
            return [Source(module=stored, spec=self.linears[stored])]
        sources: list[Source] = []
        while part := self.modules.get(f"{name}.slice.{len(sources)}"):
            sources.append(Source(module=part, spec=self.linears[part], part=len(sources)))
        return sources
