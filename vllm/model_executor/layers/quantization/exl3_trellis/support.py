# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's EXL3 checkpoints cannot be combined with, refused at start by one message; and the CUDA graphs that
vLLM would capture by default but that no provider could fill."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.exl3_envs import bad_values
from vllm.logger import init_logger

from .backends import likely
from .moe_plan import PARITY, Limits, require_limits
from .placement import split_blocks
from .repository import model_contents
from .safetensors_headers import CheckpointError
from .slabs import legal_tp, tp_refusal
from .sparse_attention import sparse_problems

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.model_executor.layers.quantization.exl3 import EXL3Config

    from .contents import Contents
    from .experts import ExpertsSpec

logger = init_logger(__name__)

FUSED_BACKENDS = ("native", "b12x")  # what VLLM_EXL3_FUSED=0 turns off
# Formats that stream the checkpoint's own tensors. The others store weights of another kind, or vLLM's own state.
GPU_LOAD_FORMATS = ("fastsafetensors", "instanttensor")
EAGLE = ("eagle", "eagle3")  # methods whose heads vLLM numbers after the target's layers, not as they are stored
LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")


def require_supported(vllm_config: VllmConfig, experts: bool) -> None:
    """Raise ValueError listing every option that does not work with EXL3; `experts`: it has layers of routed ones.

    Variables that do not parse come first, all of them at once: most are read in a worker only, after the load.
    """
    if bad := list(bad_values()):
        raise ValueError("; ".join(bad))
    refused = []
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    if load_format not in LOAD_FORMATS:
        refused.append(f"--load-format {load_format}: want one of {', '.join(LOAD_FORMATS)}")
    if load_format in GPU_LOAD_FORMATS and vllm_config.device_config.device_type == "cpu":
        refused.append(f"--load-format {load_format}: needs an NVIDIA GPU")
    if vllm_config.lora_config is not None:
        refused.append("--enable-lora: adapters are not supported on EXL3 layers")
    if _offloads(vllm_config):
        refused.append("CPU offloading of weights: EXL3 layers keep theirs on the device")
    if not envs.VLLM_EXL3_FUSED and envs.VLLM_EXL3_BACKEND in FUSED_BACKENDS:
        refused.append(f"VLLM_EXL3_FUSED=0 with VLLM_EXL3_BACKEND={envs.VLLM_EXL3_BACKEND}: want one of the two unset")
    if envs.VLLM_EXL3_BACKEND == "b12x" and not experts:
        refused.append("VLLM_EXL3_BACKEND=b12x: it runs routed experts only, and this checkpoint has none")
    draft = vllm_config.speculative_config
    if draft is not None and draft.method in EAGLE and draft.draft_model_config.quantization == "exl3":
        refused.append(f"--speculative-config of method {draft.method}: want its head unquantized, this one is EXL3")
    parallel = vllm_config.parallel_config
    if parallel.enable_expert_parallel or parallel.enable_eplb:
        flag = "--enable-eplb" if parallel.enable_eplb else "--enable-expert-parallel"
        refused.append(f"{flag}: routed experts are shared by tensor parallelism only")
    refused += _attention_problems(vllm_config)
    if refused:
        raise ValueError("not supported with EXL3: " + "; ".join(refused))


def _offloads(vllm_config: VllmConfig) -> bool:
    offload = vllm_config.offload_config
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)


def _attention_problems(vllm_config: VllmConfig) -> list[str]:
    """What the first GPU lacks for the model's attention."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None:
        return []
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return sparse_problems(vllm_config.model_config.architectures, (capability.major, capability.minor), dcp)


def limit_graphs(vllm_config: VllmConfig) -> None:
    """Keep CUDA graphs that vLLM would capture by default to rows of routed experts that a graph can hold.

    What the user asked to capture stays, and is refused when it is captured.

    Raises:
        ValueError: the experts cannot be planned as the environment asks.
    """
    from vllm.config import CUDAGraphMode

    asked, rows = Limits.read(envs), vllm_config.scheduler_config.max_num_batched_tokens
    require_limits(asked, rows)
    if envs.VLLM_ENABLE_STARTUP_PLAN and isinstance(vllm_config.additional_config, dict):
        # The memory that a start remembers for the next depends on these; vLLM's key for it holds the configuration.
        vllm_config.additional_config["exl3_experts"] = str(asked)
    compilation = vllm_config.compilation_config
    sizes = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")
    chosen = _chosen(compilation, "cudagraph_mode", *sizes)
    if not envs.VLLM_EXL3_FUSED or envs.VLLM_EXL3_BACKEND in PARITY:
        if "cudagraph_mode" not in chosen:
            logger.warning("EXL3: no CUDA graphs, because all rows of routed experts take the parity path")
            compilation.cudagraph_mode = CUDAGraphMode.NONE
    elif not asked.prefill and rows > asked.decode_rows and not chosen.intersection(sizes):
        step = vllm_config.uniform_decode_query_len  # vLLM rounds the rows of a graph up to a multiple of it
        most = asked.decode_rows // step * step
        if most:
            logger.warning("EXL3: CUDA graphs of at most %d rows; more take the parity path", most)
            compilation.max_cudagraph_capture_size = most
        elif "cudagraph_mode" not in chosen:
            plan = f"the decode plan's {asked.decode_rows} rows"
            logger.warning("EXL3: no CUDA graphs, because %s are fewer than the %d of one request's step", plan, step)
            compilation.cudagraph_mode = CUDAGraphMode.NONE
    if asked.min_rows > 1 and not (compilation.cudagraph_mode == CUDAGraphMode.NONE or sizes[1] in chosen):
        _drop_short_graphs(vllm_config, asked.min_rows, keep_mode="cudagraph_mode" in chosen)


def limit_linear_graphs(vllm_config: VllmConfig) -> None:
    """Turn off the CUDA graphs that vLLM would capture by default where linear layers will run what none should hold.

    What the user asked to capture stays, and what no graph can hold is refused when it is captured.  torch.compile sees
    a provider's call as one operator and stays on.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    if _chosen(compilation, "cudagraph_mode") or not current_platform.support_static_graph_mode():
        return
    provider = likely(envs.VLLM_EXL3_FUSED, envs.VLLM_EXL3_BACKEND)
    if not provider.for_graphs:
        logger.warning("EXL3: no CUDA graphs, because %s runs the linear layers", provider.name)
        compilation.cudagraph_mode = CUDAGraphMode.NONE


def _chosen(compilation: CompilationConfig, *names: str) -> set[str]:
    """Which of these the user has set; vLLM gives the others their values later."""
    return {name for name in names if getattr(compilation, name) is not None}


def _drop_short_graphs(vllm_config: VllmConfig, fewest: int, keep_mode: bool) -> None:
    """Leave out the default CUDA graphs of fewer than `fewest` rows; batches so short are padded to the next."""
    from vllm.config import CUDAGraphMode

    trial = copy.copy(vllm_config)  # vLLM makes its list later, and only as a whole
    trial.compilation_config = copy.copy(vllm_config.compilation_config)
    trial._set_cudagraph_sizes()
    compilation, sizes = vllm_config.compilation_config, trial.compilation_config.cudagraph_capture_sizes
    step = vllm_config.uniform_decode_query_len
    kept = [size for size in sizes if size >= fewest]
    dropped = [size for size in sizes if size < fewest]
    because = f"VLLM_EXL3_TRELLIS_MIN_M={fewest} leaves them to the parity path"
    if any(-(-size // step) * step <= sizes[-1] for size in kept):  # rounded up as above
        if dropped:
            logger.warning("EXL3: no CUDA graphs of %s rows: %s", ", ".join(map(str, dropped)), because)
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = kept, kept[-1]
    elif sizes and not keep_mode:
        logger.warning("EXL3: no CUDA graphs, of at most %d rows here: %s", sizes[-1], because)
        compilation.cudagraph_mode = CUDAGraphMode.NONE


def split_model(contents: Contents | EXL3Config, model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Why the ranks of `parallel` cannot share the EXL3 modules of `model`."""
    tp = parallel.tensor_parallel_size
    problems = split_blocks(contents.linears, tp) if tp > 1 else []
    return problems + _split_experts(contents.experts, model, parallel)


def draft_problems(vllm_config: VllmConfig) -> list[str]:
    """What is wrong with a draft that is another EXL3 checkpoint than its target; its headers are read for it.

    A worker would say the same, when it has loaded the target.
    """
    speculation, target = vllm_config.speculative_config, vllm_config.model_config
    draft = speculation.draft_model_config if speculation is not None else None
    if speculation is None or draft is None or draft.quantization != "exl3":
        return []
    if draft.model in (target.model, target.model_weights):
        return []  # stored with its target, whose headers were checked
    parallel = copy.copy(speculation.draft_parallel_config)  # of its own it has the tensor parallel size only
    parallel.data_parallel_size = vllm_config.parallel_config.data_parallel_size
    parallel.prefill_context_parallel_size = vllm_config.parallel_config.prefill_context_parallel_size
    try:
        problems = split_model(model_contents(draft.model, draft.revision), draft, parallel)
    except CheckpointError as error:
        problems = error.problems
    return [f"draft {draft.model}: {problem}" for problem in problems]


def _split_experts(experts: Mapping[str, ExpertsSpec], model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """One message for all layers that say the same.

    vLLM cuts experts over every device of data and tensor parallelism together.
    """
    tp = parallel.tensor_parallel_size * parallel.data_parallel_size * parallel.prefill_context_parallel_size
    config = model.hf_text_config
    problems: dict[str, tuple[str, int]] = {}
    for prefix, spec in experts.items():
        stored = (spec.ranks or 1) * spec.width
        true = getattr(config, "moe_intermediate_size", None)
        intermediate = true if isinstance(true, int) and stored - 128 < true <= stored else stored
        if tp not in legal_tp(spec, intermediate):
            why = tp_refusal(spec, intermediate, tp, "")
            first, count = problems.get(why, (prefix, 0))
            problems[why] = (first, count + 1)
    return [
        first + (f" and {count - 1} more layers" if count > 1 else "") + why for why, (first, count) in problems.items()
    ]
