# SPDX-License-Identifier: Apache-2.0
"""What the native provider of routed experts refuses, and how it cuts its work; tests/csrc/test_moe.py runs it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.moe_layers import mixed, query
from vllm.model_executor.layers.quantization.exl3_trellis import ops_moe
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native_moe
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Activation, Bank, Device, Window

HOPPER = Device(kind="cuda", sm=90, sms=132, smem=232_448)
LAYER = query([3] * 4, 256, 128, 2)
SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "exl3"
TWO_BOOKS = Bank(rates=(3.0,) * 4, codebooks=("mcg", "mcg", "mul1", "mcg"))

REFUSALS = [
    ({}, Device(kind="cpu"), "runs on CUDA, not on cpu"),
    ({}, replace(HOPPER, sm=75), "needs SM80 or newer, this card is SM75"),
    ({}, replace(HOPPER, smem=65_536), "needs 99328 bytes of shared memory a block, this card has 65536"),
    ({"io_dtype": "float64"}, HOPPER, "activations are float64, want one of float16, bfloat16, float32"),
    ({"w2": TWO_BOOKS}, HOPPER, "experts have the codebooks mcg and mul1, want one"),
    ({"activation": Activation(name="tanh")}, HOPPER, "activation tanh, want one of silu, "),
    ({"w3": None}, HOPPER, "activation silu, want one of silu, "),
    ({"slices": 9}, HOPPER, "9 slices of each expert, want at most 8"),
    ({"max_rows": 1 << 23}, HOPPER, "8388608 rows of 2 experts, want less than 16777216 in all"),
]


@pytest.mark.parametrize("changes, device, reason", REFUSALS)
def test_refuses_with_a_reason(changes, device, reason):
    ok, why = native_moe.can_run(replace(LAYER, **changes), device)
    assert not ok
    assert why.startswith(reason)


LOW, HIGH = (16, 32, 64, 256), (16, 32, 64, 128, 256)  # tiles of rates up to 4 bits and above, on SM90
EDGES = [(1, 16), (1638, 16), (1639, 32), (3276, 32), (3277, 64), (6553, 64)]
TILES = [(tiles, routes, tile) for tiles in (LOW, HIGH, HIGH[:-1]) for routes, tile in EDGES] + [
    (LOW, 6554, 256),
    (HIGH, 6554, 128),
    (HIGH, 28672, 128),
    (HIGH, 28673, 256),
    (HIGH[:-1], 28673, 128),
]


@pytest.mark.parametrize("tiles, routes, tile", TILES)
def test_row_tiles_fit_the_average_expert(tiles, routes, tile):
    assert native_moe.row_tile(tiles, routes / 256) == tile


PREFILL = Window(name="prefill", rows=4096, block=64)


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_only_sm90_has_the_larger_blocks(sm, monkeypatch):
    monkeypatch.setattr(ops_moe, "arena_bytes", lambda *_: 0)  # the extension's, which is not here
    plan = native_moe.plan(replace(LAYER, k=1408), replace(HOPPER, sm=sm), PREFILL)
    assert plan.cut.pairs == (sm == 90)
    assert plan.cut.down_columns == (512 if sm == 90 else 640)  # as many as fit, of eleven column blocks
    assert plan.cut_for(30).row_tile == 64
    assert plan.row_tiles == (LOW if sm == 90 else HIGH[:-1])
    assert plan.cut_for(4096).row_tile == plan.row_tiles[-1]
    five_bits = native_moe.plan(query([5] * 8, 256, 256, 2), replace(HOPPER, sm=sm), PREFILL)
    assert five_bits.row_tiles == (HIGH if sm == 90 else HIGH[:-1])
    shared = native_moe.plan(replace(LAYER, shared_h=True), replace(HOPPER, sm=sm), PREFILL)
    assert shared.row_tiles == (16, 32, 64, 128)
    assert shared.cut_for(4096).row_tile == 128


def test_the_table_says_where_every_expert_lies():
    """The lower rate comes first in a slab, and of a rate gate before up."""
    table = native_moe.table_of(query(mixed(3, 4, 1, 1), 256, 128, 2))
    three, four = 256 * 128 * 3 // 8, 256 * 128 * 4 // 8
    low, high = (0, 1) if int(table[0, 0]) % 32 == 6 else (1, 0)
    assert [int(row[low]) for row in table] == [6, three * 32 + 6, 6]
    assert [int(row[high]) for row in table] == [2 * three * 32 + 8, (2 * three + four) * 32 + 8, three * 32 + 8]


def test_numbers_agree_with_the_sources():
    text = "".join((SOURCES / name).read_text(encoding="utf-8") for name in ("moe.h", "moe_few.cuh", "moe_layout.cuh"))
    for name, number in (
        ("kMaxSlices", ops_moe.MAX_SLICES),
        ("kMaxExperts", ops_moe.MAX_EXPERTS),
        ("kDecodeRows", native_moe.DECODE_BLOCK),
        ("kFewBlocksPerSm", native_moe.DECODE_BLOCKS_PER_SM),
        ("kTallFineRate2", native_moe.TALL_RATE2),
    ):
        assert f"{name} = {number};" in text
    prefill = (SOURCES / "moe_prefill.cu").read_text(encoding="utf-8")
    shapes = {int(rows): int(stages) for rows, stages in re.findall(r"MoeShape<(\d+), (\d+)>", prefill)}
    assert tuple(shapes) == native_moe.PREFILL_TILES
    # Of x and of weights at 8 bits, a stage of 128 k each.
    assert max(stages * (rows * 256 + 128 * 128) + 1024 for rows, stages in shapes.items()) == native_moe.SHARED_BYTES
    pairs = [(int(rows), int(stages)) for rows, stages in re.findall(r"MoeShape<(\d+), (\d+), 2>", prefill)]
    assert pairs and max(stages * (rows * 256 + 2 * 128 * 128) + 1024 for rows, stages in pairs) <= HOPPER.smem
    stages = int(re.search(r"kFewStages = (\d+)", text)[1])
    assert stages * 8 * 8 * 16 == native_moe.DECODE_RATE2_BYTES  # of 8 x 8 tiles, 16 bytes each for half a bit
