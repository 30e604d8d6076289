# SPDX-License-Identifier: Apache-2.0
"""`python -m validate audit-log`: what a server's log says that a look at its answers would miss.

Reads the log of `vllm serve` and lists lines that mean trouble: errors anywhere, and anything compiled after the server
had said that it was ready, for a request waited for that. Knows wordings of vLLM 0.32 (a test holds them against its
sources) and of what it runs on; a log without findings proves nothing about what is not logged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

READY = "Application startup complete"
NEVER_READY = "never ready"


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A kind of trouble and the wordings that show it."""

    kind: str
    wordings: re.Pattern[str]
    late: bool = False  # trouble only once the server is ready


def _any(*wordings: str) -> re.Pattern[str]:
    return re.compile("|".join(wordings))


# A line is what the first sign that it fits says.
SIGNS = (
    Sign(
        kind="out of memory",
        wordings=_any("OutOfMemoryError", "[Oo]ut of memory", "No available memory for the cache", "Killed process"),
    ),
    Sign(
        kind="CUDA error",
        wordings=_any(
            "CUDA (driver )?error", "cudaError", "CU(BLAS|DNN)_STATUS_", "NCCL error", "illegal memory access",
            "device-side assert",
        ),
    ),
    Sign(
        kind="matcher failure",
        wordings=_any("Failed to advance FSM", "grammar rejected tokens", "grammar terminated or rejected draft"),
    ),
    Sign(
        kind="engine died",
        wordings=_any(
            "EngineDeadError", "EngineCore (encountered|failed to start)", "Engine core initialization failed",
            "(died|exited) unexpectedly", "died with exit code",
        ),
    ),
    Sign(kind="traceback", wordings=_any(r"Traceback \(most recent call last\)")),
    Sign(
        kind="compiled after ready",
        wordings=_any(
            "during inference", "Compiling a graph", "torch.compile took", "Cache the graph of", "JIT compil",
            "[Aa]utotuning", "Capturing CUDA graph",
        ),
        late=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A line of the log that means trouble."""

    line: int  # the first is 1; 0: the log as a whole
    kind: str
    text: str


def audit(lines: Iterable[str], ready: str = READY) -> list[Finding]:
    """The findings of a log, in its order; one says so if the words `ready` never come."""
    findings, is_ready = [], False
    for number, line in enumerate(lines, 1):
        is_ready = is_ready or ready in line
        sign = next((sign for sign in SIGNS if (is_ready or not sign.late) and sign.wordings.search(line)), None)
        if sign:
            findings.append(Finding(line=number, kind=sign.kind, text=line.strip()))
    if not is_ready:
        findings.append(Finding(line=0, kind=NEVER_READY, text=f"no line has {ready!r}"))
    return findings


def describe(findings: list[Finding]) -> str:
    """The findings line by line, and how many there are of each kind."""
    counts = Counter(finding.kind for finding in findings)
    summary = ", ".join(f"{kind}: {count}" for kind, count in counts.items()) or "nothing found"
    return "\n".join([*(f"{f.line}: {f.kind}: {f.text[:200]}" for f in findings), summary])


def main(arguments: list[str]) -> int:
    """Audit a file, or standard input. Returns 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m validate audit-log", description=__doc__)
    parser.add_argument("log", type=Path, help="the server's log; - is standard input (docker compose logs | …)")
    parser.add_argument("--ready", default=READY, metavar="WORDS", help="in the line that says it serves (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    options = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if str(options.log) == "-" else options.log.read_text(errors="replace")
    except OSError as error:
        print(f"audit-log: {error}", file=sys.stderr)
        return 2
    findings = audit(text.splitlines(), options.ready)
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if options.json else describe(findings))
    return 1 if findings else 0
