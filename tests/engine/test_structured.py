"""Tool calls and JSON schemas behind a reasoning parser: the same with MTP off and on.

With three drafts a step may bring the end of the reasoning together with the first tokens of the tool call or of the
JSON, which a grammar then constrains.  Prompts that hand over one word more each put that seam anywhere in a step.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.scripted import write_scripted
from tests.engine.server import Server, serve

REASONING = ("Look", " up", " the", " weather", " now")
SCRIPT = {
    "\n": (REASONING[0],),  # what the chat template ends with
    **{word: (following,) for word, following in zip(REASONING, (*REASONING[1:], "</think>"), strict=True)},
    "</think>": ("<tool_call>", '{"city": "'),
    "<tool_call>": ("get_weather",),
    "get_weather": ("<arg_key>",),
    "<arg_key>": ("city",),
    "city": ("</arg_key>",),
    "</arg_key>": ("<arg_value>",),
    "<arg_value>": ("Paris",),
    "Paris": ("</arg_value>",),
    "</arg_value>": ("</tool_call>",),
    "</tool_call>": ("<|im_end|>",),
    '{"city": "': ("Rome", "Oslo"),
    "Rome": ('", "days": ',),
    "Oslo": ('", "days": ',),
    '", "days": ': ("three", "3"),  # the schema wants a number
    "3": ("}",),
    "}": ("<|im_end|>",),
}
STARTS = 4  # of the prompt, as many as a step with three drafts has places
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def schema(city: dict[str, Any]) -> dict[str, Any]:
    """A response format: an object with a city and a number of days."""
    properties = {"city": city, "days": {"type": "integer"}}
    body = {"type": "object", "properties": properties, "required": ["city", "days"], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "trip", "schema": body}}


# name -> (fields of the request, tool calls expected, content expected)
CALL = [("get_weather", {"city": "Paris"})]
REQUESTS: dict[str, tuple[dict[str, Any], list, dict | None]] = {
    "tools": ({"tools": [TOOL]}, CALL, None),
    "tools, required": ({"tools": [TOOL], "tool_choice": "required"}, CALL, None),
    "schema": ({"response_format": schema({"type": "string"})}, [], {"city": "Rome", "days": 3}),
    # The draft says Rome.
    "schema against the script": (
        {"response_format": schema({"type": "string", "enum": ["Oslo"]})},
        [],
        {"city": "Oslo", "days": 3},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model."""
    folder = tmp_path_factory.mktemp("scripted") / "model"
    write_scripted(folder, SCRIPT)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "{%- if add_generation_prompt %}{{- begun }}{%- endif %}\n"
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, Any]]]:
    """drafts -> what a server with so many says to every request, and how many drafted tokens it accepted."""
    log = tmp_path_factory.mktemp("structured")
    flags = [
        "--dtype",
        "float32",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "glm47",
        "--max-model-len",
        "512",
        "--reasoning-parser",
        "glm45",
    ]
    said = {}
    for drafts in (0, 3):
        speculation = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
        with serve(folder, log, *flags, *(["--speculative-config", speculation] if drafts else [])) as server:
            said[drafts] = {
                (name, begun, stream): ask(server, fields, begun, stream)
                for name, (fields, _, _) in REQUESTS.items()
                for begun in range(STARTS)
                for stream in (False, True)
            }
            said[drafts]["accepted"] = accepted(server)
    return said


def ask(server: Server, fields: dict[str, Any], begun: int, stream: bool) -> dict[str, Any]:
    """Reasoning, content, tool calls and reason of the end of one answer; `begun` words of it are in the prompt."""
    body = {
        "model": json.loads(server.get("/v1/models"))["data"][0]["id"],
        "messages": [{"role": "user", "content": "Weather?"}],
        "temperature": 0,
        "max_tokens": 64,
        "chat_template_kwargs": {"begun": "".join(REASONING[:begun])},
        **fields,
    }
    if stream:
        return collect(server, body)
    choice = server.post("/v1/chat/completions", body)["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "reasoning": message.get("reasoning"),
        "content": message["content"] or None,
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "end": choice["finish_reason"],
    }


def collect(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The same from a stream of deltas."""
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    texts, calls, end = {"reasoning": "", "content": ""}, {}, None
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                end = choice["finish_reason"] or end
                for key in texts:
                    texts[key] += choice["delta"].get(key) or ""
                for call in choice["delta"].get("tool_calls") or []:
                    name, arguments = calls.get(call["index"], ("", ""))
                    function = call["function"]
                    calls[call["index"]] = (
                        name + (function.get("name") or ""),
                        arguments + (function.get("arguments") or ""),
                    )
    return {key: text or None for key, text in texts.items()} | {"calls": list(calls.values()), "end": end}


def accepted(server: Server) -> float:
    """Share of drafted tokens that were accepted; 0 without drafts."""
    pattern = r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\S* (\S+)$"
    found = dict(re.findall(pattern, server.get("/metrics"), re.MULTILINE))
    return float(found["accepted"]) / float(found["draft"]) if found else 0.0


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("begun", range(STARTS))
def test_drafts_do_not_change_structured_answers(answers, name, begun, stream):
    _, calls, content = REQUESTS[name]
    plain = answers[0][name, begun, stream]
    assert plain["reasoning"].split() == "".join(REASONING[begun:]).split()
    assert [(tool, json.loads(arguments)) for tool, arguments in plain["calls"]] == calls
    assert (json.loads(plain["content"]) if plain["content"] else None) == content
    assert plain["end"] == ("tool_calls" if calls else "stop")
    assert answers[3][name, begun, stream] == plain


def test_drafts_were_accepted(answers):
    assert answers[0]["accepted"] == 0
    assert answers[3]["accepted"] > 0.5  # tokens that a grammar forbids are not even tried
