"""Log probabilities of given tokens, from an engine in this process or from a server."""

from __future__ import annotations

from typing import Any

import torch


def score(llm: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Log probability of each next token of `ids` (float32 [len - 1]), and the likeliest token at each place."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
    places = output.prompt_logprobs[1:]
    next_token = [place[token].logprob for place, token in zip(places, ids[1:], strict=True)]
    top = [next(token for token, entry in place.items() if entry.rank == 1) for place in places]
    return torch.tensor(next_token), top


def score_over_http(post: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The same through /v1/completions; `post(path, body)` returns the decoded answer."""
    answer = post("/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1})
    places = answer["choices"][0]["prompt_logprobs"][1:]
    next_token = [place[str(token)]["logprob"] for place, token in zip(places, ids[1:], strict=True)]
    top = [next(int(token) for token, entry in place.items() if entry["rank"] == 1) for place in places]
    return torch.tensor(next_token), top


def greedy(llm: Any, ids: list[int], tokens: int = 16) -> list[int]:
    """The next `tokens` tokens, greedily."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids)
