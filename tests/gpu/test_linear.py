# SPDX-License-Identifier: Apache-2.0
"""The fused kernels against float64: every codebook and rate, row counts around every tile edge, batches, graphs."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.gpu.cases import BOOK_RATES, CAPABILITY, DEVICE, ROWS, SM90, Layer, error, fused, layer, many_rows
from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends.native import EVERY_ROW

K, N = 640, 384  # straddle the units of 128, with fewer column blocks than thread blocks


def activations(rows: int, width: int = K, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    g = torch.Generator(device=DEVICE).manual_seed(rows)
    return torch.randn(rows, width, generator=g, device=DEVICE).to(dtype)


CARD = (10 * CAPABILITY[0] + CAPABILITY[1], 7)  # SM, and blocks: a few
WAYS = [(EVERY_ROW, 0), (0, 0), *([(0, EVERY_ROW)] if SM90 else [])]  # rows fused, and by SM90's kernel


def call(of: Layer, x: torch.Tensor, fused_rows: int = EVERY_ROW, many_rows: int = 0, chunk: int = 256) -> torch.Tensor:
    """As a layer calls it: output in x's dtype."""
    numbers = (ops.CODEBOOK_CODES[of.book], 11, fused_rows, many_rows, chunk, *CARD)
    return ops.linear(x, of.trellis.view(-1), of.suh, of.svh, of.k, of.shard, *numbers)


@pytest.mark.parametrize(("book", "rate"), BOOK_RATES)
def test_every_rate_and_row_count_matches_float64(book: str, rate: float) -> None:
    of = layer(K, N, rate, book)
    for rows in ROWS:
        x = activations(rows)
        assert error(fused(of, x), of.truth(x)) < 2.6e-4, f"{rows} rows"


@pytest.mark.parametrize(("book", "rate"), BOOK_RATES)
def test_a_row_has_the_same_bytes_alone_and_in_any_batch(book: str, rate: float) -> None:
    of = layer(K, N, rate, book)
    x = activations(300)
    alone = torch.cat([fused(of, x[i : i + 1]) for i in range(40)])
    for rows in (2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300):
        assert torch.equal(fused(of, x[:rows])[:40], alone[:rows]), f"{rows} rows"
        assert torch.equal(fused(of, x[-rows:]), fused(of, x)[-rows:]), f"the last {rows} rows"


@pytest.mark.skipif(not SM90, reason="a kernel that only SM90 has")
@pytest.mark.parametrize(("book", "rate"), BOOK_RATES)
def test_many_rows_match_float64(book: str, rate: float) -> None:
    of = layer(K, N, rate, book)
    for rows in (1, 129, 256, 257, 512, 2048):
        x = activations(rows)
        for blocks in (1, 3, 132):
            assert error(many_rows(of, x, blocks), of.truth(x)) < 2.6e-4, f"{rows} rows, {blocks} blocks"


@pytest.mark.skipif(not SM90, reason="a kernel that only SM90 has")
def test_many_rows_of_a_large_layer_give_the_same_bytes_each_time() -> None:
    of = layer(4096, 2560, 3.0, "mcg")
    for rows in (200, 1024, 2048):
        x = activations(rows, 4096)
        y = many_rows(of, x, 132, torch.bfloat16)
        assert error(y, of.truth(x)) < 3e-3
        assert all(torch.equal(many_rows(of, x, 132, torch.bfloat16), y) for _ in range(20))


@pytest.mark.parametrize("splits", [1, 2, 7, 15, 132, 264])
def test_any_cut_over_thread_blocks_is_right(splits: int) -> None:
    of = layer(K, N, 3.0, "mcg")
    for rows in (1, 20, 100):
        x = activations(rows)
        assert error(fused(of, x, splits), of.truth(x)) < 2.6e-4


@pytest.mark.parametrize(("book", "rate"), [("mcg", 2.0), ("mcg", 3.0), ("mul1", 4.0), ("mul1", 2.5), ("3inst", 6.0)])
def test_a_large_layer_cut_as_on_the_card(book: str, rate: float) -> None:
    of = layer(4096, 2560, rate, book)
    splits = 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for rows in (1, 16, 64, 128):
        x = activations(rows, 4096)
        assert error(fused(of, x, splits), of.truth(x)) < 2.6e-4, f"{rows} rows"


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 3e-3), (torch.float32, 2.6e-4)])
def test_activation_types(dtype: torch.dtype, limit: float) -> None:
    of = layer(K, N, 4.0, "mul1")
    for rows in (1, 40):
        x = activations(rows, dtype=dtype)
        y = call(of, x)
        assert y.dtype == dtype
        assert error(y, of.truth(x)) < limit


@pytest.mark.skipif(importlib.util.find_spec("exllamav3_ext") is None, reason="exllamav3_ext is not installed")
@pytest.mark.parametrize(("book", "rate"), BOOK_RATES)
def test_error_is_not_above_exllamav3(book: str, rate: float) -> None:
    of = layer(K, N, rate, book)
    code = ops.CODEBOOK_CODES[book]
    for rows in (1, 16, 33):
        x = activations(rows)
        theirs = ops.parity_linear(x.float(), of.trellis.view(-1), of.suh, of.svh, K, of.shard, code)
        assert error(fused(of, x), of.truth(x)) <= error(theirs, of.truth(x))


@pytest.mark.skipif(importlib.util.find_spec("exllamav3_ext") is None, reason="exllamav3_ext is not installed")
def test_parity_takes_any_number_of_rows() -> None:
    of = layer(K, N, 3.0, "mcg")
    for rows in (ops.PARITY_ROWS, ops.PARITY_ROWS + 1, 3000):
        x = activations(rows)
        y = ops.parity_linear(x, of.trellis.view(-1), of.suh, of.svh, K, of.shard, ops.CODEBOOK_CODES["mcg"])
        assert error(y, of.truth(x)) < 2e-3, f"{rows} rows"


def test_short_inputs_count_as_zeros_and_outputs_are_cut() -> None:
    of = layer(K, N, 3.0, "mcg")
    code = ops.CODEBOOK_CODES["mcg"]
    for rows, ways in ((3, WAYS[0]), *((70, way) for way in WAYS)):
        x = activations(rows, 576)
        y = ops.linear(x, of.trellis.view(-1), of.suh, of.svh, K, [N, 70, 200, 6], code, 11, *ways, 128, *CARD)
        assert y.shape == (rows, 200)
        assert error(y, of.truth(x)[:, 70:270]) < 1e-3


@pytest.mark.parametrize("rates", [(3.0, 3.0, 3.0), (3.0, 4.0, 6.0), (2.0, 8.0)])
@pytest.mark.parametrize("ways", WAYS)
def test_merged_outputs_of_several_rates(rates: tuple[float, ...], ways: tuple[int, int]) -> None:
    sizes = zip((384, 128, 256), rates, strict=False)
    layers = [layer(K, n, rate, "mul1", seed) for seed, (n, rate) in enumerate(sizes)]
    widths = [of.n - 5 for of in layers]
    trellis = torch.cat([of.trellis.view(-1) for of in layers])
    suh, svh = (torch.cat([getattr(of, side) for of in layers]) for side in ("suh", "svh"))
    shards = [i for of, width in zip(layers, widths, strict=True) for i in (of.n, 0, width, round(2 * of.rate))]
    for rows in (1, 16, 50):
        x = activations(rows)
        y = ops.linear(x, trellis, suh, svh, K, shards, 2, 11, *ways, 128, *CARD)
        truth = torch.cat([of.truth(x)[:, :width] for of, width in zip(layers, widths, strict=True)], dim=1)
        assert error(y, truth) < 1e-3


def test_graph_replays_give_the_eager_bytes_on_two_streams_at_once() -> None:
    layers = [layer(4096, 2560, 3.0, "mcg", seed) for seed in (1, 2)]
    inputs = [activations(rows, 4096) for rows in (3, 48)]
    want = [call(of, x) for of, x in zip(layers, inputs, strict=True)]
    streams, graphs, outputs = [torch.cuda.Stream() for _ in layers], [], []
    for of, x, stream in zip(layers, inputs, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call(of, x)
            with torch.cuda.graph(graph, stream=stream):
                outputs.append(call(of, x))
        graphs.append(graph)
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, w) for y, w in zip(outputs, want, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 600}, "k is 600, want a multiple of 128"),
        ({"shards": [N, 0, N, 5]}, "rate 5/2 with codebook 1, want 1 to 8 bits, or 1.5, 2.5, 3.5 with mul1"),
        ({"shards": [N, 10, N, 6]}, f"shard 0 takes columns 10 to {N + 10} of {N}"),
        ({"shards": [N, 0, N, 8]}, "trellis has 46080 elements, want at least 61440"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    of = layer(K, N, 3.0, "mcg")
    x = activations(2)
    y = torch.empty(2, N, device=DEVICE)
    scratch = torch.empty(1 << 24, dtype=torch.uint8, device=DEVICE)
    arguments = {"k": K, "shards": of.shard} | change
    with pytest.raises(RuntimeError, match=message.replace("(", r"\(")):
        torch.ops.exl3.linear(
            y, x, of.trellis.view(-1), of.suh, of.svh, scratch, arguments["k"], arguments["shards"], 1, 11, True
        )
