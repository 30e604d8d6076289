# SPDX-License-Identifier: Apache-2.0
"""Routed experts on one GPU: ours against b12x, exllamav3's kernels and bf16, at the size of GLM-5.2 over four cards.

Needs the card, torch and the compiled extension; vLLM is used where it is there. A peer that is missing, or refuses a
case, is left out. Times are of CUDA graph replays over several inputs, whose experts together are larger than the L2
cache; medians. Each result is compared with float64 in the same run. The most telling cases come first, and the file is
written after each, so that a run may be cut short by `--seconds` and taken up again by the next.
Prints a table and writes results/moe-<card>.json and .png beside this file.

    python -m bench moe                                   everything
    python -m bench moe --rates 3 --rows 1,8 --seconds 60 some
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import moe_peers
from bench.linear import load_exllamav3, render
from bench.moe_layers import error, mixed, query, routing
from bench.moe_peers import PEERS, Calls, Input, Layer
from bench.timing import L2_MULTIPLE, microseconds, stream_bandwidth
from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends import b12x_library

HERE = Path(__file__).parent
K, WIDTH, EXPERTS, TOP_K = 6144, 512, 256, 8
TIERS = {"3": [3.0] * EXPERTS, "4": [4.0] * EXPERTS, "3+4": mixed(3, 4, 148, 108)}
ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 1024, 2048, 4096, 8192)
ROUTINGS = ("balanced", "zipf", "one_hot")
TELLING_ROWS = (1, 8, 32, 512, 2048, 4096)
TRUTH_ROWS = 32  # rows of a result that are compared
MOST_INPUTS = 16
MIB = 1 << 20

Row = dict[str, Any]


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    options = parse(argv)
    end = time.monotonic() + options.seconds
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_peers(options)
    card = torch.cuda.get_device_name(device)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"moe-{re.sub('[^a-z0-9]+', '-', card.lower())}.json"
    result = {"card": card, "versions": versions(options), "peaks": peaks(device), "rows": []}
    if options.resume and path.exists():
        result["rows"] = json.loads(path.read_text())["rows"]
    print(f"{card}, {result['versions']}, {result['peaks']}", flush=True)
    done = {key_of(row) for row in result["rows"]}
    tier, layer = None, None
    for case in cases(options):
        if case in done:
            continue
        if time.monotonic() > end:
            print(f"stopped after {options.seconds:g} s; the next run takes up what is missing")
            break
        if layer is None or tier != case[0]:
            layer = None  # its memory goes before the next one's is taken
            tier, layer = case[0], Layer(query(TIERS[case[0]], K, WIDTH, TOP_K), device)
        row = measure(layer, case, options.peers, result["peaks"])
        result["rows"].append(row)
        result["rows"].sort(key=key_of)
        path.write_text(render(result))
        print(line(row), flush=True)
    print(f"wrote {path}")
    from bench import moe_chart

    return moe_chart.main([str(path)])


def parse(argv: list[str]) -> argparse.Namespace:
    """Options; the defaults are everything."""
    parser = argparse.ArgumentParser(prog="bench moe", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rates", type=lambda s: s.split(","), default=list(TIERS), help="3,4,3+4")
    parser.add_argument("--rows", type=lambda s: [int(p) for p in s.split(",")], default=ROWS)
    parser.add_argument("--routings", type=lambda s: s.split(","), default=ROUTINGS)
    parser.add_argument("--peers", type=lambda s: s.split(","), default=list(PEERS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this long")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--extension", type=Path, help="the compiled extension, if it is not installed")
    parser.add_argument("--exllamav3", type=Path, help="exllamav3_ext*.so, if it cannot be imported")
    parser.add_argument("--exllamav3-version", default="1.6.5")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args(argv)


def prepare_peers(options: argparse.Namespace) -> None:
    """Load the two extensions where they were given by path; say what is missing."""
    if options.extension:
        ops.EXTENSION = options.extension
    module = load_exllamav3(options.exllamav3)
    if module is not None:
        sys.modules["exllamav3_ext"] = module
    for name, (ok, why) in {"native": ops.load(), "b12x": (not b12x_library.missing(), b12x_library.missing())}.items():
        if not ok:
            print(f"{name} is not measured: {why}")


def versions(options: argparse.Namespace) -> dict[str, str | None]:
    """Of everything that is measured."""
    found: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not b12x_library.missing():
        found["b12x"] = b12x_library.VERSION
    if "exllamav3_ext" in sys.modules:
        found["exllamav3"] = options.exllamav3_version
    return found | {"bf16": moe_peers.bf16_name()}


def peaks(device: torch.device) -> dict[str, float]:
    """What the floors are made of: bytes a second, read and written, and operations a second of a bf16 product."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product = microseconds([lambda: torch.mm(a, b, out=out)] * 2)
    return {"bytes_per_second": stream_bandwidth(device), "flops_per_second": 2 * 8192**3 / (product * 1e-6)}


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """(tiers, routing, rows), the most telling first."""
    asked = [(tier, kind, m) for tier in options.rates for kind in options.routings for m in options.rows]

    def weight(case: tuple[str, str, int]) -> tuple[bool, bool, int]:
        tier, kind, m = case
        place = list(TIERS).index(tier) if tier in TIERS else -1
        telling = m in TELLING_ROWS
        skewed = kind != "balanced"
        return not telling, skewed and place > 0, place + skewed

    yield from sorted(asked, key=weight)


def key_of(row: Row) -> tuple[str, str, int]:
    """What a row is about."""
    return str(row["K"]), row["routing"], row["m"]


def inputs_of(layer: Layer, kind: str, m: int) -> list[Input]:
    """Inputs whose experts are together several times the L2 cache."""
    shape, device = layer.query, layer.device
    touched = len(routing(kind, m, EXPERTS, TOP_K, device)[1].unique())
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MOST_INPUTS, max(2, math.ceil(L2_MULTIPLE * l2 / (touched * expert_bytes(layer)))))
    generator = torch.Generator(device=device).manual_seed(m)
    return [
        Input(
            torch.randn(m, shape.k, generator=generator, device=device).bfloat16(),
            *routing(kind, m, EXPERTS, TOP_K, device, seed=turn, turn=turn),
        )
        for turn in range(count)
    ]


def expert_bytes(layer: Layer) -> float:
    """Of the three matrices of an average expert."""
    rates = layer.query.w1.rates
    return 3 * K * WIDTH * sum(rates) / len(rates) / 8


def measure(layer: Layer, case: tuple[str, str, int], peers: list[str], limits: dict[str, float]) -> Row:
    """Every peer on one case."""
    tier, kind, m = case
    inputs = inputs_of(layer, kind, m)
    expected = [layer.truth(*sample(one)) for one in inputs[:1]]
    row: Row = {"K": tier if "+" in tier else int(tier), "routing": kind, "m": m}
    row |= {"us": {}, "arena_mib": {}, "error": {}}
    for name in peers:
        try:
            made = PEERS[name](layer, inputs)
            row["us"][name] = round(microseconds(made.calls), 2)
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as why:
            print(f"  {name}, {tier} bit, {kind}, {m} rows: {str(why).splitlines()[0][:160]}")
            continue
        if made.outputs:
            row["arena_mib"][name] = round(made.arena_bytes / MIB, 1)
            row["error"][name] = float(f"{worst(made, expected, m):.3g}")
    touched = sum(len(one.ids.unique()) for one in inputs) / len(inputs)
    weights = touched * expert_bytes(layer) / limits["bytes_per_second"] * 1e6
    flops = m * TOP_K * 3 * 2 * K * WIDTH / limits["flops_per_second"] * 1e6
    return row | {"floor_us": round(max(weights, flops), 2), "floors_us": [round(weights, 2), round(flops, 2)]}


def sample(one: Input) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows that are compared: the first and the last."""
    rows = compared(one.x.shape[0])
    return one.x[rows], one.weights[rows], one.ids[rows]


def compared(m: int) -> list[int]:
    """Their numbers."""
    half = TRUTH_ROWS // 2
    return sorted({*range(min(m, half)), *range(max(0, m - half), m)})


def worst(made: Calls, expected: list[torch.Tensor], m: int) -> float:
    """The largest relative error of the results compared."""
    return max(error(y[compared(m)], want) for y, want in zip(made.outputs, expected, strict=False))


def line(row: Row) -> str:
    """One row of the table: times, then each peer's over ours."""
    us = row["us"]
    times = "  ".join(f"{name} {t:8.1f}" for name, t in us.items())
    others = {name: t / us["native"] for name, t in us.items() if name != "native"} if "native" in us else {}
    ratios = "  ".join(f"{name}/native {ratio:5.2f}" for name, ratio in others.items())
    return f"{row['K']!s:>3} bit {row['routing']:8} m {row['m']:4}  {times}  floor {row['floor_us']:7.1f}  {ratios}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
