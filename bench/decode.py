# SPDX-License-Identifier: Apache-2.0
"""Decode speed of a whole engine on one GPU: EXL3 by our kernels, by exllamav3's, and the same model in bf16.

Each variant runs in a process of its own with vLLM's defaults: graphs on, but none of exllamav3's kernels.
They start together, for starting is the processor's work, and are measured one after the other once all are ready.
The bf16 peer has the model's shapes and made-up weights: speed does not depend on their values.
Prints tokens a second and the ratios; writes results/decode-<card>-<model>.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
READY, FIGURES = "BENCH-DECODE-READY", "BENCH-DECODE-FIGURES "  # begin lines of a variant's process
LAST_LINE = 100  # characters of a log's last line, in a message
KV_BYTES = 4 << 30  # vLLM cannot measure what is free while others start beside it
WARM_UPS = 2
PROMPT = list(range(5, 37))  # token ids; what they mean does not matter


def main(argv: list[str]) -> int:
    """Measure every variant, print, write."""
    options = parse(argv)
    if options.variant:
        figures = measure(options)
        print(FIGURES + json.dumps(figures), flush=True)
        return 0
    figures = measure_all(options)
    report(options, figures)
    return 0 if "tokens_per_second" in figures.get("exl3", {}) else 1


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of each variant, or the end of its log."""
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for variant in options.variants:
            model, env = stack.enter_context(variant_of(options.model, variant))
            command = command_of(options, variant, model)
            processes[variant] = stack.enter_context(running(command, env, logs / variant))
        for variant, process in processes.items():
            wait_for(process, logs / variant, options.ready_seconds)
        for variant, process in processes.items():
            with suppress(BrokenPipeError):
                process.communicate("go\n")
            log = (logs / variant).read_text(errors="replace")
            figures[variant] = figures_in(log) or {"error": reason(log)}
            print(
                f"{variant:10} {figures[variant].get('tokens_per_second', figures[variant].get('error'))}", flush=True
            )
    return figures


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench decode", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="folder of an EXL3 checkpoint")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="decoded a request (%(default)s)")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["exl3", "bf16", "exllamav3"])
    parser.add_argument("--ready-seconds", type=float, default=1800, help="leave out what starts longer (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the result")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@contextmanager
def variant_of(model: Path, variant: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder and environment of a variant; the bf16 one is a config without quantization."""
    if variant != "bf16":
        yield model, {"VLLM_EXL3_BACKEND": "exllamav3"} if variant == "exllamav3" else {}
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in model.glob("*.json"):
            if path.name != "quantization_config.json" and "index" not in path.name:
                (Path(folder) / path.name).write_bytes(path.read_bytes())
        config = json.loads((model / "config.json").read_text())
        config.pop("quantization_config", None)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder), {}


def command_of(options: argparse.Namespace, variant: str, model: Path) -> list[str]:
    """What measures one variant."""
    command = [sys.executable, "-m", "bench", "decode", str(model), "--variant", variant]
    return [*command, "--batches", ",".join(map(str, options.batches)), "--tokens", str(options.tokens)]


@contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of a variant, `env` added to this one's, its output in `log`; ended when the context is left."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=HERE.parent, env=os.environ | env, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # the engine's own processes go with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def figures_in(log: str) -> dict[str, Any] | None:
    """What a variant's process measured; None if it did not get so far."""
    line = next((line for line in log.splitlines() if line.startswith(FIGURES)), None)
    return dict(json.loads(line.removeprefix(FIGURES))) if line else None


def reason(log: str) -> str:
    """Why a process failed: the last error in its log that is not about another process; else the end of the log."""
    errors = [line for line in log.splitlines() if "Error: " in line and "Engine core initialization" not in line]
    return errors[-1] if errors else log[-1500:]


def wait_for(process: subprocess.Popen[str], log: Path, seconds: float = math.inf, every: float = 15.0) -> None:
    """Until the engine is ready, or gone; one that is neither in `seconds` is ended.  Says every now and then how far
    its log has come: a large model takes minutes."""
    began = told = time.monotonic()
    while process.poll() is None and READY not in (text := log.read_text(errors="replace")):
        if time.monotonic() - told > every:
            told = time.monotonic()
            last = (text.strip().splitlines() or [""])[-1][:LAST_LINE]
            print(f"{log.name:12} not ready after {told - began:3.0f} s: {last}", flush=True)
        if time.monotonic() - began > seconds:
            with log.open("a") as out:
                out.write(f"\nError: not ready after {seconds:g} s\n")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        time.sleep(0.5)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of decoding, by batch: time from the first token to the last, prefill left out."""
    import torch

    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        str(options.model),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(options.batches),
        seed=0,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        load_format="dummy" if options.variant == "bf16" else "auto",
    )
    start_seconds = time.perf_counter() - began
    print(READY, flush=True)
    sys.stdin.readline()
    speeds = {}
    for batch in options.batches:
        prompts: list[Any] = [{"prompt_token_ids": PROMPT} for _ in range(batch)]

        def seconds(tokens: int, prompts: list[Any] = prompts) -> float:
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        for _ in range(WARM_UPS):
            seconds(8)
        times = sorted(seconds(options.tokens + 1) - seconds(1) for _ in range(3))
        speeds[str(batch)] = round(batch * options.tokens / times[1], 1)
    return {
        "tokens_per_second": speeds,
        "start_seconds": round(start_seconds, 1),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


def report(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print the ratios and write the file."""
    ours = figures.get("exl3", {}).get("tokens_per_second", {})
    for variant, entry in figures.items():
        theirs = entry.get("tokens_per_second", {})
        entry["exl3_is_times_faster"] = {
            batch: round(speed / theirs[batch], 2) for batch, speed in ours.items() if theirs.get(batch)
        }
        if variant != "exl3" and theirs:
            print(f"exl3 / {variant}: " + ", ".join(f"{r} at {b}" for b, r in entry["exl3_is_times_faster"].items()))
    card = next((entry["card"] for entry in figures.values() if "card" in entry), "unknown")
    options.out.mkdir(parents=True, exist_ok=True)
    name = re.sub("[^a-z0-9]+", "-", f"decode-{card}-{options.model.name}".lower())
    path = options.out / f"{name}.json"
    shown = {"card": card, "model": options.model.name, "tokens": options.tokens, "variants": figures}
    path.write_text(json.dumps(shown, indent=1) + "\n")
    print(f"wrote {path}")
