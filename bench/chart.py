# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.chart FILE.json`: the results of `bench linear` as a PNG, one panel a shape and codebook."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from validate.plot import beside


def main(argv: list[str]) -> int:
    """Draw speed over bf16 against rows, for every rate, with exllamav3 beside."""
    return beside(Path(argv[0]), "bench.chart", figure_of)


def figure_of(result: dict[str, Any], pyplot: Any) -> Any:
    """All panels."""
    panels = sorted({(tuple(row["shape"]), row["codebook"]) for row in result["rows"]})
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.4), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        draw(axis, [row for row in result["rows"] if (tuple(row["shape"]), row["codebook"]) == panel])
        (k, n), book = panel
        axis.set_title(f"{k} × {n}, {book}")
    axes[0][0].set_ylabel("bf16 time / time (higher is faster)")
    axes[0][-1].legend(fontsize="small")
    figure.suptitle(f"{result['card']}, torch {result['versions']['torch']}")
    return figure


def draw(axis: Any, rows: list[dict[str, Any]]) -> None:
    """One panel: a line for each rate and provider."""
    for index, rate in enumerate(sorted({row["K"] for row in rows})):
        for provider, style in (("native", "-o"), ("exllamav3", ":x")):
            points = [
                (row["m"], row["us"]["bf16"] / row["us"][provider])
                for row in rows
                if row["K"] == rate and provider in row["us"]
            ]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=f"C{index}", label=f"{provider} {rate:g} bit")
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("rows")
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
