# SPDX-License-Identifier: Apache-2.0
"""Loading a rank-sliced checkpoint on one GPU: seconds and memory, against repacking experts after they are loaded.

`slabs` is this fork's loader inside vLLM, which copies each expert to its final place as it is read; its seconds hold
all that vLLM does to load a model, start-up checks of kernels included.  `repacked` reads the same tensors with nothing
around, keeps every expert's on the card and then joins each layer's into one: the least that a loader without slabs
can do.  Each runs in a process of its own.  Prints seconds, the peak and what is left, in MiB of the card; writes
results/loading-<card>-<model>.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.decode import FIGURES, figures_in

HERE = Path(__file__).parent
MIB = 1 << 20
EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.rank\d+\.(\w+)")  # layer, projection, kind


def main(argv: list[str]) -> int:
    """Measure both, print, write."""
    options = parse(argv)
    if options.variant:
        print(FIGURES + json.dumps(VARIANTS[options.variant](options.model)), flush=True)
        return 0
    figures = {variant: run_variant(options.model, variant) for variant in VARIANTS}
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
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_variant(model: Path, variant: str) -> dict[str, Any]:
    """The figures of a variant, or the end of its log."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "loading", str(model), "--variant", variant],
        cwd=HERE.parent, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return figures_in(done.stdout) or {"error": done.stdout[-1500:]}


def measured(load: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What `load` returns, and what it took."""
    import torch

    torch.cuda.synchronize()
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


def in_slabs(model: Path) -> dict[str, Any]:
    """Through vLLM."""
    from vllm import LLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    figures: dict[str, Any] = {}
    load = BaseModelLoader.load_model

    def measured_load(*args: Any, **named: Any) -> Any:
        loaded, taken = measured(lambda: load(*args, **named))
        figures.update(taken)
        return loaded

    BaseModelLoader.load_model = measured_load  # type: ignore[method-assign]
    LLM(str(model), enforce_eager=True, max_model_len=1024, kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True)
    return figures


def repacked(model: Path) -> dict[str, Any]:
    """Tensor by tensor, then joined."""
    import torch

    torch.cuda.init()
    return measured(lambda: join_experts(model, "cuda"))[1]


def join_experts(model: Path, device: str) -> dict[str, Any]:
    """All tensors of a checkpoint but those of MTP layers, on `device`; those of a layer's experts joined, flat."""
    import torch
    from safetensors import safe_open

    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    tensors = {}
    for path in sorted(model.glob("model*.safetensors")):
        with safe_open(path, framework="pt", device=device) as stored:
            for name in stored.keys():  # noqa: SIM118  (not a dict)
                layer = re.search(r"\.layers\.(\d+)\.", name)
                if not layer or int(layer[1]) < layers:
                    tensors[name] = stored.get_tensor(name)
    groups = defaultdict(list)
    for name in list(tensors):
        if found := EXPERT.fullmatch(name):
            groups[".".join(found.groups())].append(tensors.pop(name).flatten())
    for name in list(groups):
        tensors[name] = torch.cat(groups.pop(name))
    return tensors


VARIANTS: dict[str, Callable[[Path], dict[str, Any]]] = {"slabs": in_slabs, "repacked": repacked}
