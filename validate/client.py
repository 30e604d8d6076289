# SPDX-License-Identifier: Apache-2.0
"""HTTP to a running server: what it is, whole and streamed chat answers, its counters. Standard library only.

A key is read from VLLM_API_KEY, sent as a bearer token, and shown nowhere.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

KEY = "VLLM_API_KEY"
CHAT = "/v1/chat/completions"


class ServerError(Exception):
    """What the server did not do, in one line."""


class UnusableError(ServerError):
    """Nothing can be asked there at all."""


class RefusedError(ServerError):
    """An HTTP status of 300 or more, with the server's own words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Message:
    """One answer, however it came. Two are equal that say the same; counts and the names of calls may differ."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # (name, arguments as the model wrote them)
    end: str = ""  # finish_reason
    ids: tuple[str, ...] = field(default=(), compare=False)  # of the calls
    usage: dict[str, Any] = field(default_factory=dict, compare=False)
    first: float = field(default=0.0, compare=False)  # seconds until the first text of a stream

    @property
    def text(self) -> str:
        """All that was said in words."""
        return self.reasoning + self.content

    @property
    def prompt_tokens(self) -> int:
        """Of the request, as the server counted them."""
        if "prompt_tokens" not in self.usage:
            raise ServerError("the server did not count the tokens of the prompt")
        return int(self.usage["prompt_tokens"])


@dataclass(frozen=True, kw_only=True)
class Client:
    """A server that answered."""

    url: str  # without /v1
    timeout: float  # seconds of silence that are given up on
    key: str = field(default="", repr=False)
    model: str = ""  # its name in requests
    card: dict[str, Any] = field(default_factory=dict)  # what /v1/models says of it
    fields: dict[str, Any] = field(default_factory=dict)  # of every chat request

    def get(self, path: str) -> str:
        """The body of an answer; ServerError says why there is none."""
        with self._open(path) as answer:
            return str(answer.read().decode(errors="replace"))

    def get_json(self, path: str) -> dict[str, Any]:
        return _object(self.get(path), path)

    def chat(self, **body: Any) -> Message:
        """The answer as a whole."""
        with self._open(CHAT, self._body(body)) as answer:
            said = _object(answer.read(), CHAT)
        try:
            choice = said["choices"][0]
            message = choice["message"]
            calls = message.get("tool_calls") or []
            return Message(
                reasoning=message.get("reasoning") or "",
                content=message.get("content") or "",
                calls=tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls),
                end=choice["finish_reason"] or "",
                ids=tuple(call["id"] for call in calls),
                usage=said.get("usage") or {},
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(f"{CHAT}: an answer without {error}") from None

    def chat_streamed(self, **body: Any) -> Message:
        """The same answer, joined from the deltas of a stream."""
        joined, ends, first = {"reasoning": "", "content": ""}, [""], 0.0
        usage: dict[str, Any] = {}
        calls: dict[int, dict[str, str]] = {}
        for seconds, chunk in self.chunks(**body):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                ends.append(choice.get("finish_reason") or ends[-1])
                for name in joined:
                    joined[name] += delta.get(name) or ""
                for part in delta.get("tool_calls") or []:
                    call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                    for name, text in {"id": part.get("id"), **part.get("function", {})}.items():
                        call[name] = call.get(name, "") + (text or "")
                if not first and (any(joined.values()) or calls):
                    first = seconds
        return Message(
            **joined,
            calls=tuple((call["name"], call["arguments"]) for _, call in sorted(calls.items())),
            end=ends[-1],
            ids=tuple(call["id"] for _, call in sorted(calls.items())),
            usage=usage,
            first=first,
        )

    def chunks(self, **body: Any) -> Iterator[tuple[float, dict[str, Any]]]:
        """Each chunk of a stream, and the seconds since it was asked for; every one counts the tokens so far."""
        counting = {"include_usage": True, "continuous_usage_stats": True}
        began = time.perf_counter()
        with self._open(CHAT, self._body(body) | {"stream": True, "stream_options": counting}) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data.startswith(b"{"):
                    chunk = _object(data, CHAT)
                    if "choices" not in chunk:
                        raise ServerError(f"{CHAT}: in the stream: {_reason(data)}")
                    yield time.perf_counter() - began, chunk
        raise ServerError(f"{CHAT}: the stream ended without [DONE]")

    def _body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0, "seed": 0, **self.fields, **body}

    @contextmanager
    def _open(self, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        """An answer to read; what goes wrong meanwhile is a ServerError too."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        if self.key:  # not for where a redirect leads
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            with suppress(OSError, http.client.HTTPException):  # the status says enough
                raise RefusedError(error.code, _reason(error.read())) from None
            raise RefusedError(error.code, "no reason came") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerError(f"{self.url}{path}: {reason or type(error).__name__}") from None


def connect(url: str, timeout: float, fields: dict[str, Any] | None = None) -> Client:
    """The server at `url`, with or without /v1, and the first model that it serves.

    Raises UnusableError: no server there, another one, or one that wants a key.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UnusableError(f"{url.rpartition('@')[2]!r}: want an address such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UnusableError(f"{parts.hostname}: want the address without a user; a key comes from {KEY}")
    key = os.environ.get(KEY, "").strip()
    if not re.fullmatch(r"[!-~]*", key):  # what http.client says of such a header shows the key
        raise UnusableError(f"{KEY} has characters that no HTTP header can carry")
    base = url.rstrip("/").removesuffix("/v1")
    client = Client(url=base, timeout=timeout, key=key)
    try:
        card = client.get_json("/v1/models")["data"][0]
        return Client(url=base, timeout=timeout, key=key, model=card["id"], card=card, fields=fields or {})
    except RefusedError as error:
        if error.status == 401:
            wants = f"refuses the key in {KEY}" if key else f"wants a key, in {KEY}"
            raise UnusableError(f"{base}: HTTP 401: the server {wants}") from None
        raise UnusableError(f"{base}/v1/models: {error}; want the address of a vLLM server") from None
    except (KeyError, IndexError, TypeError):
        raise UnusableError(f"{base}/v1/models: lists no model") from None
    except ServerError as error:
        raise UnusableError(str(error)) from None


def _object(data: str | bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"{path}: the answer is no JSON object: {data[:80]!r}")
    return found


def _reason(data: bytes) -> str:
    """Upstream's message, on one line."""
    text = data.decode(errors="replace")
    try:
        said = json.loads(text)
        said = said.get("error") or said.get("detail") or said
        text = str(said.get("message", said)) if isinstance(said, dict) else str(said)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]
