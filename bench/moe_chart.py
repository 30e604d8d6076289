# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.moe_chart FILE.json`: the results of `bench moe` as a PNG, one panel a rate and routing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from validate.plot import beside

COLOURS = {"native": "C3", "b12x": "C0", "exl3_moe": "C1", "exl3_moe_coop": "C2", "bf16": "0.5"}


def main(argv: list[str]) -> int:
    """Draw times against rows, for every peer, with the floor below."""
    return beside(Path(argv[0]), "bench.moe_chart", figure_of)


def figure_of(result: dict[str, Any], pyplot: Any) -> Any:
    """All panels."""
    rates = sorted({str(row["K"]) for row in result["rows"]}, key=lambda rate: (len(rate), rate))
    routings = sorted({row["routing"] for row in result["rows"]})
    size = (4.4 * len(routings), 3.6 * len(rates))
    figure, axes = pyplot.subplots(len(rates), len(routings), figsize=size, sharex=True, squeeze=False)
    for line, rate in zip(axes, rates, strict=True):
        for axis, routing in zip(line, routings, strict=True):
            rows = [row for row in result["rows"] if (str(row["K"]), row["routing"]) == (rate, routing)]
            draw(axis, sorted(rows, key=lambda row: row["m"]))
            axis.set_title(f"{rate} bit, {routing}")
    for axis in axes[-1]:
        axis.set_xlabel("rows")
    for line in axes:
        line[0].set_ylabel("µs a layer")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(f"{result['card']}, torch {result['versions']['torch']}: 256 experts, 6144 × 512, top 8")
    return figure


def draw(axis: Any, rows: list[dict[str, Any]]) -> None:
    """One panel: a line for each peer."""
    for peer, colour in COLOURS.items():
        points = [(row["m"], row["us"][peer]) for row in rows if peer in row["us"]]
        if points:
            axis.plot(*zip(*points, strict=True), "-o", color=colour, markersize=3, label=peer)
    if rows:
        floor = [(row["m"], row["floor_us"]) for row in rows]
        axis.plot(*zip(*floor, strict=True), "k--", linewidth=0.8, label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
