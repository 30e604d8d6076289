# SPDX-License-Identifier: Apache-2.0
"""Prefill of a whole engine with and without prefill plans: only VLLM_EXL3_PREFILL_TRELLIS is flipped.

The same checkpoint is started twice, with `1` (plans) and `0` (the parity path for prompts), and measured: time to the
first token and prompt tokens a second, by prompt length; with a draft, the share of its tokens that were accepted, from
the engine's own metrics; and whether both say the same tokens, greedily.  Prompts are random and never repeat, and
nothing is cached.  Prints the ratios; writes results/prefill-ab-<card>-<model>.json beside this file.

    python -m bench prefill_ab /models/glm-5.2-exl3 --mtp 3 --engine tensor_parallel_size=4
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from bench.decode import FIGURES, READY, figures_in, reason, running, wait_for

HERE = Path(__file__).parent
SWITCH = "VLLM_EXL3_PREFILL_TRELLIS"
VARIANTS = {"plans": "1", "parity": "0"}
TIMES = 3  # prompts of each length
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"

Figures = dict[str, Any]


def main(argv: list[str]) -> int:
    """Measure both variants, print, write."""
    options = parse(argv)
    if options.variant:
        print(FIGURES + json.dumps(measure(options)), flush=True)
        return 0
    figures = measure_both(options)
    report(options, figures)
    return 0 if all("seconds" in each for each in figures.values()) else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench prefill_ab", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder of an EXL3 checkpoint with routed experts")
    parser.add_argument("--lengths", type=lambda s: [int(n) for n in s.split(",")], default=[128, 512, 2048, 8192])
    parser.add_argument("--mtp", type=int, default=0, help="tokens drafted a step by the model's own MTP layers")
    parser.add_argument("--tokens", type=int, default=64, help="decoded a request, to compare and to count accepted")
    parser.add_argument("--engine", action="append", default=[], help="KEY=VALUE for the engine, VALUE in JSON")
    parser.add_argument("--together", action="store_true", help="start both at once, where both fit into memory")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the result")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure_both(options: argparse.Namespace) -> dict[str, Figures]:
    """The figures of each variant, or the end of its log."""
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as both:

        def start(variant: str) -> AbstractContextManager[subprocess.Popen[str]]:
            return running(command_of(options, variant), {SWITCH: VARIANTS[variant]}, Path(logs) / variant)

        started = {}
        for variant in VARIANTS if options.together else ():
            started[variant] = both.enter_context(start(variant))
        for variant in VARIANTS:
            log = Path(logs) / variant
            with ExitStack() as one:
                process = started.get(variant) or one.enter_context(start(variant))
                for each in started or [variant]:
                    wait_for(started.get(each, process), Path(logs) / each)
                with suppress(BrokenPipeError):
                    process.communicate("go\n")
                text = log.read_text(errors="replace")
                figures[variant] = figures_in(text) or {"error": reason(text)}
            print(f"{variant:7} {figures[variant].get('seconds', figures[variant].get('error'))}", flush=True)
    return figures


def command_of(options: argparse.Namespace, variant: str) -> list[str]:
    """What measures one variant."""
    command = [sys.executable, "-m", "bench", "prefill_ab", options.model, "--variant", variant]
    command += ["--lengths", ",".join(map(str, options.lengths)), "--mtp", str(options.mtp)]
    return [*command, "--tokens", str(options.tokens), *(f"--engine={pair}" for pair in options.engine)]


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """For vllm.LLM; what the command line says wins."""
    longest = max(options.lengths) + options.tokens + 8
    arguments: dict[str, Any] = {
        "model": options.model,
        "max_model_len": longest,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if options.mtp:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": options.mtp}
    for pair in options.engine:
        key, _, value = pair.partition("=")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments


def measure(options: argparse.Namespace) -> Figures:
    """Start the engine, wait for leave to go on, and time prompts."""
    import torch

    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(**engine_arguments(options))
    started = time.perf_counter() - began
    print(READY, flush=True)
    sys.stdin.readline()
    words, vocabulary = random.Random(0), llm.llm_engine.model_config.get_vocab_size()

    def answer(length: int, tokens: int) -> tuple[float, list[int]]:
        prompt: Any = {"prompt_token_ids": [words.randrange(5, vocabulary) for _ in range(length)]}
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        (result,) = llm.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - began, list(result.outputs[0].token_ids)

    seconds = {}
    for length in options.lengths:
        answer(length, 1)
        seconds[str(length)] = round(statistics.median(answer(length, 1)[0] for _ in range(TIMES)), 5)
    before = counters(llm)
    said = [answer(length, options.tokens)[1] for length in options.lengths]
    return {
        "seconds": seconds,
        "tokens_per_second": {length: round(int(length) / each, 1) for length, each in seconds.items()},
        "said": said,
        "acceptance": acceptance(before, counters(llm)),
        "start_seconds": round(started, 1),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


def counters(llm: Any) -> dict[str, int]:
    """How many tokens were drafted and accepted so far, from the metrics that a server would publish."""
    found = {DRAFTED: 0, ACCEPTED: 0}
    for metric in llm.get_metrics():
        if metric.name in found:
            found[metric.name] += metric.value
    return found


def acceptance(before: dict[str, int], after: dict[str, int]) -> float | None:
    """Share of the drafted tokens that were accepted; None where none were drafted."""
    drafted = after[DRAFTED] - before[DRAFTED]
    return round((after[ACCEPTED] - before[ACCEPTED]) / drafted, 4) if drafted else None


def same_tokens(figures: dict[str, Figures]) -> float | None:
    """Share of the answers' tokens, up to where they first differ, that both variants say."""
    pairs = list(zip(*(each.get("said", []) for each in figures.values()), strict=False))
    equal = total = 0
    for ours, theirs in pairs:
        total += len(ours)
        for one, other in zip(ours, theirs, strict=False):
            if one != other:
                break
            equal += 1
    return round(equal / total, 4) if total else None


def report(options: argparse.Namespace, figures: dict[str, Figures]) -> None:
    """Print the ratios and write the file."""
    plans, parity = (figures.get(variant, {}).get("seconds", {}) for variant in VARIANTS)
    times = {length: round(parity[length] / each, 2) for length, each in plans.items() if parity.get(length)}
    for length, ratio in times.items():
        print(f"{length:>7} prompt tokens: first token {ratio:.2f} times sooner with prefill plans")
    drafts = {variant: each.get("acceptance") for variant, each in figures.items()}
    print(f"accepted of the drafted tokens: {drafts}; same tokens: {same_tokens(figures)}")
    card = next((each["card"] for each in figures.values() if "card" in each), "unknown")
    name = re.sub("[^a-z0-9]+", "-", f"prefill-ab-{card}-{Path(options.model).name}".lower())
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    shown = {"card": card, "model": Path(options.model).name, "mtp": options.mtp, "engine": options.engine}
    shown |= {"plans_are_times_faster": times, "same_tokens": same_tokens(figures)}
    kept = {variant: {k: v for k, v in each.items() if k != "said"} for variant, each in figures.items()}
    path.write_text(json.dumps(shown | {"variants": kept}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
