# SPDX-License-Identifier: Apache-2.0
"""The counters that a vLLM server publishes at /metrics, and what drafting was worth between two readings of them.

Counters are of the whole server: other clients' requests are in them too.
"""

from __future__ import annotations

import re
from collections import Counter

LINE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
GENERATED = "vllm:generation_tokens"
DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

Counts = Counter[str]


def read(text: str) -> Counts:
    """name, or name/position -> the sum over engines and models; names are without `_total`."""
    counts: Counts = Counter()
    for name, labels, value in LINE.findall(text):
        position = POSITION.search(labels)
        key = name.removesuffix("_total") + (f"/{position[1]}" if position else "")
        if key.partition("/")[0] in (GENERATED, DRAFTS, DRAFTED, ACCEPTED, BY_POSITION):
            counts[key] += round(float(value))
    return counts


def drafting(before: Counts, after: Counts) -> dict[str, object] | None:
    """Acceptance and accepted length between two readings; None where nothing was drafted.

    Acceptance is accepted tokens over drafted ones; accepted length, tokens a step with its own one, is
    1 + accepted tokens over drafts. By position: the share of drafts whose token there was accepted.
    """
    drafts, drafted, accepted = (after[name] - before[name] for name in (DRAFTS, DRAFTED, ACCEPTED))
    if drafts <= 0 or drafted <= 0:
        return None
    places = sorted(int(name.partition("/")[2]) for name in after if name.startswith(f"{BY_POSITION}/"))
    per_place = [after[f"{BY_POSITION}/{place}"] - before[f"{BY_POSITION}/{place}"] for place in places]
    return {
        "drafts": drafts,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance": round(accepted / drafted, 4),
        "accepted_length": round(1 + accepted / drafts, 4),
        "acceptance_by_position": [round(number / drafts, 4) for number in per_place],
    }
