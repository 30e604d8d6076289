# SPDX-License-Identifier: Apache-2.0
"""`python -m validate needle URL`: does a server find one sentence in a long prompt, wherever it stands?

A length is prompt tokens as the server counts them (usage.prompt_tokens): the text is cut until that is within 1%.
Every prompt begins with a number of its own, so the prefix cache serves none. An answer that loops or has come apart
fails, though the needle is in it. Exit code 0: all found; 1: not all; 2: no usable server.
"""

from __future__ import annotations

import re
import secrets
from functools import partial
from typing import Any

from .client import Client, Message
from .degeneration import degenerate
from .prose import Ruler, beginning, sentences
from .results import FAILED, OK, SKIPPED, Finding, Results, begin, count, numbers, parser, progress, short

TOLERANCE = 0.01  # of the wanted length
TRIES = 4  # to hit it
QUESTION = "\n\nWhat is the number of the red locker? Answer with that number alone."


def fresh_code() -> str:
    """What is to be found; not to be guessed."""
    return str(secrets.randbelow(9 * 10**6) + 10**6)


def prompt(words: int, depth: float, code: str) -> str:
    """So many words of filler, and the needle at a share of its sentences."""
    text = sentences(words)
    text.insert(round(depth * len(text)), f"The number of the red locker is {code}.")
    return beginning() + " ".join(text) + QUESTION


def named(text: str, code: str) -> bool:
    """Whether a text has the code, perhaps with its digits grouped."""
    return code in re.sub(r"(?<=\d)[,.\s_](?=\d{3})", "", text)


class Search:
    """Prompts of wanted sizes for one server."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.ruler = Ruler()

    def measure(self, words: int) -> None:
        said = self.client.chat(messages=[_user(prompt(words, 0.5, fresh_code()))], max_tokens=1)
        self.ruler.learn(words, said.prompt_tokens)

    def calibrate(self, tokens: int) -> None:
        """Counts small prompts, and one of a tenth of the size, which costs little beside the size itself."""
        if not self.ruler.points:
            self.measure(10)
            self.measure(40)
        if tokens // 10 > max(self.ruler.points.values()):
            self.measure(self.ruler.words(tokens // 10))

    def find(self, tokens: int, depth: float, row: dict[str, Any]) -> Finding:
        """Asks until the prompt has the wanted size, and judges that answer; fills in `row`."""
        self.calibrate(tokens)
        code = fresh_code()
        for _ in range(TRIES):
            words = self.ruler.words(tokens)
            said = self.client.chat_streamed(messages=[_user(prompt(words, depth, code))])
            counted = said.prompt_tokens
            self.ruler.learn(words, counted)
            if abs(counted - tokens) <= TOLERANCE * tokens:
                break
            progress(f"  {counted} tokens, wanted {tokens}: again")
        cached = (said.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        row |= {"prompt_tokens": counted, "cached_tokens": cached, "first_token_seconds": round(said.first, 4)}
        return judge(said, code, tokens, row)


def judge(said: Message, code: str, tokens: int, row: dict[str, Any]) -> Finding:
    """The size, the needle, the state of the answer, and the cache where the server tells of it."""
    counted, cached = row["prompt_tokens"], row["cached_tokens"] or 0
    row["found"] = named(said.content, code)
    row["degenerate"] = degenerate(said.text)
    troubles = [f"degenerate: {row['degenerate']}"] if row["degenerate"] else []
    if abs(counted - tokens) > TOLERANCE * tokens:
        troubles.append(f"no prompt within {TOLERANCE:.0%} in {TRIES} tries")
    if cached > TOLERANCE * tokens + 64:  # a chat template may begin with some blocks that are always the same
        troubles.append(f"{cached} tokens came from the cache")
    found = "; ".join([f"{short(said.content)} after {counted} tokens", *troubles])
    return Finding(row["found"] and not troubles, found, f"{code} after {tokens} tokens")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def main(arguments: list[str]) -> int:
    """Ask for every length and depth. Returns the exit code."""
    form = parser("needle", __doc__)
    form.add_argument(
        "--lengths", type=lambda text: numbers(text, count), default=[8000, 32000], metavar="N[,N]",
        help="prompt tokens, as 8k (8,000) or 8K (8,192); answers come on top (8k,32k)",
    )  # fmt: skip
    form.add_argument(
        "--depths", type=lambda text: numbers(text, _share), default=[0.1, 0.5, 0.9], metavar="D[,D]",
        help="where the needle stands, 0 to 1 (0.1,0.5,0.9)",
    )  # fmt: skip
    options = form.parse_args(arguments)

    def body(client: Client, made: dict[str, Any]) -> int:
        search = Search(client)
        places = [(length, depth) for length in options.lengths for depth in options.depths]
        results = Results("needle", len(places), made, options.out)
        for length, depth in places:
            row: dict[str, Any] = {"tokens": length, "depth": depth}
            results.rows.append(row)
            step = partial(search.find, length, depth, row)
            row["state"] = results.check(f"{length} tokens, depth {depth:g}", step)
        return results.finish()

    return begin(options, body)


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError("want 0 to 1")
    return number


def figure_of(result: dict[str, Any], pyplot: Any) -> Any:
    """A mark for each length and depth."""
    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    for state, colour in ((OK, "tab:green"), (FAILED, "tab:red"), (SKIPPED, "0.7")):
        rows = [row for row in result["rows"] if row.get("state") == state]
        sizes = [row.get("prompt_tokens", row["tokens"]) for row in rows]
        if rows:
            axis.scatter(sizes, [row["depth"] for row in rows], s=120, marker="s", color=colour, label=state)
    axis.set_xscale("log")
    lengths = sorted({row["tokens"] for row in result["rows"]})
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.set_ylim(1.05, -0.05)
    axis.set_xlabel("prompt tokens, as the server counted them")
    axis.set_ylabel("depth of the needle")
    axis.legend(fontsize="small")
    axis.set_title(result["receipt"]["server"]["model"]["id"], fontsize="small")
    return figure
