# SPDX-License-Identifier: Apache-2.0
"""Loading a rank-sliced checkpoint on one GPU: seconds and memory, against repacking experts after they are loaded.

Both are the whole of vLLM's load of the same model, unquantized layers, preparation and start-up checks included.
`slabs` is this fork's loader, which copies each expert to its final place as it is read; `repacked` keeps every tensor
of an expert by itself on the card until all of the model have arrived, and then joins those of a layer at a time.
Each runs in a process of its own, in turn, `--repeats` times.  Prints the median seconds, the time in the checkpoint's
loader alone, the peak and what is left, in MiB of the card; writes results/loading-<card>-<model>.json here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.decode import FIGURES, figures_in

HERE = Path(__file__).parent
MIB = 1 << 20


def main(argv: list[str]) -> int:
    """Measure both, print, write."""
    options = parse(argv)
    if options.variant:
        with VARIANTS[options.variant]():
            print(FIGURES + json.dumps(load(options.model)), flush=True)
        return 0
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.repeats):
        for variant, done in runs.items():
            done.append(run_variant(options.model, variant))
    figures = {variant: median(done) for variant, done in runs.items()}
    for variant, entry in figures.items():
        print(f"{variant:9} " + ", ".join(f"{name} {value}" for name, value in entry.items()))
    if any("error" in entry for entry in figures.values()):
        return 1
    name = re.sub("[^a-z0-9]+", "-", f"loading-{figures['slabs']['card']}-{options.model.name}".lower())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(
        json.dumps({"model": options.model.name, "variants": figures}, indent=1) + "\n"
    )
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench loading", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="folder of a rank-sliced checkpoint")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the result")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of a variant the one in the middle by seconds, or the first that failed."""
    failed = [run for run in runs if "error" in run]
    return failed[0] if failed else sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]


def run_variant(model: Path, variant: str) -> dict[str, Any]:
    """The figures of a variant, or the end of its log."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "loading", str(model), "--variant", variant],
        cwd=HERE.parent, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return figures_in(done.stdout) or {"error": done.stdout[-1500:]}


def measured(load: Callable[[], Any], peak: bool = True) -> tuple[Any, dict[str, Any]]:
    """What `load` returns, and what it took; `peak`: also its own peak of memory, not that of what is around it."""
    import torch

    torch.cuda.synchronize()
    if peak:
        torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    loaded = load()
    torch.cuda.synchronize()
    return loaded, {
        "seconds": round(time.perf_counter() - began, 2),
        "peak_mib": round((torch.cuda.max_memory_allocated() - before) / MIB),
        "left_mib": round((torch.cuda.memory_allocated() - before) / MIB),
        "card": torch.cuda.get_device_name(),
    }


def load(model: Path) -> dict[str, Any]:
    """Start an engine of `model`; what its load took, and the checkpoint's loader within it."""
    from vllm import LLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    figures: dict[str, Any] = {}
    load_model, load_weights = BaseModelLoader.load_model, DefaultModelLoader.load_weights

    def measured_load(*args: Any, **named: Any) -> Any:
        loaded, taken = measured(lambda: load_model(*args, **named))
        figures.update(taken)
        return loaded

    def timed_weights(*args: Any, **named: Any) -> None:
        _, taken = measured(lambda: load_weights(*args, **named), peak=False)
        figures["loader_seconds"] = taken["seconds"]

    with (
        patch.object(BaseModelLoader, "load_model", measured_load),
        patch.object(DefaultModelLoader, "load_weights", timed_weights),
    ):
        LLM(str(model), enforce_eager=True, max_model_len=1024, kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True)
    return figures


@contextmanager
def repacking() -> Iterator[None]:
    """Within, experts are loaded as a loader without slabs would: tensor by tensor, joined when all are there."""
    from vllm.model_executor.layers.quantization.exl3_trellis import expert_intake, moe_method

    create, require = expert_intake.create_expert_params, expert_intake.require_all_experts

    def create_nothing(layer: Any, *args: Any) -> None:
        create(layer, *args)
        for _, param in expert_intake.held_params(layer):
            param.data, param.exl3_pieces = param.data.new_empty(0), []

    def keep(
        param: Any, loaded_weight: Any, weight_name: str = "", shard_id: str = "", expert_id: int = 0,
        return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        place = param.exl3_expert_param.place(shard_id, expert_id)
        kept = loaded_weight[place.cut] if place.cut else loaded_weight
        param.exl3_pieces.append((place.offset, kept.to(param.device, copy=True).flatten()))
        param.exl3_tally.note(param.exl3_expert_param, shard_id, expert_id)
        return True if return_success else None

    def join(layer: Any) -> None:
        for held, param in expert_intake.held_params(layer):
            param.data = param.data.new_empty(held.elements)
            for offset, piece in param.exl3_pieces:
                param.data[offset : offset + piece.numel()] = piece
            param.exl3_pieces.clear()
        require(layer)

    with (
        patch.object(moe_method, "create_expert_params", create_nothing),
        patch.object(expert_intake, "load_expert", keep),
        patch.object(moe_method, "require_all_experts", join),
    ):
        yield


VARIANTS: dict[str, Callable[[], Any]] = {"slabs": nullcontext, "repacked": repacking}
