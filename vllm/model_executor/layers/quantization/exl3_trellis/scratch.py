# SPDX-License-Identifier: Apache-2.0
"""Mutable memory that the layers of one owner share: arenas, staging buffers, a library's runtime.

    arena = scratch(layer.exl3_owner, "moe decode", lambda: torch.empty(plan.workspace_bytes, ...))

Nothing is global.  A model's layers hold it, and what they share dies with the last of them.  Where vLLM has a
workspace manager its rules hold: one copy for each of its lanes and microbatches, memory from the pool that sleeping
empties, and nothing new once it is locked, for captured graphs keep the addresses.
Does not know what is stored, nor its size.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

if TYPE_CHECKING:
    from .role import Role

T = TypeVar("T")


class Model:
    """One loaded model, by identity.  A copy, or what a pickle makes of it, is another model with nothing in it."""

    def __init__(self) -> None:
        self.held: dict[Hashable, Any] = {}
        self.lock = threading.RLock()  # a resource may be made of others

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under `key` for the whole model, made by the first call: no memory of a device."""
        with self.lock:
            if key not in self.held:
                self.held[key] = make()
            return cast(T, self.held[key])

    def __reduce__(self) -> tuple[type[Model], tuple[()]]:
        return Model, ()


class ModelRef:
    """Where a configuration remembers the model that is built from it, without keeping it alive."""

    def __init__(self) -> None:
        self._ref: Callable[[], Model | None] = lambda: None

    def get(self) -> Model:
        """The model that is being built; a new one when all layers of the last are gone."""
        model = self._ref()
        if model is None:
            model = Model()
            self._ref = weakref.ref(model)
        return model

    def __reduce__(self) -> tuple[type[ModelRef], tuple[()]]:
        return ModelRef, ()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whom mutable memory belongs to.  It is never shared between owners that differ in anything.

    There is no batch size in it: a layer's capacity is fixed when it is built.
    """

    model: Model
    role: Role
    device: str  # "cuda:0"
    capacity: int  # most rows that one call brings


def scratch(owner: Owner, name: Hashable, make: Callable[[], T]) -> T:
    """What `owner` calls `name`, made by the first call on this lane, microbatch and kind of stream.

    Args:
        owner: stamped on the layer when it was built.
        name: identifies the resource and its configuration.
        make: allocates it.

    Raises:
        RuntimeError: it is not there yet, and vLLM has locked its workspaces.
    """
    slots, locked, pool = _place()
    return _get(owner, name, make, slots[0], locked, pool)


def reserve(owner: Owner, name: Hashable, make: Callable[[], T]) -> None:
    """Make what `scratch` would, for every microbatch of this lane: when memory is counted, only one of them runs."""
    slots, locked, pool = _place()
    for slot in slots:
        _get(owner, name, make, slot, locked, pool)


Pool = Callable[[], AbstractContextManager]
Slot = tuple[int, int]  # microbatch, lane; vLLM's own number for it changes with how many lanes its manager has


def _get(owner: Owner, name: Hashable, make: Callable[[], T], slot: Slot, locked: bool, pool: Pool) -> T:
    key = (name, owner.role, owner.device, owner.capacity, slot, _on_second_stream(owner.device))
    with owner.model.lock:
        if key not in owner.model.held:
            if locked:
                where = f"{owner.role}, {owner.device}, {owner.capacity} rows, microbatch {slot[0]}, lane {slot[1]}"
                raise RuntimeError(f"{name!r} ({where}) was not made before vLLM locked its workspaces; warm it up")
            with pool():
                owner.model.held[key] = make()
        return cast(T, owner.model.held[key])


def current_lane() -> int:
    """vLLM's workspace lane that the caller runs in."""
    workspace = sys.modules.get("vllm.v1.worker.workspace")
    if workspace is None or not workspace.is_workspace_manager_initialized():
        return 0
    manager = workspace.current_workspace_manager()
    return manager._get_workspace_id() % manager._num_lanes


def _place() -> tuple[list[Slot], bool, Pool]:
    """vLLM's current workspace, then those of the other microbatches of its lane; whether they may still grow; the pool
    that their memory comes from.  The manager is the process's: an engine that came later may have made another."""
    workspace = sys.modules.get("vllm.v1.worker.workspace")  # unless loaded, nobody has made one
    if workspace is None or not workspace.is_workspace_manager_initialized():
        return [(0, 0)], False, nullcontext  # the CPU worker has none
    manager = workspace.current_workspace_manager()
    here, lane = divmod(manager._get_workspace_id(), manager._num_lanes)
    others = (microbatch for microbatch in range(manager._num_ubatches) if microbatch != here)
    slots = [(microbatch, lane) for microbatch in (here, *others)]
    return slots, manager.is_locked(), manager._alloc_context


def _on_second_stream(device: str) -> bool:
    """Whether the caller runs on the stream that vLLM runs shared experts on, beside the routed ones."""
    if not device.startswith("cuda"):
        return False
    from vllm.utils.torch_utils import aux_stream

    return torch.cuda.current_stream() == aux_stream()
