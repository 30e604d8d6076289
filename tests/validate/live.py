# SPDX-License-Identifier: Apache-2.0
"""The scripted model of tests/engine behind a real server, for the commands that ask one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engine.scripted import write_scripted
from tests.engine.server import Server, serve

CODE = "4830217"  # the number that it knows
THOUGHT = ("Hm", " well", "</think>")
ANSWER = ("The", " locker", " number", " is ", CODE, " and", " there", " are ", "31", " degrees.")
CALL = (
    "Look", " it", " up", "<tool_call>", "get_weather", "<arg_key>", "city", "</arg_key>", "<arg_value>", "Paris",
    "</arg_value>", "</tool_call>",
)  # fmt: skip
JSON = ('{"city": "', "Rome", '", "days": ', "3", "}")
END = "<|im_end|>"


def _chain(*words: str) -> dict[str, tuple[str, ...]]:
    return {word: (following,) for word, following in itertools.pairwise(words)}


# With tools it calls one, which ends its reasoning; else, and after a tool's result, it thinks and answers, in JSON
# where a grammar forbids the answer's first word.
SCRIPT = {
    **_chain("\n", *CALL, END),
    **_chain("Say:", *THOUGHT, *ANSWER, END, THOUGHT[0]),  # where it must go on
    **_chain(*JSON, END),
    "</think>": (ANSWER[0], JSON[0]),
    '", "days": ': ("three", "3"),
}
SAY = "{%- if not tools or messages[-1]['role'] == 'tool' %}{{- 'Say:' }}{%- endif %}\n"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "glm47", "--exclude-tools-when-tool-choice-none")
FLAGS = (
    "--dtype", "float32", "--max-model-len", "1024", "--reasoning-parser", "glm45", "--enable-prompt-tokens-details",
    "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3}),
)  # fmt: skip


@contextmanager
def served(folder: Path, *flags: str, **env: str) -> Iterator[tuple[Server, Path]]:
    """A server, and the checkpoint that it serves."""
    model = folder / "model"
    write_scripted(model, SCRIPT)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += SAY
    path.write_text(json.dumps(config))
    with serve(model, folder, *FLAGS, *flags, **env) as server:
        yield server, model
