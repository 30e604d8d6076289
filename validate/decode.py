# SPDX-License-Identifier: Apache-2.0
"""`python -m validate decode URL`: time to the first token and for each one after it, and what drafting was worth.

Each client sends one streamed request after another, all answers of the same number of tokens. Where a step brings
several tokens at once, as drafts make it, its time is shared among them; mean and 95th percentile are over tokens.
Acceptance comes from /metrics, as the difference over the requests; if the server generated more than they asked for,
someone else was served and the check fails. Exit code 0: all passed; 1: not all; 2: no usable server.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from . import metrics
from .client import Client, RefusedError, ServerError
from .prose import beginning, sentences
from .results import Finding, Results, begin, count, numbers, parser, progress

SETTLE_SECONDS = 5  # that a counter may lag behind the answer that it counts


class Timing(NamedTuple):
    """One streamed answer."""

    first: float  # seconds until the first token
    each: list[float]  # seconds of every later token
    tokens: int


def timed(arrivals: Sequence[tuple[float, int]]) -> Timing:
    """From (seconds, tokens so far) of every chunk."""
    first, each, before, had = 0.0, [], 0.0, 0
    for seconds, tokens in arrivals:
        if tokens > had:
            if had:
                each += [(seconds - before) / (tokens - had)] * (tokens - had)
            else:
                first = seconds
            before, had = seconds, tokens
    return Timing(first, each, had)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def ask(client: Client, tokens: int, words: int) -> Timing:
    """One request: words that no cache has, an answer of exactly so many tokens."""
    text = beginning() + " ".join(sentences(words)) + "\n\nGo on with these notes."
    arrivals = []
    for seconds, chunk in client.chunks(
        messages=[{"role": "user", "content": text}], max_tokens=tokens, min_tokens=tokens, ignore_eos=True
    ):
        if not chunk.get("usage"):
            raise ServerError("the stream does not count its tokens; want a vLLM server without anything in front")
        arrivals.append((seconds, int(chunk["usage"]["completion_tokens"])))
    return timed(arrivals)


def counters(client: Client) -> metrics.Counts:
    """What /metrics says now; nothing where it is not published."""
    try:
        return metrics.read(client.get("/metrics"))
    except RefusedError:
        return metrics.Counts()


def settled(client: Client, before: metrics.Counts, tokens: int) -> metrics.Counts:
    """The counters, once they have all the tokens that were received."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = counters(client)
        behind = after[metrics.GENERATED] - before[metrics.GENERATED] < tokens
        if not behind or metrics.GENERATED not in after or time.monotonic() > deadline:
            return after
        time.sleep(0.05)


def measure(client: Client, clients: int, options: Any, row: dict[str, Any]) -> Finding:
    """So many clients at once; fills in `row`."""
    before = counters(client)
    began = time.perf_counter()
    done: list[Timing] = []

    def one(_: int) -> None:
        for _ in range(options.requests):
            done.append(ask(client, options.tokens, options.words))
            progress(f"  {len(done)} of {clients * options.requests} answers")

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))
    wall = time.perf_counter() - began
    total = sum(timing.tokens for timing in done)
    after = settled(client, before, total)
    generated = after[metrics.GENERATED] - before[metrics.GENERATED]
    each = [seconds for timing in done for seconds in timing.each]
    if not each:
        raise ServerError("all tokens of an answer came at once; want more --tokens")
    row |= {
        "first_token_seconds": round(statistics.mean(timing.first for timing in done), 4),
        "token_ms_mean": round(1000 * statistics.mean(each), 3),
        "token_ms_p95": round(1000 * percentile(each, 0.95), 3),
        "tokens_per_second": round(total / wall, 2),
        "drafting": metrics.drafting(before, after),
    }
    return judge(row, total, clients * options.requests * options.tokens, generated)


def judge(row: dict[str, Any], received: int, wanted: int, generated: int) -> Finding:
    """All tokens came, and only they were generated (0: the server does not say)."""
    draft = row["drafting"]
    found = (
        f"{received} tokens, first after {row['first_token_seconds']:g} s, then {row['token_ms_mean']:g} ms each, "
        f"p95 {row['token_ms_p95']:g}; {row['tokens_per_second']:g} a second"
    )
    found += f"; accepted {draft['acceptance']:.1%}, length {draft['accepted_length']:g}" if draft else "; no drafts"
    right = received == wanted and generated in (0, wanted)
    if generated not in (0, received):
        found += f"; the server generated {generated} meanwhile"
    return Finding(right, found, f"{wanted} tokens, nobody else's")


def main(arguments: list[str]) -> int:
    """Measure one server. Returns the exit code."""
    form = parser("decode", __doc__)
    form.add_argument(
        "--clients", type=lambda text: numbers(text, count), default=[1, 2, 4, 8], metavar="N[,N]",
        help="requests at once (1,2,4,8)",
    )  # fmt: skip
    form.add_argument("--requests", type=count, default=2, help="of each client, one after another (%(default)s)")
    form.add_argument("--tokens", type=count, default=256, help="of every answer, 2 or more (%(default)s)")
    form.add_argument("--words", type=count, default=200, help="of every prompt (%(default)s)")
    options = form.parse_args(arguments)
    if options.tokens < 2:
        form.error("--tokens 1, want 2 or more: the first has no time of its own")

    def body(client: Client, made: dict[str, Any]) -> int:
        results = Results("decode", len(options.clients), made, options.out)
        try:
            progress("one answer that does not count")
            ask(client, options.tokens, options.words)
        except ServerError as error:
            progress(f"  {error}")  # the checks will say it again
        for clients in options.clients:
            row: dict[str, Any] = {"clients": clients}
            results.rows.append(row)
            name = f"{clients} {'client' if clients == 1 else 'clients'}"
            results.check(name, partial(measure, client, clients, options, row))
        return results.finish()

    return begin(options, body)


def figure_of(result: dict[str, Any], pyplot: Any) -> Any:
    """Time to the first token, and for the others, by clients."""
    rows = [row for row in result["rows"] if "token_ms_mean" in row]
    clients = [row["clients"] for row in rows]
    figure, (first, later) = pyplot.subplots(1, 2, figsize=(8, 3.6))
    first.plot(clients, [row["first_token_seconds"] for row in rows], "-o")
    first.set_ylabel("seconds to the first token")
    later.plot(clients, [row["token_ms_mean"] for row in rows], "-o", label="mean")
    later.plot(clients, [row["token_ms_p95"] for row in rows], ":x", label="p95")
    later.set_ylabel("ms a token")
    later.legend(fontsize="small")
    for axis in (first, later):
        axis.set_xlabel("clients")
        axis.set_xticks(clients)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.suptitle(result["receipt"]["server"]["model"]["id"], fontsize="small")
    return figure
