# SPDX-License-Identifier: Apache-2.0
"""What vLLM offers that EXL3 checkpoints cannot be combined with: refused at start, by one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Formats that stream the checkpoint's own tensors. The others store weights of another kind, or vLLM's own state.
LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")


def require_supported(vllm_config: VllmConfig) -> None:
    """Raise ValueError listing every option that does not work with EXL3."""
    refused = []
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    if load_format not in LOAD_FORMATS:
        refused.append(f"--load-format {load_format}: want one of {', '.join(LOAD_FORMATS)}")
    if vllm_config.lora_config is not None:
        refused.append("--enable-lora: adapters are not supported on EXL3 layers")
    if _offloads(vllm_config):
        refused.append("CPU offloading of weights: EXL3 layers keep theirs on the device")
    if refused:
        raise ValueError("not supported with EXL3: " + "; ".join(refused))


def _offloads(vllm_config: VllmConfig) -> bool:
    offload = vllm_config.offload_config
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)
