"""SmolLM2-135M-Instruct as exllamav3 converted it, served over HTTP, against what exllamav3 itself computed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.scoring import score_over_http
from tests.engine.server import serve

# dtype -> (largest mean |difference of log probabilities| of any text, smallest share of equal top tokens)
LIMITS = {"float32": (0.01, 0.99), "bfloat16": (0.08, 0.95)}


@pytest.mark.parametrize("dtype", LIMITS)
def test_server_agrees_with_exllamav3(smollm2, tmp_path, dtype):
    reference = load_file(smollm2 / "exllamav3_reference.safetensors")
    texts = [key.removeprefix("ids") for key in reference if key.startswith("ids")]
    worst, equal, places = 0.0, 0, 0
    with serve(smollm2, tmp_path, "--dtype", dtype, "--max-model-len", "2048") as server:
        for text in texts:
            logprobs, top = score_over_http(server.post, reference[f"ids{text}"].flatten().tolist())
            wanted = reference[f"logprob_next{text}"].flatten()[: len(logprobs)]
            worst = max(worst, (logprobs - wanted).abs().mean().item())
            equal += int((torch.tensor(top) == reference[f"top1_{text}"].flatten()[: len(top)]).sum())
            places += len(top)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": str(smollm2), "messages": question, "temperature": 0, "max_tokens": 16}
        answer = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    print(f"{dtype}: worst mean |Δ logprob| {worst:.4f}, top tokens equal {equal}/{places}, says {answer!r}")
    most, share = LIMITS[dtype]
    assert worst <= most
    assert equal >= share * places
    assert "Paris" in answer
