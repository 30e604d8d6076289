"""Routed experts as they run: the right window for every number of rows, every row once, no parity path in a capture.

The planning is the real one; the provider computes with the torch provider and records what it was asked.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.exl3_trellis.planned_experts import LIMITS, MOST, activations, alone, both, owner_of, planned
from vllm.model_executor.layers.quantization.exl3_trellis import moe_dispatch
from vllm.model_executor.layers.quantization.exl3_trellis.moe_plan import Limits

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
def test_every_row_gets_its_own_output(rows, slices, dtype):
    plans, parity = both()
    layer = planned(owner_of(), (plans, parity))
    x, weights, ids = activations(rows)
    ids[::3, 0] = -1  # nobody's
    y = layer(x, weights, ids.to(dtype))
    assert torch.allclose(y, alone(x, weights, ids), atol=1e-6)
    called = plans.calls + parity.calls
    assert {call.ids for call in called} <= {dtype}
    assert [(call.window, call.rows) for call in called] == slices


def test_without_a_prefill_plan_long_batches_take_the_parity_path():
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


def test_rows_that_are_not_contiguous_and_weights_of_another_type():
    layer = planned(owner_of(), both())
    x, weights, ids = activations(6)
    wide = torch.stack((x, x), dim=1)[:, 0]
    given = weights.t().contiguous().t().bfloat16()
    assert torch.allclose(layer(wide, given, ids.t().contiguous().t()), alone(x, given.float(), ids), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 256)}, r"activations are \[3, 256\] torch.float32, want \[m, 128\] float32"),
        ({"x": torch.zeros(3, 128).half()}, r"activations are \[3, 128\] torch.float16, want \[m, 128\] float32"),
        (
            {"weights": torch.zeros(3, 1)},
            r"routing is \[3, 1\] and \[3, 2\] torch.int32, want \[3, 2\], ids of int32 or",
        ),
        ({"ids": torch.zeros(2, 2).int()}, r"routing is \[3, 2\] and \[2, 2\] torch.int32, want \[3, 2\]"),
        (
            {"ids": torch.zeros(3, 2).short()},
            r"routing is \[3, 2\] and \[3, 2\] torch.int16, want .* of int32 or int64",
        ),
    ],
)
def test_what_comes_is_validated_once(change, message):
    plans, parity = both()
    layer = planned(owner_of(), (plans, parity))
    x, weights, ids = activations(3)
    given = {"x": x, "weights": weights, "ids": ids} | change
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.experts: " + message):
        layer(**given)
    assert not plans.calls


@pytest.mark.parametrize(
    ("limits", "rows", "remedy"),
    [
        (LIMITS, 1, "VLLM_EXL3_TRELLIS_MIN_M to at most 1"),
        (dataclasses.replace(LIMITS, prefill=False), 7, "VLLM_EXL3_PREFILL_TRELLIS to 1, or .*MAX_M to at least 7"),
    ],
    ids=["below the window", "above it"],
)
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
