# SPDX-License-Identifier: Apache-2.0
"""The door between vLLM's routed experts and EXL3: create, load, prepare, apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.workspace import use_workspace_lane

from .backends import MoeBackend, moe_candidates
from .expert_intake import (
    create_expert_params,
    held_params,
    make_up_experts,
    require_all_experts,
    take_slices,
)
from .expert_names import HeldExperts
from .experts import ExpertsSpec
from .layout import padded
from .moe_dispatch import Experts, Route
from .moe_plan import Limits, Windows, choose_experts, require_limits, windows
from .moe_startup import startup_of
from .plan import Activation, Bank, Device, MoeQuery
from .role import capacity_of
from .safetensors_headers import CheckpointError
from .slabs import local_parts

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

logger = init_logger(__name__)
PREPARED = "exl3_"  # prefix of the parameters that hold prepared tensors
Provider = tuple[MoeBackend, tuple[str, ...]]  # and why not those before it


class EXL3MoEMethod(FusedMoEMethodBase):
    """Serves the routed experts of one layer, all stored as EXL3.

    Args:
        moe: vLLM's description of the layer.
        spec: the experts as stored.
        prefix: their name in the checkpoint.
        on_prepared: called when the layer's weights are ready, for progress.
        dummy: weights are made up, not read (`--load-format dummy`).
        providers: returns every kernel provider of routed experts.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        spec: ExpertsSpec,
        prefix: str,
        on_prepared: Callable[[], None],
        dummy: bool = False,
        providers: Callable[[], Sequence[MoeBackend]] = moe_candidates,
    ) -> None:
        super().__init__(moe)
        self.spec = spec
        self.prefix = prefix
        self.on_prepared = on_prepared
        self.dummy = dummy
        self.providers = providers
        self.limits = Limits.read(envs)
        self.chosen: dict[Device, tuple[Windows, dict[str, Provider]]] = {}  # the one it runs on, once that is known

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Choose the layer's providers and allocate the slabs of every slice this rank runs.

        Shapes come from the headers.  Whether anybody can run them is known here, before anything is read.

        Raises:
            CheckpointError: the model and the checkpoint disagree, or the tensor parallel size does not fit.
            NoBackendError: nobody can run the layer.
            ValueError: the layer cannot be planned as the environment asks.
        """
        parallel = self.moe.moe_parallel_config
        self._check(layer, num_experts, hidden_size)
        config = get_current_vllm_config_or_none()
        require_limits(self.limits, capacity_of(config))
        intermediate = intermediate_size_per_partition * parallel.tp_size
        parts = local_parts(self.spec, intermediate, parallel.tp_size, parallel.tp_rank, self.prefix)
        layer.exl3_experts = HeldExperts(prefix=self.prefix, spec=self.spec, parts=parts)
        layer.exl3_query = self._query(layer, hidden_size, intermediate_size_per_partition, params_dtype)
        if config and (where := torch.empty(0).device).type == config.device_config.device_type:  # else vLLM moves them
            self._choose(layer.exl3_query, Device.of(where))
        create_expert_params(layer, self.spec, parts, self.prefix)

    def _choose(self, query: MoeQuery, device: Device) -> tuple[Windows, dict[str, Provider]]:
        """The layer's windows and who serves each: the same at every reload."""
        if device not in self.chosen:
            forced = None if envs.VLLM_EXL3_BACKEND == "auto" else envs.VLLM_EXL3_BACKEND
            with set_default_torch_dtype(torch.float32):
                choice = choose_experts(query, device, self.providers(), forced, envs.VLLM_EXL3_FUSED)
            served = windows(self.limits, query.max_rows, planned=choice.planned is not None)
            self.chosen[device] = served, {window.name: choice.of(window.name) for window in served.all}
        return self.chosen[device]

    def _check(self, layer: RoutedExperts, experts: int, hidden: int) -> None:
        spec, problems = self.spec, []
        if self.moe.moe_parallel_config.use_ep:
            problems.append("expert parallelism is not supported; want tensor parallelism")
        if self.moe.has_bias:
            problems.append("experts with biases are not supported")
        if experts != spec.count:
            problems.append(f"{spec.count} experts stored, want {experts} as the model says")
        if padded(hidden) != spec.hidden:
            problems.append(f"hidden size {spec.hidden} stored, want {padded(hidden)} for {hidden} as the model says")
        if self.moe.is_act_and_mul != ("w3" in spec.projections):
            names = ", ".join(projection.name for projection in spec.projections.values())
            problems.append(f"projections {names} stored, which do not suit activation {layer.activation.value}")
        if problems:
            raise CheckpointError([f"{self.prefix}: {problem}" for problem in problems])

    def _query(self, layer: RoutedExperts, hidden: int, intermediate: int, dtype: torch.dtype) -> MoeQuery:
        spec, parts = self.spec, layer.exl3_experts.parts
        banks = {
            shard: Bank(
                rates=tuple(projection.rate(expert) for expert in range(spec.count)),
                codebooks=tuple(projection.codebook(expert) for expert in range(spec.count)),
            )
            for shard, projection in spec.projections.items()
        }
        return MoeQuery(
            k=spec.hidden,
            hidden=hidden,
            slices=len(parts),
            width=parts[0].span[1] - parts[0].span[0],
            intermediate=intermediate,
            w1=banks["w1"],
            w2=banks["w2"],
            w3=banks.get("w3"),
            shared_h=spec.shared_h,
            top_k=layer.top_k,
            activation=activation_of(layer),
            weight_on_input=layer.apply_router_weight_on_input,
            io_dtype=str(dtype).removeprefix("torch."),
            max_rows=capacity_of(get_current_vllm_config_or_none()),
        )

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Plan, and hand the layer's providers the loaded slabs.

        Raises:
            NoBackendError: nobody can run the layer, which was built on another device.
        """
        if not held_params(layer):
            return  # prepared already, and nothing was loaded since
        if self.dummy:
            make_up_experts(layer, self.spec)
        else:
            require_all_experts(layer)
        with set_default_torch_dtype(torch.float32):  # vLLM loads under the model's, providers expect torch's own
            self._plan(layer)
        self.on_prepared()

    def _plan(self, layer: RoutedExperts) -> None:
        query: MoeQuery = layer.exl3_query
        where = held_params(layer)[0][1].device
        device = Device.of(where)
        served, chosen = self._choose(query, device)
        names = self._prepare(layer, [backend for backend, _ in chosen.values()])
        startup = startup_of(layer.exl3_owner)
        routes = {
            window.name: Route(
                backend=backend,
                plan=startup.one(backend.name, backend.plan(query, device, window)),
                names=names[backend.name],
                refusals=refusals,
            )
            for window in served.all
            for backend, refusals in [chosen[window.name]]
        }
        layer.exl3_moe = Experts(
            layer=layer.layer_name,
            owner=layer.exl3_owner,
            query=query,
            windows=served,
            routes=routes,
            startup=startup,
        )
        startup.add(layer, layer.exl3_moe)
        if envs.VLLM_EXL3_LOG_PATH_SELECTION:
            paths = ", ".join(f"{name} by {route.backend.name}" for name, route in routes.items())
            logger.info("%s (%s): %s: %s", layer.layer_name, layer.exl3_owner.role, paths, query)

    def _prepare(self, layer: RoutedExperts, providers: Sequence[MoeBackend]) -> dict[str, dict[str, str]]:
        """Hand the slabs to each provider; its tensors become parameters, one where several hold the same.

        Returns the provider's name -> the tensor's -> the parameter's.
        """
        slices = take_slices(layer, self.spec, layer.exl3_experts.parts)
        names: dict[str, dict[str, str]] = {}
        held: dict[tuple, str] = {}
        several = len({backend.name for backend in providers}) > 1
        for backend in providers:
            if backend.name in names:
                continue
            mine = tuple(replace(part) for part in slices) if several else slices  # what one lets go, others may need
            names[backend.name] = {}
            for name, tensor in backend.prepare(layer.exl3_query, mine).items():
                storage = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
                param = f"{PREPARED}{backend.name}_{name}"
                if tensor.numel():
                    param = held.setdefault(storage, param)
                names[backend.name][name] = param
                if param not in layer._parameters:
                    layer.register_parameter(param, Parameter(tensor, requires_grad=False))
        return names

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: no kernel of vLLM's own runs these experts."""
        return

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Module | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y [m, hidden] of this rank's slices: not reduced over ranks, not scaled; shared experts run outside."""
        if torch.compiler.is_compiling():  # on a CPU, where vLLM's own op around this is traced
            return torch.ops.vllm_exl3.routed_experts(x, topk_weights, topk_ids, layer.layer_name)
        return run_experts(layer, x, topk_weights, topk_ids)


def run_experts(
    layer: RoutedExperts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """y [m, hidden] from x [m, hidden] and the routing [m, top_k]."""
    if not layer.exl3_moe.startup.ready and is_forward_context_available():
        warm_all()
    return layer.exl3_moe.run(layer._parameters, x, topk_weights, topk_ids)


def warm_all() -> None:
    """Warm all routed experts of the engine that makes its first run, the draft's too.

    The draft runs last.  Its arena must be there when the target's activations need most, or the memory for both at
    once is not counted.
    """
    for runner in get_forward_context().no_compile_layers.values():
        experts = getattr(getattr(runner, "routed_experts", None), "exl3_moe", None)
        if experts is not None and not experts.startup.ready:
            with use_workspace_lane(experts.startup.lane):
                experts.startup.arena(experts.owner)


@torch.library.custom_op("vllm_exl3::routed_experts", mutates_args=())
def _routed_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """Opaque to compilers, because which experts run depends on the data."""
    layer = get_forward_context().no_compile_layers[layer_name].routed_experts
    return run_experts(layer, x, topk_weights, topk_ids)


@_routed_experts.register_fake
def _(x: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(x)


def activation_of(layer: RoutedExperts) -> Activation:
    """The layer's activation with the numbers that vLLM's own kernels give it."""
    kind = layer.activation
    limit = layer.swiglu_limit if layer.swiglu_limit is not None else layer.moe_config.swiglu_limit
    if kind == MoEActivation.SWIGLUOAI:
        return Activation(name=kind.value, limit=7.0, alpha=1.702, beta=1.0)
    if kind == MoEActivation.SWIGLUSTEP:
        return Activation(name=kind.value, limit=7.0)
    if kind == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        alpha, beta = layer.swiglu_alpha, layer.swiglu_beta
        alpha = layer.moe_config.swiglu_alpha if alpha is None else alpha
        beta = layer.moe_config.swiglu_beta if beta is None else beta
        return Activation(name=kind.value, limit=limit, alpha=1.0 if alpha is None else alpha, beta=beta or 0.0)
    return Activation(name=kind.value, limit=limit if kind == MoEActivation.SILU else None)
