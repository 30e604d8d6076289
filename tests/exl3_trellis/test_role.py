"""Whose layer it is, and that what belongs to one owner is no one else's."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.model_executor.layers.quantization.exl3_trellis.checkpoint import find_module
from vllm.model_executor.layers.quantization.exl3_trellis.role import (
    DRAFT_TAGS,
    PART_TAGS,
    capacity_of,
    role_of,
    stamp,
)
from vllm.model_executor.layers.quantization.exl3_trellis.scratch import Model, ModelRef, Owner, scratch

# prefix, tag, layers of the target, runner -> role
ROLES = [
    ("model.layers.3.self_attn.o_proj", "backbone", 92, "generate", "target"),
    ("model.layers.3.self_attn.o_proj", "eagle_head", 92, "generate", "draft"),  # an EAGLE layer may be called anything
    ("model.layers.0.mlp.down_proj", "draft_model", 24, "draft", "draft"),
    ("model.layers.0.mlp.down_proj", "self_decoder", 24, "draft", "draft"),  # a part of a draft
    ("model.layers.92.mlp.experts", "backbone", 92, "generate", "draft"),  # an MTP layer, built without a tag
    ("model.layers.91.mlp.experts", "backbone", 92, "generate", "target"),
    ("language_model.model.layers.92.head", "backbone", 92, "generate", "draft"),
    ("mtp.layers.0.mlp.gate_up_proj", "backbone", 48, "generate", "draft"),
    ("vision_tower.encoder.layers.26.fc1", "backbone", 24, "generate", "target"),  # a tower deeper than the model
    ("model.layers.92.mlp.experts", "backbone", None, "generate", "target"),
    ("lm_head", "backbone", 92, "generate", "target"),
    ("lm_head", "eagle_head", 92, "generate", "draft"),
]


@pytest.mark.parametrize(("prefix", "tag", "layers", "runner", "role"), ROLES)
def test_role_of(prefix: str, tag: str, layers: int | None, runner: str, role: str) -> None:
    assert role_of(prefix, tag, layers, runner) == role


def test_every_tag_of_vllm_is_known() -> None:
    vllm = pytest.importorskip("vllm.compilation.backends")
    root = Path(vllm.__file__).parents[1]
    tags = {"backbone"}
    for path in root.rglob("*.py"):
        tags |= set(re.findall(r"set_model_tag\(\s*\"(\w+)\"", path.read_text()))
    assert tags == DRAFT_TAGS | PART_TAGS


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (None, "no vLLM configuration"),
        (SimpleNamespace(scheduler_config=None), "scheduler_config None"),
        (SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=None)), "max_num_batched_tokens=None"),
    ],
    ids=["no configuration", "no scheduler", "no capacity"],
)
def test_capacity_is_never_guessed(config: Any, found: str) -> None:
    with pytest.raises(ValueError, match=r"planned for scheduler_config\.max_num_batched_tokens rows") as error:
        capacity_of(config)
    assert found in str(error.value)


def test_capacity_is_the_schedulers() -> None:
    assert capacity_of(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=3072))) == 3072


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Any:
    """building(tag, rows): a context in which vLLM builds a model of two layers."""
    backends = pytest.importorskip("vllm.compilation.backends")
    config = pytest.importorskip("vllm.config")

    @contextmanager
    def build(tag: str, rows: int = 64) -> Iterator[None]:
        model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2), runner_type="generate")
        scheduler = SimpleNamespace(max_num_batched_tokens=rows)
        current = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        monkeypatch.setattr(config, "get_current_vllm_config_or_none", lambda: current)
        if tag == "backbone":
            yield
        else:
            with backends.set_model_tag(tag):
                yield

    return build


def test_stamp_outlives_the_tag_and_never_changes(building: Any) -> None:
    layer, model = SimpleNamespace(), Model()
    with building("eagle_head"):
        owner = stamp(layer, "model.layers.0.mlp.down_proj", model)
    assert (owner.role, owner.model, owner.capacity, owner.device) == ("draft", model, 64, "cpu")
    assert layer.exl3_owner is owner
    changed = r"stamped .*'draft'.* when it was built, now .*'target'"
    with building("backbone"), pytest.raises(ValueError, match=changed):
        stamp(layer, "model.layers.0.mlp.down_proj", model)
    assert layer.exl3_owner is owner


def owner_with(**differs: Any) -> Owner:
    """An owner; what is not given is the same for all of them."""
    return Owner(**({"model": ONE, "role": "target", "device": "cpu", "capacity": 64} | differs))


ONE = Model()


@pytest.mark.parametrize(
    "other",
    [{"model": Model()}, {"role": "draft"}, {"device": "cuda:1"}, {"capacity": 128}],
    ids=["another model", "another role", "another device", "another capacity"],
)
def test_owners_that_differ_share_nothing(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = "vllm.model_executor.layers.quantization.exl3_trellis.scratch"
    monkeypatch.setattr(f"{module}._on_second_stream", lambda device: False)
    mine = scratch(owner_with(), "arena", object)
    assert scratch(owner_with(), "arena", object) is mine
    assert scratch(owner_with(), "staging", object) is not mine
    assert scratch(owner_with(**other), "arena", object) is not mine


def test_target_and_draft_of_one_configuration_are_apart(building: Any) -> None:
    ref = ModelRef()
    target, draft = SimpleNamespace(), SimpleNamespace()
    with building("backbone"):
        stamp(target, "model.layers.1.mlp.experts", ref.get())
    with building("eagle_head"):
        stamp(draft, "model.layers.1.mlp.experts", ref.get())
    assert target.exl3_owner.model is draft.exl3_owner.model
    arenas = [scratch(layer.exl3_owner, "arena", bytearray) for layer in (target, draft)]
    assert arenas[0] is not arenas[1]


def test_released_with_the_last_layer() -> None:
    import weakref

    class Arena:
        pass

    ref = ModelRef()
    layers = [SimpleNamespace(owner=Owner(model=ref.get(), role="target", device="cpu", capacity=8)) for _ in range(2)]
    arena = weakref.ref(scratch(layers[0].owner, "arena", Arena))
    first = id(ref.get())
    layers.pop()
    gc.collect()
    assert arena() is not None
    assert id(ref.get()) == first
    layers.clear()
    gc.collect()
    assert arena() is None
    assert not ref.get().held


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_a_configuration_that_crosses_processes_takes_nothing_along(duplicate: Any) -> None:
    ref = ModelRef()
    model = ref.get()
    scratch(owner_with(model=model), "arena", object)
    assert duplicate(ref).get() is not model
    assert not duplicate(model).held


def test_threads_get_the_same_resource_made_once() -> None:
    owner, made, got = owner_with(model=Model()), [], []
    start = threading.Barrier(8)

    def make() -> object:
        made.append(object())
        threading.Event().wait(0.05)  # time for the others to come in
        return made[-1]

    def run() -> None:
        start.wait()
        got.append(scratch(owner, "arena", make))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert got == made * 8


@pytest.fixture
def manager() -> Any:
    """A real workspace manager of two microbatches and two lanes, whose pool counts its visits."""
    torch = pytest.importorskip("torch")
    workspace = pytest.importorskip("vllm.v1.worker.workspace")
    visits = []

    @contextmanager
    def pool() -> Iterator[None]:
        visits.append(True)
        yield

    workspace.init_workspace_manager(torch.device("cpu"), 2, 2, alloc_context=pool)
    manager = workspace.current_workspace_manager()
    manager.visits = visits
    yield manager
    workspace.reset_workspace_manager()


def test_follows_vllms_lanes_and_sleeping_pool(manager: Any) -> None:
    from vllm.v1.worker.workspace import use_workspace_lane

    owner = owner_with(model=Model())
    main = scratch(owner, "arena", object)
    with use_workspace_lane(1):
        other = scratch(owner, "arena", object)
        assert scratch(owner, "arena", object) is other
    assert main is not other
    assert len(manager.visits) == 2  # once for each, inside the pool that sleeping empties


def test_makes_nothing_once_workspaces_are_locked(manager: Any) -> None:
    owner = owner_with(model=Model())
    arena = scratch(owner, "arena", object)
    manager.lock()
    assert scratch(owner, "arena", object) is arena
    with pytest.raises(
        RuntimeError, match=r"'staging' \(target, cpu, 64 rows, microbatch 0, lane 0\) was not made before"
    ):
        scratch(owner, "staging", object)


@pytest.mark.parametrize("lanes", [1, 3])
def test_another_engines_manager_changes_no_slot(manager: Any, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine of a process makes the manager anew, with lanes of its own number; graphs keep the addresses."""
    from vllm.v1.worker import workspace

    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: 1)
    owner = owner_with(model=Model())
    arena = scratch(owner, "arena", object)
    workspace.init_workspace_manager(manager._device, 2, lanes)
    workspace.lock_workspace()
    assert scratch(owner, "arena", object) is arena


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.layers.92.head", "model.layers.92.shared_head.head"),
        ("model.layers.92.shared_head.head", "model.layers.92.shared_head.head"),
        ("model.layers.92.mtp_block.self_attn.o_proj", "model.layers.92.self_attn.o_proj"),
        ("model.layers.92.self_attn.o_proj", "model.layers.92.self_attn.o_proj"),
        ("language_model.lm_head", "lm_head"),
        ("model.layers.91.head", None),
    ],
)
def test_names_of_mtp_layers(name: str, stored: str | None) -> None:
    modules = ("lm_head", "model.layers.92.shared_head.head", "model.layers.92.self_attn.o_proj")
    assert find_module(dict.fromkeys(modules, ""), name) == stored
