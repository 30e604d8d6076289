# SPDX-License-Identifier: Apache-2.0
"""`python -m validate plot FILE.json`: results as FILE.png beside it, where matplotlib is installed.

Benchmarks plot through `beside` too: `validate` is alone in an image, so it is the one that others import.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLOTTED = ("needle", "decode")  # commands whose modules have a `figure_of`


def main(arguments: list[str]) -> int:
    """Draw what a command wrote. Returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m validate plot FILE.json", file=sys.stdout if "--help" in arguments else sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    path = Path(arguments[0])
    try:
        command = json.loads(path.read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"plot: {path}: {error!r}", file=sys.stderr)
        return 2
    if command not in PLOTTED:
        print(f"plot: {path}: results of {command!r}, want those of {' or '.join(PLOTTED)}", file=sys.stderr)
        return 2
    return beside(path, "validate plot", importlib.import_module(f"{__package__}.{command}").figure_of)


def beside(path: Path, module: str, figure_of: Callable[[dict[str, Any], Any], Any]) -> int:
    """Write FILE.png beside FILE.json, where matplotlib is installed.

    Args:
        path: FILE.json, as a benchmark wrote it.
        module: what to run later if it is not.
        figure_of: makes the figure, from the result and pyplot.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"no plot: matplotlib is not installed; later: python -m {module} {path}")
        return 0
    mpl.use("Agg")
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    if not result["rows"]:
        return 0
    figure = figure_of(result, pyplot)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    print(f"wrote {path.with_suffix('.png')}")
    return 0
