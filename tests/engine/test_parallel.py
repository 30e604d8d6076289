"""Tensor parallel size 2 on two CPU workers: the same answers as the decoded weights give on one."""

from __future__ import annotations

import pytest
import torch

from tests.engine.scoring import score
from tests.oracle import Oracle
from validate.__main__ import main as validate

IDS = [7, 3, 250, 11, 98, 402, 5, 5, 31, 77]

# name -> arguments of `make-checkpoint dense`
CHECKPOINTS = {
    # One KV head that both ranks hold; a vocabulary that is cut inside a block and padded; siblings stored plain.
    "KV head replicated": "--arch qwen3 --kv-heads 1 --vocab 448 --plain *.up_proj --rates 3,4",
    # Two KV heads of 64: each rank owns half of a block of outputs. Biases, and the MLP in slices that a cut crosses.
    "block of outputs shared": "--arch qwen2 --heads 4 --head-dim 64 --intermediate 768 --slices 3 --bias",
}


@pytest.mark.parametrize("arguments", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_two_ranks_agree_with_the_decoded_weights(engine, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # upstream wants a NUMA node for each worker otherwise
    folder = tmp_path / "checkpoint"
    assert validate(["make-checkpoint", "dense", str(folder), *arguments.split()]) == 0
    logprobs, top = score(engine(folder, tensor_parallel_size=2), IDS)
    expected = Oracle(folder).logprobs(IDS)
    torch.testing.assert_close(logprobs, expected[range(len(IDS) - 1), IDS[1:]], atol=2e-3, rtol=0)
    assert top == expected[:-1].argmax(dim=-1).tolist()
