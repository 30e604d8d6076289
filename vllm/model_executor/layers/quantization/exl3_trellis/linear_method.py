# SPDX-License-Identifier: Apache-2.0
"""The door between vLLM's linear layers and EXL3: create, load, prepare, apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Module, Parameter

import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MinimaxM3QKVParallelLinearWithIndexer,
    QKVParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from . import backends
from .intake import PLAIN, create_params, gather, make_up, output_indices, require_complete
from .layout import padded
from .placement import Owned, Piece, Source, place
from .plan import Device, LinearQuery, Plan, Shard, choose
from .role import capacity_of

logger = init_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The provider of one product, chosen before weights are read."""

    pieces: tuple[Piece, ...]
    query: LinearQuery
    backend: backends.Backend


@dataclass(frozen=True, kw_only=True)
class Product:
    """One call of a provider: the pieces of a layer that multiply the same inputs and share a codebook."""

    pieces: tuple[Piece, ...]
    backend: backends.Backend
    plan: Plan
    names: tuple[str, ...]  # of the prepared tensors
    prefix: str  # of the parameters that hold them

    def run(self, layer: Module, x: torch.Tensor) -> torch.Tensor:
        """[m, sum of the pieces' widths] from the layer's inputs [m, k]."""
        prepared = {name: getattr(layer, self.prefix + name) for name in self.names}
        piece = self.pieces[0]
        if (piece.x_start, piece.x_width) != (0, x.shape[1]):
            x = x[:, piece.x_start : piece.x_start + piece.x_width].contiguous()
        return self.backend.run(self.plan, prepared, x)


class EXL3LinearMethod(LinearMethodBase):
    """Serves one linear layer whose weights, or some of whose merged weights, are stored as EXL3.

    Args:
        components: the stored modules in the order of the layer's outputs, each one source or its slices.
        on_prepared: called once per layer when its weights are ready, for progress.
        dummy: weights are made up, not read (`--load-format dummy`).
    """

    def __init__(
        self, components: Sequence[Sequence[Source]], on_prepared: Callable[[], None], dummy: bool = False
    ) -> None:
        self.components = components
        self.on_prepared = on_prepared
        self.dummy = dummy

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate the final place of every tensor this rank keeps, and choose a provider for each product.

        Shapes come from the headers, so a product that nobody can run is refused before any weight is read.

        Raises:
            NoBackendError: no provider can run it here.
        """
        cut = input_size_per_partition != input_size
        start = layer.tp_rank * input_size_per_partition if cut else 0
        inputs = Owned(full=input_size, start=start, width=input_size_per_partition)
        outputs = owned_outputs(layer, output_partition_sizes)
        layer.exl3_pieces = tuple(place(self.components, outputs, inputs, layer.tp_size))
        layer.exl3_out_width = sum(output_partition_sizes)
        layer.exl3_dtype = params_dtype
        config = get_current_vllm_config_or_none()
        layer.exl3_max_rows = capacity_of(config)
        sources = [source for component in self.components for source in component]
        create_params(layer, sources, layer.exl3_pieces, params_dtype)
        _accept_padded_bias(layer, outputs)
        layer.exl3_choices = None
        device = next(param.device for param in layer.parameters(recurse=False) if hasattr(param, "exl3_slots"))
        if config is not None and device.type == config.device_config.device_type:  # else vLLM will move them
            self._choose(layer, Device.of(device))

    def process_weights_after_loading(self, layer: Module) -> None:
        """Hand the loaded tensors to the provider of each product; vLLM calls it again after a reload."""
        loaded = [name for name, param in layer.named_parameters(recurse=False) if hasattr(param, "exl3_slots")]
        if loaded in ([], [PLAIN]):
            return  # prepared already, and nothing was loaded since
        if self.dummy:
            make_up(layer)
        else:
            require_complete(layer)
        device = Device.of(getattr(layer, loaded[0]).device)
        if layer.exl3_choices is None or layer.exl3_choices[0] != device:
            self._choose(layer, device)
        choices = layer.exl3_choices[1]
        prepared = [self._prepare(layer, index, choice, device) for index, choice in enumerate(choices)]
        for name in loaded:
            if name != PLAIN:
                delattr(layer, name)
        for product, tensors in prepared:
            for name, tensor in tensors.items():
                layer.register_parameter(product.prefix + name, Parameter(tensor, requires_grad=False))
        layer.exl3_products = tuple(product for product, _ in prepared)
        layer.exl3_whole = _makes_all(layer.exl3_products, layer.exl3_out_width)
        self.on_prepared()

    def _choose(self, layer: Module, device: Device) -> None:
        """Keep in `layer.exl3_choices` who runs its products on `device`; a model's log names each provider once."""
        forced = None if envs.VLLM_EXL3_BACKEND == "auto" else envs.VLLM_EXL3_BACKEND
        products: dict[tuple[int, int, str], list[Piece]] = {}
        for piece in layer.exl3_pieces:
            if piece.source.spec is not None:
                products.setdefault((piece.x_start, piece.x_width, piece.source.stored.codebook), []).append(piece)
        choices = []
        for pieces in products.values():
            query = _query(tuple(pieces), layer.exl3_dtype, layer.exl3_max_rows)
            backend, refusals = choose(query, device, backends.candidates(query.fused), forced)
            why = "".join(f"; not {reason}" for reason in refusals)
            line = f"EXL3: provider {backend.name} for linear layers in {query.io_dtype}{why}"
            layer.exl3_owner.model.keep(("said", line), partial(logger.info, line))
            choices.append(Choice(pieces=tuple(pieces), query=query, backend=backend))
        layer.exl3_choices = device, tuple(choices)

    def _prepare(
        self, layer: Module, index: int, choice: Choice, device: Device
    ) -> tuple[Product, dict[str, torch.Tensor]]:
        pieces, query, backend = choice.pieces, choice.query, choice.backend
        weights = backends.LinearWeights(
            trellis=gather(layer, pieces, "trellis"),
            suh=gather(layer, pieces, "suh"),
            svh=gather(layer, pieces, "svh"),
        )
        if envs.VLLM_EXL3_LOG_PATH_SELECTION:
            logger.info("%s: %s runs %s", layer.prefix, backend.name, query)
        plan = backend.plan(query, device)
        tensors = backend.prepare(plan, weights)
        prefix = f"exl3_{index}_"
        return Product(pieces=pieces, backend=backend, plan=plan, names=tuple(tensors), prefix=prefix), tensors

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y[..., out] = x[..., k] through every piece, plus bias."""
        rows = x.reshape(-1, x.shape[-1])
        y = layer.exl3_products[0].run(layer, rows) if layer.exl3_whole else _assemble(layer, rows)
        if bias is not None:
            y = y + bias
        return y.view(*x.shape[:-1], layer.exl3_out_width)


def owned_outputs(layer: Module, widths: list[int]) -> list[Owned]:
    """This rank's part of each output of a vLLM layer whose local widths are `widths`."""
    if isinstance(layer, ParallelLMHead):
        full, start = layer.org_vocab_size, layer.shard_indices.org_vocab_start_index
        held = max(0, min(widths[0], padded(full) - start))  # columns beyond the vocabulary are cut by the sampler
        return [Owned(full=full, start=start, width=held, slot=widths[0])]
    if not isinstance(layer, ColumnParallelLinear):
        return [Owned(full=width, start=0, width=width) for width in widths]
    owned = []
    for index, width in enumerate(widths):
        replicas = 1
        if isinstance(layer, QKVParallelLinear) and index > 0:
            replicas = layer.num_kv_head_replicas
        if isinstance(layer, MinimaxM3QKVParallelLinearWithIndexer) and index == 4:
            replicas = layer.tp_size  # index_k is one head that every rank holds
        full = width * layer.tp_size // replicas
        owned.append(Owned(full=full, start=layer.tp_rank // replicas * width, width=width))
    return owned


def _query(pieces: tuple[Piece, ...], dtype: torch.dtype, max_rows: int) -> LinearQuery:
    rows = pieces[0].rows
    shards = tuple(
        Shard(
            n=piece.columns[1] - piece.columns[0],
            width=piece.width,
            first=piece.first,
            rate=piece.source.stored.rate,
            codebook=piece.source.stored.codebook,
        )
        for piece in pieces
    )
    return LinearQuery(
        k=rows[1] - rows[0],
        width=pieces[0].x_width,
        shards=shards,
        io_dtype=str(dtype).removeprefix("torch."),
        max_rows=max_rows,
        fused=envs.VLLM_EXL3_FUSED,
    )


def _makes_all(products: tuple[Product, ...], width: int) -> bool:
    """Whether one product makes the layer's whole output, its pieces side by side."""
    if len(products) != 1:
        return False
    column = 0
    for piece in products[0].pieces:
        if piece.y_start != column:
            return False
        column += piece.width
    return column == width


def _assemble(layer: Module, x: torch.Tensor) -> torch.Tensor:
    """Sum of products that share outputs (input slices), beside unquantized siblings and padding."""
    y = x.new_zeros(x.shape[0], layer.exl3_out_width)
    for product in layer.exl3_products:
        part, column = product.run(layer, x), 0
        for piece in product.pieces:
            y[:, piece.y_start : piece.y_start + piece.width] += part[:, column : column + piece.width]
            column += piece.width
    plain = getattr(layer, PLAIN, None)
    for slot in getattr(plain, "exl3_slots", ()):
        piece = slot.piece
        y[:, piece.y_start : piece.y_start + piece.width] = F.linear(x, slot.view(plain))
    return y


def _accept_padded_bias(layer: Module, outputs: list[Owned]) -> None:
    """Let the layer's own bias load from a stored bias that is padded to whole blocks, as EXL3 stores it.

    The layer makes its bias after `create_weights` and gives it `layer.weight_loader`, so that is what is wrapped.
    """
    if not getattr(layer, "has_bias", False) or all(owned.full == padded(owned.full) for owned in outputs):
        return
    load = layer.weight_loader

    def weight_loader(param: Parameter, loaded_weight: torch.Tensor, *shard_id: Any, **named: Any) -> None:
        fed = output_indices(next(iter((*shard_id, *named.values())), None))
        full = sum(owned.full for index, owned in enumerate(outputs) if fed is None or index in fed)
        if tuple(loaded_weight.shape) == (padded(full),):
            loaded_weight = loaded_weight[:full]
        load(param, loaded_weight, *shard_id, **named)

    layer.weight_loader = weight_loader
