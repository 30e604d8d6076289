"""Measure, in a process of its own, how much memory loading takes beyond what it leaves: prints one line of JSON.

    {"slabs": bytes of one layer's, "kept": {"peak": ..., "end": ...}, "decoded": {...}}

Eight layers of mixed K3/K4 experts, stored for two ranks, through vLLM's own loader: once with slabs kept as on a GPU,
once decoded as the CPU does it.  Anonymous resident memory, relative to the moment before the model is built.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: an installed vllm comes first

SHAPE = "--hidden 512 --moe-intermediate 512 --experts 32 --layers 8 --first-dense 0 --vocab 512"
FORM = f"--family qwen3_moe --layout per_expert --rates 3,4 --tp 2 {SHAPE}"


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Sampler(threading.Thread):
    """Keeps the most that `anonymous_bytes` has been."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.0005):
            self.peak = max(self.peak, anonymous_bytes())


def measure(folder: Path, kind: str) -> dict[str, int]:
    """Load the checkpoint once in this process."""
    from vllm import LLM
    from vllm.model_executor.layers.quantization.exl3_trellis.backends import torch_moe
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if kind == "kept":
        torch_moe.prepare = functools.partial(torch_moe.prepare, decode_once=False)
    figures: dict[str, int] = {}
    load = BaseModelLoader.load_model

    def measured(*args: Any, **named: Any) -> Any:
        before = anonymous_bytes()
        sampler = Sampler()
        sampler.start()
        model = load(*args, **named)
        figures["end"] = anonymous_bytes() - before
        sampler.done.set()
        sampler.join()
        figures["peak"] = sampler.peak - before
        return model

    BaseModelLoader.load_model = measured
    LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=64, distributed_executor_backend="uni")
    return figures


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])), flush=True)
        os._exit(0)  # nothing to shut down gracefully for
    from validate.__main__ import main as validate

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        assert validate(["make-checkpoint", "moe", str(folder), *FORM.split()]) == 0
        stored = json.loads((folder / "tier_bitmap.json").read_text())
        largest = max(sum(entry["k"]) for entry in stored.values())
        result: dict[str, Any] = {"slabs": largest * 3 * 512 * 512 // 8}
        # Freed memory goes back at once, so that what is resident is what is held.
        env = os.environ | {
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        for kind in ("kept", "decoded"):
            command = [sys.executable, __file__, str(folder), kind]
            done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            result[kind] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
