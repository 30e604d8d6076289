# SPDX-License-Identifier: Apache-2.0
"""Acceptance, accepted length and times per token from figures that can be checked by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from validate import decode, metrics
from validate.prose import Ruler, sentences

LABELS = 'engine="{engine}",model_name="m, or position=\\"7\\""'


def published(drafts: int, drafted: int, accepted: int, places: tuple[int, ...], engines: int = 2) -> str:
    """As /metrics says it, shared evenly among engines."""
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts.", "vllm:num_requests_running{} 3.0"]
    for engine in range(engines):
        labels = LABELS.format(engine=engine)
        for name, value in (("drafts", drafts), ("draft_tokens", drafted), ("accepted_tokens", accepted)):
            lines += [f"vllm:spec_decode_num_{name}_total{{{labels}}} {value / engines:e}"]
            lines += [f"vllm:spec_decode_num_{name}_created{{{labels}}} 1.7e+09"]
        for place, value in enumerate(places):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{labels},position="{place}"}} {value / engines}')
    return "\n".join(lines)


def test_drafting_is_the_difference_of_two_readings():
    before = metrics.read(published(10, 30, 4, (4, 0, 0)))
    after = metrics.read(published(110, 330, 214, (94, 70, 50)))
    assert metrics.drafting(before, after) == {
        "drafts": 100,
        "drafted_tokens": 300,
        "accepted_tokens": 210,
        "acceptance": 0.7,
        "accepted_length": 3.1,
        "acceptance_by_position": [0.9, 0.7, 0.5],
    }


@pytest.mark.parametrize("text", ["", published(0, 0, 0, ()), published(10, 30, 4, (4, 0, 0))])
def test_no_drafts_have_no_acceptance(text):
    counts = metrics.read(text)
    assert metrics.drafting(counts, counts) is None


def test_a_step_shares_its_time_among_its_tokens():
    timing = decode.timed([(0.4, 0), (0.5, 1), (0.8, 4), (0.8, 4), (1.0, 5)])
    assert timing.first == 0.5
    assert timing.each == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert timing.tokens == 5


def test_percentiles_are_of_the_slow_end():
    times = [float(n) for n in range(100, 0, -1)]
    assert decode.percentile(times, 0.95) == 95
    assert decode.percentile([1.0, 9.0], 0.95) == 9


ROW = {"first_token_seconds": 0.1, "token_ms_mean": 1.0, "token_ms_p95": 2.0, "tokens_per_second": 3.0}


@pytest.mark.parametrize(
    ("received", "generated", "right"), [(64, 64, True), (64, 0, True), (60, 60, False), (64, 96, False)]
)
def test_too_few_tokens_and_others_tokens_fail(received, generated, right):
    finding = decode.judge(ROW | {"drafting": None}, received, 64, generated)
    assert finding.right is right
    assert ("the server generated 96 meanwhile" in finding.found) is (generated == 96)


def test_counters_that_lag_are_waited_for():
    texts = iter(f"vllm:generation_tokens_total{{}} {tokens}.0" for tokens in (10, 12, 20))
    client = SimpleNamespace(get=lambda path: next(texts))
    after = decode.settled(client, metrics.Counts({metrics.GENERATED: 4}), 16)
    assert after[metrics.GENERATED] == 20


@pytest.mark.parametrize("tokens_a_word", [1.3, 5.4])
def test_a_ruler_hits_a_size_after_small_prompts(tokens_a_word):
    ruler = Ruler()
    for words in (10, 40, 1000):
        ruler.learn(words, round(37 + words * tokens_a_word))
    for tokens in (60, 900, 100_000):
        assert 37 + ruler.words(tokens) * tokens_a_word == pytest.approx(tokens, rel=0.01, abs=tokens_a_word)


def test_more_words_only_add():
    assert len(" ".join(sentences(100)).split()) == 100
    assert " ".join(sentences(1000)).startswith(" ".join(sentences(100)))
