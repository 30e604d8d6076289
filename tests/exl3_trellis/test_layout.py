# SPDX-License-Identifier: Apache-2.0
"""Tile places, the bit ring, and cuts by channel."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from vllm.model_executor.layers.quantization.exl3_trellis import layout, reference

RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("channels, want", [(1, 128), (127, 128), (128, 128), (129, 256), (576, 640), (49152, 49152)])
def test_padding(channels, want):
    assert layout.padded(channels) == want
    assert layout.tiles(channels) * 16 == want


def test_trellis_shape():
    assert layout.trellis_shape(576, 1536, 3) == (40, 96, 48)
    assert layout.trellis_shape(6144, 512, 3.5) == (384, 32, 56)


def test_place_is_the_mma_fragment():
    """Lane t of an m16n8k16 B fragment holds rows 2(t%4) + {0, 1, 8, 9} of column t//4, then those 8 columns on."""
    for lane in range(32):
        rows = [2 * (lane % 4) + r for r in (0, 1, 8, 9)]
        want = [(row, lane // 4 + columns) for columns in (0, 8) for row in rows]
        assert [layout.place(8 * lane + j) for j in range(8)] == want


def test_places_cover_the_tile():
    order = layout.positions_by_place()
    assert sorted(order) == list(range(256))
    assert all(layout.place(order[16 * row + column]) == (row, column) for row in range(16) for column in range(16))


@pytest.mark.parametrize("rate", RATES)
def test_ring(rate):
    bits = layout.position_bits(rate)
    assert sum(bits) == 256 * rate
    assert set(bits[0::2]) == {int(rate)}
    assert set(bits[1::2]) == {int(rate) + (rate % 1 > 0)}
    starts = layout.state_starts(rate)
    ring = 256 * rate
    assert starts[-1] == ring - 16, "the last state ends where the ring does"
    assert [(b - a) % ring for a, b in pairwise(starts)] == list(bits[1:])


@pytest.mark.parametrize("span", [(0, 64), (64, 128), (128, 128), (128, 512), (-128, 128)])
def test_span_off_the_blocks(span):
    want = f"channels [{span[0]}, {span[1]}) of 384: want a non-empty range of whole blocks of 128"
    with pytest.raises(ValueError, match=f"^{re.escape(want)}$"):
        layout.check_span(span, 384)


def random_linear(k: int, n: int, rate: float):
    trellis = torch.randint(-(1 << 15), 1 << 15, layout.trellis_shape(k, n, rate), dtype=torch.int16)
    return {"trellis": trellis, "suh": torch.randn(k).half(), "svh": torch.randn(n).half()}


@pytest.mark.parametrize("inputs, outputs", [(None, (128, 384)), ((256, 384), None), ((128, 384), (0, 128))])
def test_window_cuts_the_weight(inputs, outputs):
    """Cutting the tensors of a linear cuts its dense weight: blocks do not mix channels of other blocks."""
    torch.manual_seed(0)
    whole = random_linear(384, 512, 3)
    part = {kind: tensor[layout.window(kind, inputs, outputs)] for kind, tensor in whole.items()}
    want = reference.dense_weight(**whole, name="mcg")[slice(*(inputs or (None,))), slice(*(outputs or (None,)))]
    got = reference.dense_weight(**part, name="mcg")
    assert got.shape == want.shape
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_window_of_packed_signs():
    signs = torch.randint(-(1 << 15), 1 << 15, (512 // 16,), dtype=torch.int16)
    for kind, span in (("su", {"inputs": (128, 384)}), ("sv", {"outputs": (128, 384)})):
        part = signs[layout.window(kind, **span)]
        assert torch.equal(reference.unpack_signs(part), reference.unpack_signs(signs)[128:384])


def test_window_refuses_half_a_block():
    with pytest.raises(
        ValueError, match=r"^outputs \[64, 192\) of 192: want a non-empty range of whole blocks of 128$"
    ):
        layout.window("trellis", outputs=(64, 192))


def test_shards():
    assert layout.shard_span(576, 1, 0) == (0, 640)
    assert [layout.shard_span(1024, 4, r) for r in range(4)] == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    with pytest.raises(ValueError, match=r"^576 channels over 3 shards: each needs the same number of blocks of 128$"):
        layout.shard_span(576, 3, 0)


def test_rank_slices():
    whole = (0, 512)
    assert layout.legal_shards(4, 512) == (1, 2, 4, 8, 16)
    assert [[s.stored_rank for s in layout.rank_slices(4, 512, 2, r)] for r in range(2)] == [[0, 1], [2, 3]]
    assert all(s.span == whole for r in range(2) for s in layout.rank_slices(4, 512, 2, r))
    assert [(s.stored_rank, s.span) for r in range(8) for s in layout.rank_slices(4, 512, 8, r)] == [
        (rank, span) for rank in range(4) for span in ((0, 256), (256, 512))
    ]
    with pytest.raises(ValueError, match=r"^3 shards of 4 stored ranks of 384 channels: want one of 1, 2, 4, 12$"):
        layout.rank_slices(4, 384, 3, 0)
