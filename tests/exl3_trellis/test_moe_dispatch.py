"""Routed experts as they run: the right window for every number of rows, every row once, one arena an owner.

The planning is the real one; the provider computes with the torch provider and records what it was asked.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.exl3_trellis.moe_layers import load, make_layer, make_spec, query_of, slices_of, stored_tensors
from tests.exl3_trellis.recording import BYTES_A_ROW, Recording, windows_of
from tests.exl3_trellis.test_torch_moe import routing
from vllm.model_executor.layers.quantization.exl3_trellis import moe_dispatch
from vllm.model_executor.layers.quantization.exl3_trellis.backends import torch_moe
from vllm.model_executor.layers.quantization.exl3_trellis.moe_dispatch import Experts, Route
from vllm.model_executor.layers.quantization.exl3_trellis.moe_plan import Limits, choose_experts, windows
from vllm.model_executor.layers.quantization.exl3_trellis.moe_startup import startup_of
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, NoBackendError, Window
from vllm.model_executor.layers.quantization.exl3_trellis.scratch import Model, Owner

CPU = Device(kind="cpu")
SPEC = make_spec({shard: [3, 4, 3, 4] for shard in ("w1", "w3", "w2")}, hidden=128)
QUERY = query_of(SPEC, make_layer(SPEC, 256)[1])
LIMITS = Limits(min_rows=2, decode_rows=4, capacity=9, chunk=3)
MOST = 24  # rows of a step


@dataclasses.dataclass(eq=False)
class Planned:
    """A layer and what it runs with."""

    layer: torch.nn.Module
    experts: Experts

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.experts.run(self.layer._parameters, x, weights, ids)


@functools.cache
def decoded() -> dict[str, torch.Tensor]:
    """What the torch provider prepares of SPEC."""
    layer, parts = make_layer(SPEC, 256)
    load(layer, stored_tensors(SPEC))
    return torch_moe.prepare(QUERY, slices_of(layer, SPEC, parts))


def owner_of(model: Model | None = None, role: Any = "target", capacity: int = MOST) -> Owner:
    return Owner(model=model or Model(), role=role, device="cpu", capacity=capacity)


def planned(
    owner: Owner, providers: Sequence[Any], limits: Limits = LIMITS, name: str = "model.layers.3.mlp.experts"
) -> Planned:
    """A loaded layer, planned for `providers`."""
    layer, query = torch.nn.Module(), dataclasses.replace(QUERY, max_rows=owner.capacity)
    choice = choose_experts(query, CPU, providers)
    served = windows(limits, query.max_rows, planned=choice.planned is not None)
    routes = {}
    for window in served.all:
        backend, refusals = choice.of(window.name)
        names = {}
        for key, tensor in backend.prepare(query, ()).items():
            names[key] = f"{backend.name}_{key}"
            layer.register_parameter(names[key], torch.nn.Parameter(tensor, requires_grad=False))
        routes[window.name] = Route(
            backend=backend, plan=backend.plan(query, CPU, window), names=names, refusals=refusals
        )
    startup = startup_of(owner)
    experts = Experts(layer=name, owner=owner, query=query, windows=served, routes=routes, startup=startup)
    startup.add(layer, experts)
    return Planned(layer, experts)


def both() -> tuple[Recording, Recording]:
    """One for decode and prefill, one for the parity path."""
    return Recording(decoded=decoded()), Recording(name="torch", capturable=False, decoded=decoded())


def activations(rows: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, ids = (each[:rows] for each in routing(max(rows, 1), SPEC.count, seed=seed))
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)), weights, ids


@pytest.fixture(scope="module")
def alone() -> Any:
    """The torch provider with nothing around it: alone(x, weights, ids) -> y."""
    plan = torch_moe.plan(QUERY, CPU, Window(name="parity", rows=64, block=64))

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch_moe.run(plan, decoded(), torch.empty(0, dtype=torch.uint8), x, weights, ids, y)
        return y

    return run


SLICES = {
    0: [],
    1: [("parity", 1)],
    2: [("decode", 2)],
    4: [("decode", 4)],
    5: [("prefill", 5)],
    9: [("prefill", 9)],
    10: [("prefill", 8), ("decode", 2)],
    13: [("prefill", 9), ("decode", 4)],
    18: [("prefill", 9), ("prefill", 9)],
    24: [("prefill", 9), ("prefill", 9), ("prefill", 6)],
    30: [("prefill", 9), ("prefill", 9), ("prefill", 9), ("decode", 3)],  # more than a step should bring
}


@pytest.mark.parametrize(("rows", "slices"), SLICES.items())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_row_gets_its_own_output(alone, rows, slices, dtype):
    plans, parity = both()
    layer = planned(owner_of(), (plans, parity))
    x, weights, ids = activations(rows)
    ids[::3, 0] = -1  # nobody's
    y = layer(x, weights, ids.to(dtype))
    assert torch.allclose(y, alone(x, weights, ids), atol=1e-6)
    called = plans.calls + parity.calls
    assert {call.ids for call in called} <= {dtype}
    assert [(call.window, call.rows) for call in called] == slices


def test_without_a_prefill_plan_long_batches_take_the_parity_path(alone):
    plans, parity = both()
    layer = planned(owner_of(), (plans, parity), dataclasses.replace(LIMITS, prefill=False))
    for rows, expected in {4: ([("decode", 4)], []), 5: ([], [("parity", 5)]), MOST: ([], [("parity", MOST)])}.items():
        given = activations(rows)
        assert torch.allclose(layer(*given), alone(*given), atol=1e-6)
        assert (plans.ran(), parity.ran()) == expected


def test_block_sizes_reach_the_provider():
    plans, _ = both()
    limits = Limits(decode_rows=4, decode_block=16, prefill_block=48)
    planned(owner_of(), (plans,), limits)
    assert [(plan.window.rows, plan.window.block) for plan in plans.planned] == [(4, 16), (MOST, 48)]


def test_nobody_is_asked_for_a_path_that_no_row_takes():
    plans, parity = both()
    layer = planned(owner_of(), (plans, parity), Limits(decode_rows=4))
    layer(*activations(1))
    assert (plans.ran(), parity.planned, parity.prepared) == ([("decode", 1)], [], 0)


def test_rows_that_are_not_contiguous_and_weights_of_another_type(alone):
    layer = planned(owner_of(), both())
    x, weights, ids = activations(6)
    wide = torch.stack((x, x), dim=1)[:, 0]
    given = weights.t().contiguous().t().bfloat16()
    assert torch.allclose(layer(wide, given, ids.t().contiguous().t()), alone(x, given.float(), ids), atol=1e-6)


@pytest.mark.parametrize(("change", "message"), [
    ({"x": torch.zeros(3, 256)}, r"activations are \[3, 256\] torch.float32, want \[m, 128\] float32"),
    ({"x": torch.zeros(3, 128).half()}, r"activations are \[3, 128\] torch.float16, want \[m, 128\] float32"),
    ({"weights": torch.zeros(3, 1)}, r"routing is \[3, 1\] and \[3, 2\] torch.int32, want \[3, 2\], ids of int32 or"),
    ({"ids": torch.zeros(2, 2).int()}, r"routing is \[3, 2\] and \[2, 2\] torch.int32, want \[3, 2\]"),
    ({"ids": torch.zeros(3, 2).short()}, r"routing is \[3, 2\] and \[3, 2\] torch.int16, want .* of int32 or int64"),
])
def test_what_comes_is_validated_once(change, message):
    plans, parity = both()
    layer = planned(owner_of(), (plans, parity))
    x, weights, ids = activations(3)
    given = {"x": x, "weights": weights, "ids": ids} | change
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.experts: " + message):
        layer(**given)
    assert not plans.calls


@pytest.mark.parametrize(("limits", "rows", "remedy"), [
    (LIMITS, 1, "VLLM_EXL3_TRELLIS_MIN_M to at most 1"),
    (dataclasses.replace(LIMITS, prefill=False), 7, "VLLM_EXL3_PREFILL_TRELLIS to 1, or .*MAX_M to at least 7"),
], ids=["below the window", "above it"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_parity_path_inside_a_capture(monkeypatch, role, limits, rows, remedy):
    plans, parity = both()
    layer = planned(owner_of(role=role), (plans, parity), limits)
    layer(*activations(2))
    plans.ran()
    monkeypatch.setattr(moe_dispatch, "capturing", lambda device: True)
    want = rf"model\.layers\.3\.mlp\.experts \({role}\): {rows} rows take the parity path \(torch\), .*: set {remedy}"
    with pytest.raises(RuntimeError, match=want):
        layer(*activations(rows))
    assert not parity.calls
    layer(*activations(3))  # a plan may be captured
    assert plans.ran() == [("decode", 3)]


def test_one_arena_of_the_largest_need_for_all_layers_of_an_owner():
    plans, parity = both()
    owner = owner_of()
    layers = [planned(owner, (plans, parity)) for _ in range(3)]
    for layer in layers:
        for rows in (1, 3, 7, 20):
            layer(*activations(rows))
    assert len({call.arena for call in plans.calls + parity.calls}) == 1
    assert startup_of(owner).need == BYTES_A_ROW * LIMITS.capacity


def arena_of(layer: Planned) -> torch.Tensor:
    return layer.experts.startup.arena(layer.experts.owner)


@pytest.mark.parametrize("other", [{"role": "draft"}, {"capacity": 2 * MOST}, {"model": Model()}],
                         ids=["target and draft", "capacities", "models"])
def test_owners_share_no_arena(other):
    model = Model()
    first, second = (planned(owner, both()) for owner in (owner_of(model), owner_of(**({"model": model} | other))))
    assert arena_of(first).data_ptr() != arena_of(second).data_ptr()
    assert arena_of(first) is arena_of(first)


def test_capacity_bounds_the_arena():
    needs = []
    for capacity in (9, 18):
        owner = owner_of()
        planned(owner, both(), dataclasses.replace(LIMITS, capacity=capacity))
        needs.append(startup_of(owner).need)
    assert needs == [9 * BYTES_A_ROW, 18 * BYTES_A_ROW]


def test_the_first_rows_warm_every_plan_of_the_owner_and_no_other(caplog):
    plans, parity = both()
    model = Model()
    layers = [planned(owner_of(model), (plans, parity)) for _ in range(2)]
    draft = planned(owner_of(model, "draft"), (plans, parity))
    assert not plans.warmed
    with caplog.at_level(logging.INFO, "vllm.exl3"):
        layers[0](*activations(3))
    assert windows_of(plans.warmed) == {"decode": 1, "prefill": 1}  # the layers' plans are equal
    assert windows_of(parity.warmed) == {"parity": 1}
    for layer in (*layers, layers[0]):
        layer(*activations(20))
    assert (len(plans.warmed), len(parity.warmed)) == (2, 1)
    draft(*activations(1))
    assert (len(plans.warmed), len(parity.warmed)) == (4, 2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith("EXL3 experts of the target, decode: recording, 2 layers; 2 to 4 rows, 8 a block; works")
    assert "2 specialisations checked and loaded in 0.0 s" in lines[1]
    assert lines[2].startswith("EXL3 experts of the target, parity: torch, 2 layers; 1 to 1 rows, 3 a block; ")


def test_every_provider_is_checked_once_for_each_kind_of_layer():
    plans, parity = both()
    model = Model()
    for role in ("target", "draft"):
        for layer in [planned(owner_of(model, role), (plans, parity)) for _ in range(2)]:
            layer(*activations(3))
    assert len(plans.checked) == len(parity.checked) == 1
    assert plans.checked[0].experts == SPEC.count
    plans.disagrees = True
    another = planned(owner_of(), (plans, parity))
    for _ in range(2):  # it stays refused
        with pytest.raises(NoBackendError, match="recording: 4 experts .* disagrees with the reference"):
            another(*activations(3))
    assert not another.experts.startup.ready


def test_the_log_says_why_others_were_passed_over(caplog):
    other = Recording(name="native", refusal="too old")
    layer = planned(owner_of(), (other, *both()))
    with caplog.at_level(logging.INFO, "vllm.exl3"):
        layer(*activations(3))
    assert caplog.records[0].getMessage().endswith("; not native: too old")


def test_a_reload_warms_nothing_that_is_warm():
    plans, parity = both()
    owner = owner_of()
    first = planned(owner, (plans, parity))
    first(*activations(3))
    before, arena = len(plans.warmed), arena_of(first)
    again = planned(owner, (plans, parity))
    again(*activations(3))
    assert len(plans.warmed) == before
    assert arena_of(again) is arena


def test_layers_and_arena_die_with_the_model():
    owner = owner_of()
    layer = planned(owner, both())
    layer(*activations(3))
    held = [weakref.ref(it) for it in (owner.model, layer.experts.startup, arena_of(layer))]
    gc.disable()  # nothing waits for the collector: no cycle holds them
    try:
        del layer, owner
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


def test_threads_warm_once_and_get_their_own_outputs(alone, caplog):
    caplog.set_level(logging.INFO, "vllm.exl3")
    plans, parity = both()
    plans.seconds_to_warm = 0.05  # time for the others to come in
    layer = planned(owner_of(), (plans, parity), Limits(decode_rows=4))
    given = [activations(3, seed) for seed in range(6)]
    found: dict[int, torch.Tensor] = {}
    start = threading.Barrier(len(given))

    def run(index: int) -> None:
        start.wait()
        found[index] = layer(*given[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert windows_of(plans.warmed) == {"decode": 1, "prefill": 1}
    assert len(caplog.records) == 2
    for index, each in enumerate(given):
        assert torch.allclose(found[index], alone(*each), atol=1e-6)


def test_two_engines_of_one_process_plan_apart():
    one, two = both(), both()
    layers = [planned(owner_of(), one), planned(owner_of(), two, dataclasses.replace(LIMITS, decode_rows=6))]
    for layer in layers:
        layer(*activations(5))
    assert one[0].ran() == [("prefill", 5)]
    assert two[0].ran() == [("decode", 5)]
    assert arena_of(layers[0]).data_ptr() != arena_of(layers[1]).data_ptr()


@pytest.fixture
def manager() -> Any:
    """A real workspace manager of two microbatches and two lanes."""
    from vllm.v1.worker import workspace

    workspace.init_workspace_manager(torch.device("cpu"), 2, 2)
    yield workspace.current_workspace_manager()
    workspace.reset_workspace_manager()


def test_a_draft_is_warmed_in_the_lane_that_it_was_loaded_in(manager):
    from vllm.v1.worker.workspace import use_workspace_lane

    target = planned(owner_of(), both())
    with use_workspace_lane(1):
        draft = planned(owner_of(role="draft"), both())
    draft.experts.startup.add(draft.layer, draft.experts)  # reloaded outside
    assert [layer.experts.startup.lane for layer in (target, draft)] == [0, 1]


def test_every_microbatch_has_an_arena_when_memory_is_counted(manager, monkeypatch):
    from vllm.v1.worker import workspace

    layer, arenas = planned(owner_of(), both()), set()
    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: 1)
    layer(*activations(3))
    manager.lock()
    for microbatch in (0, 1):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda now=microbatch: now)
        arenas.add(arena_of(layer).data_ptr())
    assert len(arenas) == 2
    with workspace.use_workspace_lane(1), pytest.raises(RuntimeError, match="was not made before vLLM locked"):
        arena_of(layer)
