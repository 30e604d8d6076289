"""Which part of which stored tensor a rank keeps: plain numbers, no engine."""

from __future__ import annotations

import re

import pytest

from vllm.model_executor.layers.quantization.exl3_trellis.checkpoint import LinearSpec
from vllm.model_executor.layers.quantization.exl3_trellis.placement import Owned, Source, place, split_blocks
from vllm.model_executor.layers.quantization.exl3_trellis.safetensors_headers import CheckpointError


def spec(k: int, n: int) -> LinearSpec:
    return LinearSpec(k=k, n=n, rate=3.0, codebook="mcg", suffixes=("trellis", "suh", "svh", "mcg"))


def stored(module: str, k: int, n: int, part: int | None = None) -> Source:
    return Source(module=module, spec=spec(k, n), part=part)


def whole(width: int) -> Owned:
    return Owned(full=width, start=0, width=width)


def rank(width: int, index: int, of: int) -> Owned:
    return Owned(full=width, start=index * width // of, width=width // of)


def outline(piece) -> tuple:
    """(rows, columns, first, width, x_start, x_width, y_start)"""
    return piece.rows, piece.columns, piece.first, piece.width, piece.x_start, piece.x_width, piece.y_start


def test_whole_layer_is_one_piece_with_padding_kept():
    (piece,) = place([[stored("o", 640, 640)]], [whole(576)], whole(576), 1)
    assert outline(piece) == ((0, 640), (0, 640), 0, 576, 0, 576, 0)


def test_merged_outputs_stand_side_by_side():
    components = [[stored("q", 256, 512)], [stored("k", 256, 128)], [stored("v", 256, 128)]]
    pieces = place(components, [whole(512), whole(128), whole(128)], whole(256), 1)
    assert [piece.y_start for piece in pieces] == [0, 512, 640]
    assert [piece.output for piece in pieces] == [0, 1, 2]


def test_columns_are_cut_between_ranks():
    (piece,) = place([[stored("up", 256, 512)]], [rank(512, 1, 2)], whole(256), 2)
    assert outline(piece) == ((0, 256), (256, 512), 0, 256, 0, 256, 0)


def test_a_block_of_outputs_that_a_cut_crosses_is_kept_by_both_ranks():
    pieces = [place([[stored("k", 256, 128)]], [rank(128, index, 2)], whole(256), 2)[0] for index in (0, 1)]
    assert [(piece.columns, piece.first, piece.width) for piece in pieces] == [((0, 128), 0, 64), ((0, 128), 64, 64)]


def test_rows_are_cut_between_blocks():
    (piece,) = place([[stored("o", 512, 256)]], [whole(256)], rank(512, 1, 2), 2)
    assert outline(piece) == ((256, 512), (0, 256), 0, 256, 0, 256, 0)


def test_rows_inside_a_block_are_refused_with_sizes_that_work():
    message = "o.trellis: tensor parallel size 4 cuts its 768 inputs into 192, inside a Hadamard block; want multiples"
    with pytest.raises(CheckpointError, match=re.escape(message)) as refusal:
        place([[stored("o", 768, 256)]], [whole(256)], rank(768, 1, 4), 4)
    assert str(refusal.value).endswith("of 128: tensor parallel size 1, 2, 3")


def test_one_stored_module_may_hold_several_outputs():
    """q, k and v of a linear attention, stored as one and loaded as one span, each cut for its own rank."""
    pieces = place(
        [[stored("qkv", 256, 1024)], [stored("z", 256, 512)]],
        [rank(256, 1, 2), rank(256, 1, 2), rank(512, 1, 2), rank(512, 1, 2)],
        whole(256),
        2,
    )
    assert [piece.source.module for piece in pieces] == ["qkv", "qkv", "qkv", "z"]
    assert [piece.columns for piece in pieces] == [(128, 256), (384, 512), (768, 1024), (256, 512)]
    assert [piece.y_start for piece in pieces] == [0, 128, 256, 512]


def test_output_slices_follow_each_other():
    slices = [stored("up", 256, 256, 0), stored("up", 256, 384, 1)]
    pieces = place([slices], [whole(640)], whole(256), 1)
    assert [(piece.source.part, piece.width, piece.y_start) for piece in pieces] == [(0, 256, 0), (1, 384, 256)]


def test_input_slices_share_their_outputs():
    slices = [stored("down", 256, 256, 0), stored("down", 384, 256, 1)]
    pieces = place([slices], [whole(256)], whole(640), 1)
    assert [(piece.x_start, piece.x_width, piece.y_start) for piece in pieces] == [(0, 256, 0), (256, 384, 0)]


def test_a_rank_keeps_only_the_slices_it_needs():
    slices = [stored("down", 256, 256, part) for part in range(4)]
    pieces = place([slices], [whole(256)], rank(1024, 1, 2), 2)
    assert [(piece.source.part, piece.x_start) for piece in pieces] == [(2, 0), (3, 256)]


def test_unquantized_sibling_is_cut_by_its_true_width():
    components = [[stored("gate", 256, 384)], [Source(module="up", spec=None)]]
    gate, up = place(components, [rank(300, 1, 2)] * 2, whole(200), 2)
    assert (gate.columns, gate.first) == ((128, 384), 22)
    assert (up.columns, up.width, up.x_width, up.y_start) == ((150, 300), 150, 200, 150)


SIZES = {
    "inputs": (stored("m", 512, 256), "m.trellis: 512 x 256 inputs x outputs, want 256 x 256 for 256 x 256"),
    "outputs": (stored("m", 256, 512), "m.trellis: 256 x 512 inputs x outputs, want 256 x 256 for 256 x 256"),
}


@pytest.mark.parametrize(("source", "message"), SIZES.values(), ids=SIZES)
def test_sizes_of_another_model_are_refused(source, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        place([[source]], [whole(256)], whole(256), 1)


def test_outputs_left_over_are_refused():
    with pytest.raises(CheckpointError, match=re.escape("a: feed 1 outputs, want 2")):
        place([[stored("a", 256, 256)]], [whole(256), whole(256)], whole(256), 1)


def test_split_blocks_names_what_every_decoder_cuts_along_its_inputs():
    linears = {
        "model.layers.0.self_attn.o_proj": spec(384, 256),
        "model.layers.0.mlp.down_proj": spec(512, 256),
        "model.layers.0.self_attn.q_proj": spec(384, 256),
    }
    assert split_blocks(linears, 2) == [
        "model.layers.0.self_attn.o_proj.trellis: tensor parallel size 2 cuts its 384 inputs "
        "inside a Hadamard block; want multiples of 128: tensor parallel size 1"
    ]
