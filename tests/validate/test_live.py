# SPDX-License-Identifier: Apache-2.0
"""The commands against a real server: smoke, needle, decode and receipt, as a user calls them."""

from __future__ import annotations

import json
import re
from itertools import count

import pytest

from tests.validate.live import CODE, TOOLS, served
from validate import decode, needle, plot, receipt, smoke
from validate.client import connect

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A server with drafts, tools, reasoning and a key, and its checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "sk-live")  # for the server, and for the commands
        with served(tmp_path_factory.mktemp("live"), *TOOLS) as found:
            yield found


@pytest.fixture
def knows(monkeypatch):
    """Needles have the number that the model says anyway."""
    monkeypatch.setattr(needle, "fresh_code", lambda: CODE)


def states(out: str) -> dict[str, str]:
    """name -> state, from the lines that were printed."""
    return {name: state for state, name in re.findall(r"^(ok|FAILED|skipped) +([^:]+):", out, re.MULTILINE)}


def test_smoke_passes_everything(live, tmp_path, capsys):
    server, model = live
    arguments = ["--max-tokens", "64", "--model", str(model), "--out", str(tmp_path / "s.json")]
    code = smoke.main([f"{server.url}/v1/", *arguments])
    out = capsys.readouterr().out
    wanted = [check for name in smoke.KINDS for check in (name, f"{name}, streamed")] + ["round trip"]
    assert states(out) == dict.fromkeys(wanted, "ok"), out
    assert code == 0
    assert f"{len(wanted)} ok, 0 FAILED, 0 skipped" in out
    written = json.loads((tmp_path / "s.json").read_text())
    assert [check["name"] for check in written["checks"]] == wanted
    assert written["receipt"]["checkpoint"] == receipt.checkpoint(model)
    assert not (tmp_path / "s.png").exists()


@pytest.mark.parametrize(("key", "wants"), [("", "wants a key, in"), ("sk-other", "refuses the key in")])
def test_the_server_wants_its_key(live, monkeypatch, capsys, key, wants):
    monkeypatch.setenv("VLLM_API_KEY", key)
    for command in (smoke, needle, decode, receipt):
        assert command.main([live[0].url]) == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"HTTP 401: the server {wants} VLLM_API_KEY")


def test_smoke_reads_what_the_server_says(live, monkeypatch):
    """Reasoning, content, calls and counts, whole and streamed; the prompt has blocks enough to be cached."""
    monkeypatch.setitem(smoke.KINDS, "chat", smoke.KINDS["chat"]._replace(asked="What? " * 60))
    session = smoke.Smoke(connect(live[0].url, 60, {"max_tokens": 64}))
    for name in ("chat", "tools auto"):
        whole, streamed = session.answer(name), session.client.chat_streamed(**session.body(name))
        assert whole == streamed
        assert not streamed.usage["prompt_tokens_details"]["cached_tokens"]  # the same prompt again
        assert whole.usage["completion_tokens"] == streamed.usage["completion_tokens"] > 8
        assert whole.reasoning.split() == (["Hm", "well"] if name == "chat" else ["Look", "it", "up"])
        assert [json.loads(call[1]) for call in whole.calls] == ([] if name == "chat" else [{"city": "Paris"}])


def test_smoke_fails_what_it_must(live, capsys, monkeypatch):
    """An answer without what the tool said, a schema that is not kept, a call with other arguments."""
    monkeypatch.setattr(smoke, "ANSWER", "77")
    monkeypatch.setitem(smoke.PARAMETERS, "required", ["city", "country"])
    monkeypatch.setitem(smoke.KINDS, "schema", smoke.KINDS["schema"]._replace(fields={}))
    code = smoke.main([live[0].url, "--max-tokens", "64", "--only", "tools auto,schema,round trip"])
    assert states(capsys.readouterr().out) == {
        "tools auto": "FAILED", "tools auto, streamed": "ok", "schema": "FAILED", "schema, streamed": "ok",
        "round trip": "FAILED",
    }  # fmt: skip
    assert code == 1


def test_smoke_sees_a_stream_that_says_something_else(live, capsys, monkeypatch):
    bodies = count()
    honest = smoke.Smoke.body
    monkeypatch.setattr(
        smoke.Smoke, "body", lambda self, name: honest(self, name) | ({"max_tokens": 6} if next(bodies) else {})
    )
    assert smoke.main([live[0].url, "--max-tokens", "64", "--only", "tools auto"]) == 1
    out = capsys.readouterr().out
    assert states(out) == {"tools auto": "ok", "tools auto, streamed": "FAILED"}
    assert """want calls 'get_weather({"city": "Paris"})'; end 'tool_calls'""" in out


def test_smoke_skips_what_the_server_refuses(live, capsys, monkeypatch):
    """Here a tool choice for a tool that is not offered; upstream says so itself."""
    fields = {**smoke.KINDS["tools named"].fields, "tool_choice": {"type": "function", "function": {"name": "other"}}}
    monkeypatch.setitem(smoke.KINDS, "tools named", smoke.KINDS["tools named"]._replace(fields=fields))
    assert smoke.main([live[0].url, "--max-tokens", "64", "--only", "chat,tools named"]) == 1
    out = capsys.readouterr().out
    assert states(out) == {
        "chat": "ok", "chat, streamed": "ok", "tools named": "skipped", "tools named, streamed": "skipped"
    }  # fmt: skip
    assert "2 ok, 0 FAILED, 2 skipped" in out
    assert re.search(r"skipped tools named: HTTP 400: .*tool", out)


def test_needle_measures_and_finds(live, knows, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--max-tokens", "40", "--lengths", "500,900", "--depths", "0,0.5,1", "--out", str(tmp_path / "n.json")]
    assert needle.main([live[0].url, *arguments]) == 0
    rows = json.loads((tmp_path / "n.json").read_text())["rows"]
    assert [(row["tokens"], row["depth"]) for row in rows] == [(n, d) for n in (500, 900) for d in (0, 0.5, 1)]
    for row in rows:
        assert row["found"] and row["state"] == "ok" and row["first_token_seconds"] > 0
        assert abs(row["prompt_tokens"] - row["tokens"]) <= 0.01 * row["tokens"]
        assert row["cached_tokens"] <= 16  # a block that the chat template fills
    assert (tmp_path / "n.png").stat().st_size > 1000
    assert capsys.readouterr().err.count("tokens, depth") == 6


def test_needle_fails_what_is_not_found_and_skips_what_does_not_fit(live, capsys):
    arguments = ["--max-tokens", "40", "--lengths", "500,5k", "--depths", "0.5"]
    assert needle.main([live[0].url, *arguments]) == 1
    out = capsys.readouterr().out
    assert states(out) == {"500 tokens, depth 0.5": "FAILED", "5000 tokens, depth 0.5": "skipped"}
    assert "maximum context length" in out


def test_needle_sees_the_cache_and_a_loop(live, knows, capsys, monkeypatch):
    """The beginning is what keeps the cache away; an answer that goes on for ever is none."""
    monkeypatch.setattr(needle, "beginning", lambda: "Notes.\n")
    assert needle.main([live[0].url, "--max-tokens", "40", "--lengths", "500", "--depths", "0.5,0.5"]) == 1
    assert re.search(r"\d{3} tokens came from the cache", capsys.readouterr().out)
    monkeypatch.undo()
    monkeypatch.setattr(needle, "fresh_code", lambda: CODE)
    said = connect(live[0].url, 60).chat(
        messages=[{"role": "user", "content": "?"}], max_tokens=300, ignore_eos=True, skip_special_tokens=False
    )
    row = {"prompt_tokens": 500, "cached_tokens": None}
    finding = needle.judge(said, CODE, 500, row)
    assert row["found"] and not finding.right
    assert "it repeats itself" in finding.found


def test_decode_counts_tokens_and_drafts(live, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--clients", "1,3", "--tokens", "24", "--words", "20", "--out", str(tmp_path / "d.json")]
    assert decode.main([live[0].url, *arguments]) == 0
    assert states(capsys.readouterr().out) == {"1 client": "ok", "3 clients": "ok"}
    for row in json.loads((tmp_path / "d.json").read_text())["rows"]:
        draft = row["drafting"]
        assert 0 < draft["drafts"] < draft["drafted_tokens"] <= 3 * draft["drafts"]
        assert draft["acceptance"] == round(draft["accepted_tokens"] / draft["drafted_tokens"], 4) > 0.5
        assert draft["accepted_length"] == round(1 + draft["accepted_tokens"] / draft["drafts"], 4)
        assert sum(draft["acceptance_by_position"]) == pytest.approx(draft["accepted_length"] - 1, abs=2e-4)
        # Every token but a request's first is one of a step's own, or a draft's that was accepted.
        tokens = 2 * row["clients"] * 23
        assert tokens <= draft["drafts"] + draft["accepted_tokens"] <= tokens + 3 * 2 * row["clients"]
        assert row["token_ms_p95"] >= row["token_ms_mean"] > 0
        assert row["first_token_seconds"] > 0
    assert (tmp_path / "d.png").stat().st_size > 1000


def test_decode_sees_another_client(live, capsys, monkeypatch):
    honest = decode.ask

    def busy(client, tokens, words):
        client.chat(messages=[{"role": "user", "content": "Hello"}], max_tokens=5)
        return honest(client, tokens, words)

    monkeypatch.setattr(decode, "ask", busy)
    assert decode.main([live[0].url, "--clients", "1", "--tokens", "8", "--words", "5", "--requests", "1"]) == 1
    assert "the server generated 13 meanwhile" in capsys.readouterr().out


def test_a_receipt_names_server_and_checkpoint(live, capsys):
    server, model = live
    assert receipt.main([server.url, "--model", str(model)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["server"]["model"] == {"id": str(model), "root": str(model), "max_model_len": 1024}
    assert made["server"]["version"] == json.loads(server.get("/version"))["version"]
    assert made["same_version"] is True
    assert made["checkpoint"]["weight_files"] == 1


def test_plots_what_was_measured_only(tmp_path, capsys):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"command": "smoke", "rows": []}))
    assert plot.main([str(path)]) == 2
    assert capsys.readouterr().err == f"plot: {path}: results of 'smoke', want those of needle or decode\n"
