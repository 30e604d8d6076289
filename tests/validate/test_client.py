# SPDX-License-Identifier: Apache-2.0
"""What the HTTP client makes of servers that do not do as they should."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from validate import client, results, smoke
from validate.client import Message, RefusedError, ServerError, UnusableError, connect

SECRET = "sk-not-to-be-seen"
MODELS = json.dumps({"data": [{"id": "m", "root": "m", "max_model_len": 8}]})


@contextmanager
def answering(answers, heard=None, bodies=None):
    """A server with fixed answers: path -> (status, body), or headers too."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if body and bodies is not None:
                bodies.append(json.loads(body))
            status, body, *headers = answers.get(self.path, (404, '{"detail": "Not Found"}'))
            if heard is not None:
                heard.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stream(*deltas, end="data: [DONE]\n\n", **choice):
    chunks = [{"choices": [{"delta": delta, "finish_reason": None, **choice}]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


UNUSABLE = {
    "elsewhere": ({}, "{url}/v1/models: HTTP 404: Not Found; want the address of a vLLM server"),
    "key": (
        {"/v1/models": (401, '{"error": "Unauthorized"}')}, "{url}: HTTP 401: the server wants a key, in VLLM_API_KEY"
    ),
    "web page": ({"/v1/models": (200, "<html>")}, "/v1/models: the answer is no JSON object: '<html>'"),
    "no model": ({"/v1/models": (200, '{"data": []}')}, "{url}/v1/models: lists no model"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_server_is_one_line_and_exit_code_2(name, capsys, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    answers, said = UNUSABLE[name]
    with answering(answers) as url:
        assert smoke.main([url]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1] == "validate: " + said.format(url=url)
    assert len(err) == 2  # and what it was about to do


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "'localhost:8000': want an address such as http://127.0.0.1:8000"),
        (f"http://me:{SECRET}@localhost", "localhost: want the address without a user; a key comes from VLLM_API_KEY"),
        (f"me:{SECRET}@localhost", "'localhost': want an address such as http://127.0.0.1:8000"),
    ],
)
def test_addresses_that_are_none(url, said):
    with pytest.raises(UnusableError) as error:
        connect(url, 1)
    assert str(error.value) == said


def test_nobody_listens(capsys):
    with answering({}) as url:
        pass
    assert smoke.main([url]) == 2
    assert "Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("secret", [SECRET, f"{SECRET}\nX: y", f"{SECRET}é"])
def test_the_key_is_sent_and_never_shown(secret, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("VLLM_API_KEY", secret)
    heard = []
    with answering({"/v1/models": (200, MODELS)}, heard) as url:
        code = smoke.main([url, "--only", "chat", "--out", str(tmp_path / "r.json")])
        if secret == SECRET:
            assert SECRET not in repr(connect(url, 1))
    shown = "".join([*capsys.readouterr(), *(path.read_text() for path in tmp_path.iterdir())])
    assert SECRET not in shown
    assert code == (1 if secret == SECRET else 2)
    assert {key for _, key in heard} == ({f"Bearer {SECRET}"} if secret == SECRET else set())


def test_a_redirect_does_not_get_the_key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    heard = []
    with (
        answering({"/v1/models": (200, MODELS)}, heard) as other,
        answering({"/v1/models": (302, "", ("Location", f"{other}/v1/models"))}) as url,
    ):
        connect(url, 1)
    assert heard == [("/v1/models", None)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, stream({"content": "a"}, end="")), "/v1/chat/completions: the stream ended without [DONE]"),
        (
            (200, stream({"content": "a"}, end='data: {"error": {"message": "engine died"}}\n\n')),
            "/v1/chat/completions: in the stream: engine died",
        ),
        ((500, "Internal Server Error"), "HTTP 500: Internal Server Error"),
    ],
)
def test_a_stream_that_breaks_off_is_no_answer(answer, said):
    with answering({"/v1/models": (200, MODELS), client.CHAT: answer}) as url, pytest.raises(ServerError) as error:
        connect(url, 1).chat_streamed(messages=[])
    assert str(error.value) == said


def test_deltas_are_joined():
    pieces = [
        {"role": "assistant", "content": ""},
        {"reasoning": "Let me"},
        {"reasoning": " look."},
        {"content": "Look"},
        {"content": "ing up"},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    text = stream(*pieces, end="") + stream({}, finish_reason="tool_calls")
    with answering({"/v1/models": (200, MODELS), client.CHAT: (200, text)}) as url:
        said = connect(url, 1).chat_streamed(messages=[])
    calls = (("f", '{"x": 1}'), ("g", ""))
    assert said == Message(reasoning="Let me look.", content="Looking up", calls=calls, end="tool_calls")
    assert said.ids == ("a", "b")
    assert said.first > 0


def raising(error):
    def step():
        raise error

    return step


@pytest.mark.parametrize(
    ("steps", "states", "code"),
    [
        ([lambda: results.Finding(True, "a", "a")], ["ok"], 0),
        ([lambda: results.Finding(True, "a", "a"), lambda: results.Finding(False, "b", "a")], ["ok", "FAILED"], 1),
        ([lambda: results.Finding(True, "a", "a"), raising(RefusedError(400, "no parser"))], ["ok", "skipped"], 1),
        ([raising(RefusedError(500, "no"))], ["FAILED"], 1),
        ([raising(ServerError("connection reset"))], ["FAILED"], 1),
        ([], [], 1),
    ],
)
def test_only_checks_that_passed_have_passed(steps, states, code, tmp_path, capsys):
    done = results.Results("smoke", len(steps), {"made": "now"}, tmp_path / "sub" / "r.json")
    for number, step in enumerate(steps):
        done.check(f"step {number}", step)
    assert done.finish() == code
    written = json.loads((tmp_path / "sub" / "r.json").read_text())
    assert [check["state"] for check in written["checks"]] == states
    assert written["receipt"] == {"made": "now"}
    out, err = capsys.readouterr()
    for number, state in enumerate(states):
        assert f"\n{state:8}step {number}: " in f"\n{out}"
        assert f"[{number + 1}/{len(steps)}] step {number}\n" in err


def test_a_template_is_told_and_answers_are_bounded():
    bodies = []
    with answering({"/v1/models": (200, MODELS), client.CHAT: (200, "{}")}, bodies=bodies) as url:
        smoke.main([url, "--only", "chat", "--template", '{"enable_thinking": false}', "--max-tokens", "7"])
    assert [body["chat_template_kwargs"] for body in bodies] == [{"enable_thinking": False}] * len(bodies)
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in bodies} == {("m", 7, 0)}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"city": "Rome", "days": 3}', True),
        ('{"city": "Rome", "days": "3"}', False),
        ('{"city": "Rome", "days": true}', False),
        ('{"city": "Rome"}', False),
        ('{"city": "Rome", "days": 3, "why": ""}', False),
        ('```{"city": "Rome", "days": 3}```', False),
        ("[]", False),
        ("", False),
    ],
)
def test_schemas_are_kept_or_not(text, right):
    assert smoke.judge_schema(Message(content=text)).right is right


CALLED = ("get_weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([CALLED], True),
        ([CALLED, CALLED], True),
        ([], False),
        ([CALLED, ("get_time", CALLED[1])], False),
        ([("get_weather", '{"city": ')], False),
        ([("get_weather", "{}")], False),
    ],
)
def test_calls_are_of_the_tool_and_its_parameters(calls, right):
    assert smoke.judge_call(Message(calls=tuple(calls))).right is right


@pytest.mark.parametrize(("text", "number"), [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("300", 300)])
def test_lengths(text, number):
    assert results.count(text) == number
