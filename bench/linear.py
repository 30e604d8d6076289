# SPDX-License-Identifier: Apache-2.0
"""Dense EXL3 products on one GPU: ours, exllamav3's, bf16 and FP8 of the same shape, in one run.

Prints a table with the ratios, writes results/linear-<card>.json beside this file and a PNG plot of it.  exllamav3 is
measured where its extension can be imported (`exllamav3_ext`, or the path given by --exllamav3), with its int8 and GEMV
shortcuts off.  `floor` is the bytes of the trellis over the rate at which memory is read and written in the same run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.timing import microseconds, sets_needed, stream_bandwidth
from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends import LinearWeights, native
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, LinearQuery, Shard

HERE = Path(__file__).parent
SHAPES = ((8192, 8192), (4096, 12288), (5120, 27648))
RATES = (2.0, 3.0, 4.0, 6.0)
BOOKS = ("mcg", "mul1")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PARITY_ROWS = 144  # above these exllamav3 reconstructs and calls cuBLAS itself

Row = dict[str, Any]


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    options = parse(argv)
    device = torch.device("cuda")
    if options.extension:
        ops.EXTENSION = options.extension
    ok, why = ops.load()
    if not ok:
        print(f"bench linear: {why}", file=sys.stderr)
        return 1
    parity = load_exllamav3(options.exllamav3)
    card = torch.cuda.get_device_name(device)
    bandwidth = stream_bandwidth(device)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if parity:
        versions["exllamav3"] = options.exllamav3_version
    print(f"{card}, {versions}, {bandwidth / 1e12:.2f} TB/s")
    result: dict[str, Any] = {"card": card, "versions": versions, "bytes_per_second": bandwidth, "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"linear-{re.sub('[^a-z0-9]+', '-', card.lower())}.json"
    for k, n in options.shapes:
        result["rows"] += measure_shape(k, n, options, parity, bandwidth, device)
        path.write_text(render(result))
    print(f"wrote {path}")
    return plot(path)


def render(result: dict[str, Any]) -> str:
    """JSON with one row of the table a line."""
    head = {name: value for name, value in result.items() if name != "rows"}
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n'


def parse(argv: list[str]) -> argparse.Namespace:
    """Options; the defaults are the full table."""
    parser = argparse.ArgumentParser(prog="bench linear", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=shapes, default=SHAPES, help="8192x8192,...")
    parser.add_argument("--rates", type=lambda s: [float(p) for p in s.split(",")], default=RATES)
    parser.add_argument("--codebooks", type=lambda s: s.split(","), default=BOOKS)
    parser.add_argument("--rows", type=lambda s: [int(p) for p in s.split(",")], default=ROWS)
    parser.add_argument("--extension", type=Path, help="the compiled extension, if it is not installed")
    parser.add_argument("--exllamav3", type=Path, help="exllamav3_ext*.so, if it cannot be imported")
    parser.add_argument("--exllamav3-version", default="1.6.5")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args(argv)


def shapes(text: str) -> list[tuple[int, ...]]:
    """8192x8192,4096x12288 as pairs (k, n)."""
    return [tuple(map(int, pair.split("x"))) for pair in text.split(",")]


def load_exllamav3(path: Path | None) -> Any:
    """The peer's extension module, or None."""
    os.environ.update(EXL3_INT8_GEMV="0", EXL3_GEMV="0")
    if path is not None:
        spec = importlib.util.spec_from_file_location("exllamav3_ext", path)
        assert spec is not None and spec.loader is not None, f"{path}: not an extension module"
        sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module("exllamav3_ext")
    except ImportError as error:
        print(f"exllamav3 is not measured: {error}")
        return None


def measure_shape(
    k: int, n: int, options: argparse.Namespace, parity: Any, bandwidth: float, device: torch.device
) -> list[Row]:
    """Every codebook, rate and row count of one shape."""
    dense = {m: dense_times(k, n, m, device) for m in options.rows}
    rows = []
    for book in options.codebooks:
        for rate in options.rates:
            sets = sets_needed(int(k * n * rate / 8), device)
            weights = [random_weights(k, n, rate, device, seed) for seed in range(sets)]
            native_time(k, n, rate, book, options.rows[0], weights)  # what comes first after weights were drawn is slow
            for m in options.rows:
                us = {"native": native_time(k, n, rate, book, m, weights)}
                if parity is not None and m <= PARITY_ROWS:
                    us["exllamav3"] = parity_time(parity, k, n, rate, book, m, weights)
                us.update(dense[m])
                floor = k * n * rate / 8 / bandwidth * 1e6
                row: Row = {"shape": [k, n], "K": rate, "codebook": book, "m": m}
                row |= {"us": {name: round(t, 2) for name, t in us.items()}, "floor_us": round(floor, 2)}
                rows.append(row)
                print(line(row), flush=True)
    return rows


def line(row: Row) -> str:
    """One row of the table: times, then each peer's time over ours."""
    k, n = row["shape"]
    us = row["us"]
    times = "  ".join(f"{name} {t:7.1f}" for name, t in us.items())
    ratios = "  ".join(f"{name}/native {t / us['native']:5.2f}" for name, t in us.items() if name != "native")
    layer = f"{k:5}x{n:<5} {row['codebook']:5} {row['K']:g} bit  m {row['m']:4}"
    return f"{layer}  {times}  floor {row['floor_us']:5.1f}  {ratios}"


def random_weights(k: int, n: int, rate: float, device: torch.device, seed: int) -> LinearWeights:
    """Any bit pattern is a trellis of unit scale."""
    generator = torch.Generator(device=device).manual_seed(seed)
    words = torch.randint(-(1 << 15), 1 << 15, (int(k * n * rate) // 16,), generator=generator, device=device)
    return LinearWeights(
        trellis=words.to(torch.int16),
        suh=torch.randn(k, generator=generator, device=device).sign().half(),
        svh=(torch.randn(n, generator=generator, device=device).sign() * 0.02).half(),
    )


def native_time(k: int, n: int, rate: float, book: str, m: int, weights: list[LinearWeights]) -> float:
    """Ours, as a layer calls it."""
    device = weights[0].trellis.device
    shard = Shard(n=n, width=n, rate=rate, codebook=book)
    query = LinearQuery(k=k, width=k, shards=(shard,), io_dtype="bfloat16", max_rows=max(ROWS))
    plan = native.plan(query, Device.of(device))
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    calls: list[Callable[[], object]] = []
    for set_of in weights:
        tensors = {"trellis": set_of.trellis, "suh": set_of.suh, "svh": set_of.svh}
        calls.append(partial(native.run, plan, tensors, x))
    return microseconds(calls)


def parity_time(parity: Any, k: int, n: int, rate: float, book: str, m: int, weights: list[LinearWeights]) -> float:
    """exllamav3's exl3_gemm: fp16 in, fp32 out."""
    device = weights[0].trellis.device
    x = torch.randn(m, k, device=device, dtype=torch.float16)
    rotated, c = torch.empty_like(x), torch.empty(m, n, device=device)
    flags = (book == "mcg", book == "mul1", 0)
    calls: list[Callable[[], object]] = []
    for set_of in weights:
        tiles = set_of.trellis.view(k // 16, n // 16, int(16 * rate))
        calls.append(partial(parity.exl3_gemm, x, tiles, c, set_of.suh, rotated, set_of.svh, -1, *flags))
    return microseconds(calls)


def dense_times(k: int, n: int, m: int, device: torch.device) -> dict[str, float]:
    """The library's product with unquantized weights, bf16 and, where the card has it, FP8."""
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    matrices = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(sets_needed(2 * k * n, device))]
    times = {"bf16": microseconds([partial(torch.nn.functional.linear, x, w) for w in matrices])}
    if torch.cuda.get_device_capability(device) >= (8, 9):
        eights = [w.to(torch.float8_e4m3fn).t() for w in matrices]
        x8 = torch.zeros(-(-m // 16) * 16, k, device=device, dtype=torch.bfloat16)
        x8[:m] = x
        x8, one = x8.to(torch.float8_e4m3fn), torch.ones((), device=device)
        times["fp8"] = microseconds(
            [partial(torch._scaled_mm, x8, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16) for w in eights]
        )
    return times


def plot(path: Path) -> int:
    """A PNG beside the JSON; needs matplotlib, and says so where it is missing."""
    from bench import chart

    return chart.main([str(path)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
