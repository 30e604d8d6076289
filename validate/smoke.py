# SPDX-License-Identifier: Apache-2.0
"""`python -m validate smoke URL`: does a running server chat, call tools and keep to a schema, streamed too?

Every answer is asked for twice, as a whole and streamed; the stream's joined deltas must say the same, greedily and
past the prefix cache. Another client's load changes how batches round, so this wants a quiet server. A model may answer
a request with tools as it likes (`auto`): one that calls none fails that check. Exit code 0: all passed; 1: not all
did (a server without a tool parser skips what needs one: leave it out with --only); 2: no usable server.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from .client import Client, Message, ServerError
from .results import Finding, Results, begin, parser, short

PLACE, ANSWER = "Paris", "31"  # the tool says 31 degrees
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
NAME = "get_weather"
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "The weather in a city, now", "parameters": PARAMETERS},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
WEATHER = f"What is the weather in {PLACE} now? Look it up."
TYPES: dict[str, type] = {"object": dict, "string": str, "integer": int}


def violations(value: Any, schema: dict[str, Any], where: str = "it") -> list[str]:
    """How a value breaks a schema. Knows the words that the schemas above use."""
    if not isinstance(value, TYPES[schema["type"]]) or isinstance(value, bool):
        return [f"{where} is {json.dumps(value)[:40]}, no {schema['type']}"]
    if not isinstance(value, dict):
        return []
    known = schema["properties"]
    found = [f"{where} has no {name}" for name in schema["required"] if name not in value]
    if not schema.get("additionalProperties", True):
        found += [f"{where} has {name} too" for name in value if name not in known]
    for name in known.keys() & value.keys():
        found += violations(value[name], known[name], name)
    return found


def obeys(text: str, schema: dict[str, Any]) -> tuple[bool, str]:
    """Whether a text is JSON that keeps to a schema, and what is found."""
    try:
        broken = violations(json.loads(text), schema)
    except ValueError:
        broken = ["no JSON"]
    return not broken, "; ".join([short(text), *broken])


def judge_text(message: Message) -> Finding:
    """Some words."""
    return Finding(bool(message.content.strip()) and not message.calls, _said(message), "a text, and no call")


def judge_call(message: Message) -> Finding:
    """One call or more, each of the tool with arguments as its parameters say."""
    right = bool(message.calls)
    for name, arguments in message.calls:
        right = right and name == NAME and obeys(arguments, PARAMETERS)[0]
    return Finding(right, _said(message), f'calls of {NAME} with {{"city": …}}')


def judge_schema(message: Message) -> Finding:
    return Finding(*obeys(message.content, SCHEMA), 'JSON {"city": text, "days": whole number}')


class Kind(NamedTuple):
    """A request, and what its answer must be."""

    asked: str
    fields: dict[str, Any]
    judge: Callable[[Message], Finding]


KINDS = {
    "chat": Kind("What is the capital of France?", {}, judge_text),
    "tools none": Kind(WEATHER, {"tools": [TOOL], "tool_choice": "none"}, judge_text),
    "tools auto": Kind(WEATHER, {"tools": [TOOL], "tool_choice": "auto"}, judge_call),
    "tools required": Kind(WEATHER, {"tools": [TOOL], "tool_choice": "required"}, judge_call),
    "tools named": Kind(
        WEATHER, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": NAME}}}, judge_call
    ),
    "schema": Kind("Plan a trip: a city and a number of days, as JSON.", {"response_format": FORMAT}, judge_schema),
}
ROUND_TRIP = "round trip"


class Smoke:
    """The checks of one server; whole answers are kept to be compared with."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answers: dict[str, Message] = {}

    def body(self, name: str) -> dict[str, Any]:
        kind = KINDS[name]
        salt = secrets.token_hex(8)  # no prefix in common with any other request
        return {"messages": [{"role": "user", "content": kind.asked}], "cache_salt": salt, **kind.fields}

    def answer(self, name: str) -> Message:
        """The whole answer, asked for once."""
        if name not in self.answers:
            self.answers[name] = self.client.chat(**self.body(name))
        return self.answers[name]

    def whole(self, name: str) -> Finding:
        return KINDS[name].judge(self.answer(name))

    def streamed(self, name: str) -> Finding:
        """The stream says what the whole answer says."""
        whole, streamed = self.answer(name), self.client.chat_streamed(**self.body(name))
        if whole == streamed:
            return Finding(True, "the same", "the whole answer")
        ours, theirs = _parts(streamed), _parts(whole)
        parts = [part for part in ours if ours[part] != theirs[part]]
        found, wanted = ("; ".join(f"{part} {short(side[part])}" for part in parts) for side in (ours, theirs))
        return Finding(False, found, wanted)

    def round_trip(self) -> Finding:
        """What the tool returns goes back; an answer that tells it comes."""
        asked = self.body("tools auto")
        call = self.answer("tools auto")
        if not call.calls:
            call = self.answer("tools required")
        if not call.calls:
            raise ServerError("no call came that could be answered")
        calls = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            for key, (name, arguments) in zip(call.ids, call.calls, strict=True)
        ]
        result = json.dumps({"weather": "hail", "degrees_celsius": int(ANSWER)})
        asked["messages"] += [
            {"role": "assistant", "content": call.content, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": each["id"], "content": result} for each in calls),
        ]
        message = self.client.chat(**asked)
        right = ANSWER in message.content and not message.calls
        return Finding(right, _said(message), f"a text with {ANSWER}, which the tool had said")


def _parts(message: Message) -> dict[str, str]:
    """All that two answers are compared by."""
    calls = ", ".join(f"{name}({arguments})" for name, arguments in message.calls)
    return {"reasoning": message.reasoning, "content": message.content, "calls": calls, "end": message.end}


def _said(message: Message) -> str:
    said = [f"{len(message.reasoning)} characters of reasoning"] if message.reasoning else []
    said += [short(message.content)] if message.content else []
    said += [f"{name}({arguments})" for name, arguments in message.calls]
    return ", ".join([*said, *([] if message.end in ("stop", "tool_calls") else [f"ended by {message.end!r}"])])


def main(arguments: list[str]) -> int:
    """Check one server. Returns the exit code."""
    form = parser("smoke", __doc__)
    names = [*KINDS, ROUND_TRIP]
    form.add_argument("--only", type=_names, default=names, metavar="NAME[,NAME]", help=f"of {', '.join(names)}")
    options = form.parse_args(arguments)
    kinds = [name for name in options.only if name in KINDS]

    def body(client: Client, made: dict[str, Any]) -> int:
        smoke = Smoke(client)
        trip = ROUND_TRIP in options.only
        results = Results("smoke", 2 * len(kinds) + trip, made, options.out)
        for name in kinds:
            results.check(name, partial(smoke.whole, name))
            results.check(f"{name}, streamed", partial(smoke.streamed, name))
        if trip:
            results.check(ROUND_TRIP, smoke.round_trip)
        return results.finish()

    return begin(options, body)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (*KINDS, ROUND_TRIP):
            raise argparse.ArgumentTypeError(f"{name!r}: want some of {', '.join([*KINDS, ROUND_TRIP])}")
    return names
