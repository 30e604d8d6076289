# SPDX-License-Identifier: Apache-2.0
"""What the commands against a running server share: their options, a line a check, the file, the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import plot, receipt
from .client import RefusedError, ServerError, UnusableError, connect

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
CANNOT = (400, 404, 501)  # statuses by which a server says that it does not do such a thing


class Finding(NamedTuple):
    """What a check found, and whether that is what was wanted."""

    right: bool
    found: str
    wanted: str


class Results:
    """The checks of one command; each prints a line when it is done."""

    def __init__(self, command: str, total: int, made: dict[str, Any], out: Path | None) -> None:
        self.command = command
        self.total = total
        self.receipt = made
        self.out = out
        self.checks: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []  # measurements, for the file and the plot

    def check(self, name: str, step: Callable[[], Finding]) -> str:
        """Takes one step; a server that cannot do it skips it, one that breaks fails it. Returns which it was."""
        progress(f"[{len(self.checks) + 1}/{self.total}] {name}")
        began = time.perf_counter()
        try:
            right, found, wanted = step()
            state = OK if right else FAILED
        except RefusedError as error:
            state, found, wanted = SKIPPED if error.status in CANNOT else FAILED, str(error), "an answer"
        except ServerError as error:
            state, found, wanted = FAILED, str(error), "an answer"
        seconds = round(time.perf_counter() - began, 3)
        self.checks.append({"name": name, "state": state, "found": found, "wanted": wanted, "seconds": seconds})
        print(f"{state:8}{name}: {found}; want {wanted}", flush=True)
        self.save()
        return state

    def save(self) -> None:
        """Writes the file as far as it goes: a long run may be ended early."""
        if self.out:
            whole = {"command": self.command, "checks": self.checks, "rows": self.rows, "receipt": self.receipt}
            write(self.out, whole)

    def finish(self) -> int:
        """Ends the file, and plots beside it if anything was measured. Returns 0 only if every check passed."""
        counts = Counter(check["state"] for check in self.checks)
        print(", ".join(f"{counts[state]} {state}" for state in (OK, FAILED, SKIPPED)))
        self.save()
        if self.out:
            print(f"wrote {self.out}")
            if self.rows:
                plot.main([str(self.out)])
        return 0 if counts[OK] == len(self.checks) > 0 else 1


def progress(line: str) -> None:
    """A line for whoever waits."""
    print(line, file=sys.stderr, flush=True)


def write(out: Path, whole: dict[str, Any]) -> None:
    """FILE.json, in a folder that need not be there yet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def short(text: str) -> str:
    """A text of any length on a line."""
    return repr(text if len(text) <= 80 else f"{text[:50]} … {text[-25:]}")


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every such command takes."""
    made = argparse.ArgumentParser(prog=f"python -m validate {command}", description=doc)
    made.add_argument("url", help="of the server, as in http://127.0.0.1:8000; a key comes from VLLM_API_KEY")
    made.add_argument("--model", type=Path, metavar="DIR", help="the checkpoint, whose digest the receipt then has")
    made.add_argument("--out", type=Path, metavar="FILE.json", help="write the results")
    made.add_argument("--timeout", type=float, default=3600, help="seconds of silence to give up after (%(default)g)")
    made.add_argument("--max-tokens", type=int, default=1024, help="of an answer, reasoning included (%(default)s)")
    made.add_argument(
        "--template", type=json.loads, default={}, metavar="JSON", help="chat_template_kwargs of every request"
    )
    return made


def begin(options: argparse.Namespace, body: Callable[[Any, dict[str, Any]], int]) -> int:
    """Connects, makes the receipt, runs `body(client, receipt)`. Returns 2, after one line, where it cannot."""
    fields = {"max_tokens": options.max_tokens}
    if options.template:
        fields["chat_template_kwargs"] = options.template
    try:
        progress(f"connecting to {options.url.rpartition('@')[2]}")
        client = connect(options.url, options.timeout, fields)
        made = receipt.make(client, options.model)
        if options.out:  # before an hour of measuring, not after
            write(options.out, {"receipt": made})
    except (UnusableError, OSError, ValueError) as error:
        print(f"validate: {error}", file=sys.stderr)
        return 2
    progress(f"{client.model} at {client.url}")
    return body(client, made)


def numbers(text: str, convert: Callable[[str], Any]) -> Sequence[Any]:
    """'8k,32k' or '0.1,0.9' as numbers."""
    try:
        return [convert(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def count(text: str) -> int:
    """'8k' as 8000, '8K' as 8192, as vLLM's own options read them; ValueError for anything below 1."""
    unit = {"k": 1000, "K": 1024}.get(text[-1:], 1)
    number = int(float(text.rstrip("kK")) * unit)
    if number < 1:
        raise ValueError("want 1 or more")
    return number
