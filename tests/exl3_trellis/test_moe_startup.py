"""What layers of routed experts share before they run: one arena an owner, kernels checked and loaded once."""

from __future__ import annotations

import dataclasses
import gc
import logging
import re
import threading
import weakref
from typing import Any

import pytest
import torch

from tests.exl3_trellis import recording
from tests.exl3_trellis.planned_experts import (
    LIMITS,
    MOST,
    SPEC,
    Planned,
    activations,
    alone,
    both,
    owner_of,
    planned,
)
from tests.exl3_trellis.recording import BYTES_A_ROW, Recording, windows_of
from vllm.model_executor.layers.quantization.exl3_trellis import moe_startup
from vllm.model_executor.layers.quantization.exl3_trellis.moe_plan import Limits
from vllm.model_executor.layers.quantization.exl3_trellis.moe_startup import startup_of
from vllm.model_executor.layers.quantization.exl3_trellis.plan import NoBackendError
from vllm.model_executor.layers.quantization.exl3_trellis.scratch import Model


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


@pytest.mark.parametrize(
    "other",
    [{"role": "draft"}, {"capacity": 2 * MOST}, {"model": Model()}],
    ids=["target and draft", "capacities", "models"],
)
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


# bytes free -> what the message advises; a row takes BYTES_A_ROW, the capacity is 16, the decode plan takes 4 rows
TOO_LITTLE = {
    8 * BYTES_A_ROW + 256: "set VLLM_EXL3_PREFILL_CAPACITY=8 (now 16): an arena of 0.0 MiB, less leaves more",
    8 * BYTES_A_ROW + 255: "set VLLM_EXL3_PREFILL_CAPACITY=5 (now 16): an arena of 0.0 MiB, less leaves more",
    5 * BYTES_A_ROW + 255: "no VLLM_EXL3_PREFILL_CAPACITY makes it fit; lower --max-num-batched-tokens",
}


@pytest.mark.parametrize(("free", "advice"), TOO_LITTLE.items())
def test_an_arena_that_does_not_fit_says_what_would(monkeypatch, free, advice):
    layer = planned(owner_of(), both(), dataclasses.replace(LIMITS, capacity=16))
    given = activations(3)

    def allocate(size: int, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(moe_startup, "free_bytes", lambda device: free)
    monkeypatch.setattr(moe_startup.torch, "empty", allocate)
    found = f"EXL3 experts of the target work in an arena of 0.0 MiB, and cpu has 0.0 MiB free: {advice}"
    with pytest.raises(RuntimeError, match=re.escape(found)) as error:
        layer.experts.startup.arena(layer.experts.owner)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    monkeypatch.undo()
    layer(*given)  # nothing is left that keeps it from another try


def test_without_a_prefill_plan_no_capacity_is_advised(monkeypatch):
    layer = planned(owner_of(), both(), dataclasses.replace(LIMITS, prefill=False))

    def allocate(size: int, device: str) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(moe_startup, "aligned", allocate)
    with pytest.raises(RuntimeError, match="no VLLM_EXL3_PREFILL_CAPACITY makes it fit"):
        arena_of(layer)


# capacity, rows of the decode plan, bytes a row -> the end of the prefill plan's line; the decode plan's says nothing
SAVINGS = {
    (3072, 4, 1 << 18): "; VLLM_EXL3_PREFILL_CAPACITY=1024 would free 512 MiB",
    (2049, 4, 1 << 18): "; VLLM_EXL3_PREFILL_CAPACITY=1024 would free 256 MiB",  # and a quarter
    (2048, 4, 1 << 18): "",
    (3072, 1024, 1 << 18): "",  # such a capacity would be refused
    (1024, 4, 1 << 30): "",
}


@pytest.mark.parametrize(("case", "end"), SAVINGS.items())
def test_the_log_says_what_a_smaller_capacity_would_free(monkeypatch, caplog, case, end):
    capacity, decode_rows, bytes_a_row = case
    monkeypatch.setattr(recording, "BYTES_A_ROW", bytes_a_row)
    monkeypatch.setattr(moe_startup, "aligned", lambda size, device: torch.empty(0, dtype=torch.uint8))
    monkeypatch.setattr(Recording, "warm", lambda *given: 1)
    layer = planned(owner_of(capacity=4096), both(), Limits(decode_rows=decode_rows, capacity=capacity))
    with caplog.at_level(logging.INFO, "vllm.exl3"):
        arena_of(layer)
    decode, prefill = [record.getMessage() for record in caplog.records]
    assert "VLLM_EXL3_PREFILL_CAPACITY" not in decode
    assert prefill.endswith(f" MiB{end}")
    assert prefill.count("VLLM_EXL3_PREFILL_CAPACITY") == bool(end)


def test_the_first_rows_warm_every_plan_of_the_owner_and_no_other(caplog):
    plans, parity = both()
    model = Model()
    layers = [planned(owner_of(model), (plans, parity)) for _ in range(2)]
    draft = planned(owner_of(model, "draft"), (plans, parity))
    assert not plans.warmed
    with caplog.at_level(logging.INFO, "vllm.exl3"):
        layers[0](*activations(3))
    lines = [record.getMessage() for record in caplog.records]  # before the draft's: an engine may have set the level
    assert windows_of(plans.warmed) == {"decode": 1, "prefill": 1}  # the layers' plans are equal
    assert windows_of(parity.warmed) == {"parity": 1}
    for layer in (*layers, layers[0]):
        layer(*activations(20))
    assert (len(plans.warmed), len(parity.warmed)) == (2, 1)
    draft(*activations(1))
    assert (len(plans.warmed), len(parity.warmed)) == (4, 2)
    assert len(lines) == 3
    assert lines[0].startswith(
        "EXL3 experts of the target, decode: recording, 2 layers in float32; 2 to 4 rows, 8 a block; "
    )
    assert "2 specialisations checked and loaded in 0.0 s" in lines[1]
    assert lines[2].startswith(
        "EXL3 experts of the target, parity: torch, 2 layers in float32; 1 to 1 rows, 3 a block; "
    )


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


def test_threads_warm_once_and_get_their_own_outputs(caplog):
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
