# SPDX-License-Identifier: Apache-2.0
"""What `bench moe` does without a card: order, table, plot, and the bf16 peer that it brings itself."""

from __future__ import annotations

import json

import pytest
import torch

from bench import moe, moe_chart, moe_peers
from bench.moe_layers import query, routing

ROW = {"K": "3+4", "routing": "zipf", "m": 8, "us": {"native": 10.0, "b12x": 25.0}, "floor_us": 2.0}
CPU = torch.device("cpu")


def test_the_most_telling_cases_come_first():
    order = list(moe.cases(moe.parse([])))
    assert len(order) == len(set(order)) == 3 * 3 * len(moe.ROWS)
    assert order[:6] == [("3", "balanced", m) for m in moe.TELLING_ROWS]
    assert {case for case in order[:30] if case[0] != "3"} == {
        (tier, "balanced", m) for tier in ("4", "3+4") for m in moe.TELLING_ROWS
    }


def test_the_table_says_how_many_times_ours_each_peer_takes():
    assert moe.line(ROW).endswith("native     10.0  b12x     25.0  floor     2.0  b12x/native  2.50")
    assert moe.key_of(ROW) == ("3+4", "zipf", 8)


def test_inputs_outgrow_the_cache(monkeypatch):
    """One row touches 8 experts of 3.5 MB: 8 inputs hold four times a cache of 50 MB, in experts of their own."""
    properties = type("Properties", (), {"L2_cache_size": 50 << 20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    layer = moe_peers.Layer(query([3] * 256, 6144, 512, 8), CPU)
    inputs = moe.inputs_of(layer, "balanced", 1)
    assert len(inputs) == 8
    assert len(torch.cat([one.ids for one in inputs]).unique()) == 64
    assert len(moe.inputs_of(layer, "balanced", 512)) == 2


def test_the_rows_compared_are_first_and_last():
    assert moe.compared(3) == [0, 1, 2]
    assert moe.compared(100) == [*range(16), *range(84, 100)]


def test_the_grouped_product_of_torch_is_the_layer():
    generator = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((6, 64), (4, 64, 64), (4, 64, 32)))
    weights, ids = routing("zipf", 6, 4, 2, CPU)
    try:
        got = moe_peers._grouped(x, w13, w2, weights, ids)
    except (NotImplementedError, RuntimeError) as why:
        pytest.skip(f"no grouped product on this CPU: {why}")
    want = torch.zeros(6, 64)
    for row in range(6):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            gate, up = (w13[expert].float() @ x[row].float()).chunk(2)
            want[row] += weight * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up))
    assert (got.float() - want).norm() / want.norm() < 0.02


def test_the_plot_is_made_of_any_part_of_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "moe-card.json"
    path.write_text(json.dumps({"card": "card", "versions": {"torch": "2"}, "rows": [ROW]}))
    assert moe_chart.main([str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 1000
