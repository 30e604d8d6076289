"""The life of one engine, in a process of its own: started, asked things in turn, over.

    lives = live({"mtp 3": Plan(folder, [("say", {"prompts": PROMPTS})], options={...}), ...}, logs=tmp_path)
    lives["mtp 3"].results[0]["said"]

CUDA graphs, the allocator for sleeping and whatever fails stay in that process.  Engines start all at once, for most
of a start is the processor's work, and are then asked one after the other, so that none disturbs what another
measures.  vLLM cannot size a KV cache beside others, so each is given `KV_BYTES`, unless it is to be `alone`.

As a program this module is such a process: it reads a plan, says READY, waits for a line, and writes results.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READY, RESULTS = "LIFE-READY", "LIFE-RESULTS "
KV_BYTES = 2 << 30
TIMEOUT = float(os.environ.get("LIFE_SECONDS", "240"))  # for a start, and for all steps

Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An engine and what to ask it: steps are names of methods of `Engine` with their arguments."""

    model: Path
    steps: list[Step]
    options: dict[str, Any] = field(default_factory=dict)  # of vllm.LLM
    env: dict[str, str] = field(default_factory=dict)
    alone: bool = False  # started when all others are over, and left to size its KV cache


@dataclass(frozen=True, kw_only=True)
class Life:
    """What came of a plan: one result a step, and all that the process wrote.  No results: it failed."""

    results: list[dict[str, Any]]
    log: str

    def __getitem__(self, step: int) -> dict[str, Any]:
        """The result of a step; fails with the end of the log if the engine did not get there."""
        assert self.results, self.log[-4000:]
        return self.results[step]

    @property
    def after_ready(self) -> str:
        """The log since the engine was ready."""
        return self.log.partition(READY)[2]


def composed() -> bool:
    """Whether the vLLM that would be imported is the composed one, not this checkout's overlay alone."""
    folders = [Path(path) / "vllm" for path in sys.path]
    return any((folder / "exl3_envs.py").is_file() and (folder / "__init__.py").is_file() for folder in folders)


def live(plans: dict[str, Plan], logs: Path) -> dict[str, Life]:
    """Run all plans; each log lies in `logs` as well."""
    lives: dict[str, Life] = {}
    together = {name: plan for name, plan in plans.items() if not plan.alone}
    for group in (together, *({name: plan} for name, plan in plans.items() if plan.alone)):
        running = {name: _Process(plan, logs / f"{name}.log".replace(" ", "-")) for name, plan in group.items()}
        for process in running.values():
            process.start()
        lives |= {name: process.finish() for name, process in running.items()}
    return lives


def differences(life: Life, alone: Life, step: int = 0) -> tuple[int, list[float]]:
    """Places where one engine says what the other says, and the margins where the first differences are.

    Behind its first difference an answer continues another text, so that nothing follows from what is there.
    """
    same, margins = 0, []
    for ours, theirs, won in zip(life[step]["said"], alone[0]["said"], alone[0]["margins"], strict=True):
        first = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        same += len(ours) if first is None else first
        margins += [] if first is None else [won[first]]
    return same, margins


class _Process:
    """A process that lives a plan.  Its output goes to a file, so that no pipe fills up."""

    def __init__(self, plan: Plan, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        options = plan.options if plan.alone else {"kv_cache_memory_bytes": KV_BYTES} | plan.options
        told = {"model": str(plan.model), "steps": plan.steps, "options": options}
        environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONUNBUFFERED": "1"} | plan.env
        with log.open("w") as out:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.life"], cwd=ROOT, env=environ, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.tell(json.dumps(told))

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone: its log says why
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()

    def start(self) -> None:
        """Wait until it is ready, or gone."""
        with self.watched():
            while READY not in self.log.read_text(errors="replace") and self.child.poll() is None:
                time.sleep(0.2)

    def finish(self) -> Life:
        """Let it take its steps, to its end."""
        with self.watched():
            self.tell("go")
            self.child.wait()
        log = self.log.read_text(errors="replace")
        line = next((line for line in log.splitlines() if line.startswith(RESULTS)), None)
        return Life(results=json.loads(line.removeprefix(RESULTS)) if line else [], log=log)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Kill it and its children if this takes too long."""
        watchdog = threading.Timer(TIMEOUT, os.killpg, (self.child.pid, signal.SIGKILL))
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()


class Engine:
    """A vllm.LLM in this process, and the steps that a plan may name.  Every step returns JSON."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        began = time.perf_counter()
        defaults = {
            "max_model_len": 4096,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.05,
            "seed": 0,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "skip_tokenizer_init": True,
        }
        self.llm = LLM(model, **(defaults | options))
        self.start_seconds = time.perf_counter() - began

    @property
    def worker(self) -> Any:
        """vLLM's worker of this process."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def generate(self, prompts: list[list[int]], **params: Any) -> list[Any]:
        """vLLM's answers to prompts of token ids, greedy unless told otherwise."""
        from vllm import SamplingParams

        sampling = SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "detokenize": False} | params))
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    def counted(self, name: str) -> int:
        """A counter of vLLM's speculative decoding."""
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == f"vllm:spec_decode_num_{name}")

    def say(self, prompts: list[list[int]], tokens: int = 32, margins: bool = False) -> dict[str, Any]:
        """What follows each prompt, greedily; how many drafted tokens were taken; by how much each token won."""
        before = {name: self.counted(name) for name in ("accepted_tokens", "draft_tokens")}
        answers = self.generate(prompts, max_tokens=tokens, logprobs=2 if margins else None)
        said = {name: self.counted(name) - count for name, count in before.items()}
        if margins:
            said["margins"] = [[margin(place) for place in answer.outputs[0].logprobs] for answer in answers]
        return said | {"said": [list(answer.outputs[0].token_ids) for answer in answers]}

    def score(self, texts: list[list[int]]) -> dict[str, Any]:
        """Of each text: the log probability of every token but the first, and the likeliest token at its place."""
        logprobs, top = [], []
        for answer, ids in zip(self.generate(texts, max_tokens=1, prompt_logprobs=1), texts, strict=True):
            places = answer.prompt_logprobs[1:]
            logprobs.append([place[token].logprob for place, token in zip(places, ids[1:], strict=True)])
            top.append([next(token for token, entry in place.items() if entry.rank == 1) for place in places])
        return {"logprobs": logprobs, "top": top}

    def watch(self, rows: list[int], prompt: int) -> dict[str, Any]:
        """What is loaded onto the card while prompts and batches of each size, and a long prompt, are served."""
        from tests.gpu.loads import Loads

        with Loads() as seen:
            for count in rows:
                self.generate([numbered(count, seed=count)], max_tokens=4)
                self.generate([numbered(9, seed=row) for row in range(count)], max_tokens=4)
            self.generate([numbered(prompt, seed=1)], max_tokens=2)
            self.generate([numbered(20, seed=2)], max_tokens=4, temperature=0.7, seed=5)
        return {"seen": seen.names}

    def prefill(self, tokens: int, repeats: int = 5) -> dict[str, Any]:
        """Seconds from a prompt of so many tokens to its answer's first, the median."""
        times = []
        for repeat in range(repeats + 1):
            began = time.perf_counter()
            self.generate([numbered(tokens, seed=repeat)], max_tokens=1)
            times.append(time.perf_counter() - began)
        return {"seconds": sorted(times[1:])[repeats // 2]}

    def sleep(self, level: int) -> dict[str, Any]:
        """Bytes of each of vLLM's pools before sleeping, and those that sleeping freed."""
        import torch

        from vllm.device_allocator.cumem import CuMemAllocator

        pools: dict[str, int] = {}
        for held in CuMemAllocator.get_instance().pointer_to_data.values():
            pools[held.tag] = pools.get(held.tag, 0) + held.handle[1]
        free = torch.cuda.mem_get_info()[0]
        self.llm.sleep(level=level)
        return {"pools": pools, "freed": torch.cuda.mem_get_info()[0] - free}

    def wake(self, reload: bool) -> dict[str, Any]:
        """Wake up; after level 2 the weights are read again."""
        self.llm.wake_up()
        if reload:
            self.llm.collective_rpc("reload_weights")
        self.llm.reset_prefix_cache()
        return {}

    def facts(self) -> dict[str, Any]:
        """Of the engine as it stands: card, versions, times, the size of its KV cache, memory."""
        import resource

        import torch

        cache = self.llm.llm_engine.vllm_config.cache_config
        return {
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
            "start_seconds": round(self.start_seconds, 1),
            "kv_blocks": cache.num_gpu_blocks,
            "kv_bytes": getattr(self.worker, "available_kv_cache_memory_bytes", 0),
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def margin(place: dict[int, Any]) -> float:
    """By how much the likeliest token's log probability exceeds the next one's."""
    first, second = sorted((entry.logprob for entry in place.values()), reverse=True)[:2]
    return first - second


def numbered(length: int, seed: int) -> list[int]:
    """Token ids from 12 to 267, the bytes of made checkpoints, always the same for a seed."""
    state, ids = seed * 7919 + 1, []
    for _ in range(length):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        ids.append(12 + (state >> 16) % 256)
    return ids


def main() -> int:
    """Live the plan on standard input."""
    told = json.loads(sys.stdin.readline())
    engine = Engine(told["model"], told["options"])
    print(READY, flush=True)
    sys.stdin.readline()
    results = [getattr(engine, name)(**arguments) for name, arguments in told["steps"]]
    print(RESULTS + json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
