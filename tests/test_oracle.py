# SPDX-License-Identifier: Apache-2.0
"""The oracle that engine tests believe: against exllamav3's results, a second implementation's, and the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import oracle
from validate.__main__ import main
from vllm.model_executor.layers.quantization.exl3_trellis import reference

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
GOLDEN = load_file(Path(__file__).parent / "data" / "exl3_golden_vectors.safetensors")
LINEARS = sorted(name.removesuffix(".trellis") for name in GOLDEN if name.endswith(".trellis"))


@pytest.mark.parametrize("key", LINEARS)
def test_decodes_bit_for_bit(key):
    weight = oracle.rotated_weight(GOLDEN[f"{key}.trellis"].numpy(), key.split(".")[0])
    assert np.array_equal(weight.view(np.int16), GOLDEN[f"{key}.w_rotated"].numpy().view(np.int16))


@pytest.mark.parametrize("key", LINEARS)
def test_agrees_with_the_reference(key):
    tensors = [GOLDEN[f"{key}.{kind}"] for kind in ("trellis", "suh", "svh")]
    mine = torch.from_numpy(oracle.dense_weight(*(tensor.numpy() for tensor in tensors), key.split(".")[0]))
    theirs = reference.dense_weight(*tensors, key.split(".")[0])
    assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-6


def test_signs():
    packed = torch.randint(-(1 << 15), 1 << 15, (24,), dtype=torch.int16)
    assert np.array_equal(oracle.signs_of(packed.numpy()), reference.unpack_signs(packed).float().numpy())


@pytest.mark.parametrize(
    "name, truth, bound",
    [
        ("glm4moe-rank-sliced-mixed-tp2", "truth", 1e-5),
        # exllamav3 rounds activations to fp16: this far from float32, worst of three texts.
        pytest.param("smollm2-135m-instruct-exl3-3.0bpw", "exllamav3_reference", 0.006, marks=pytest.mark.slow),
    ],
)
def test_evaluates_as_others_do(name, truth, bound):
    if not (DATA / name).is_dir():
        pytest.skip(f"{name} is not part of the project")
    results = load_file(DATA / name / f"{truth}.safetensors")
    model = oracle.Oracle(DATA / name)
    for number in range(sum(key.startswith("ids") for key in results)):
        ids = results[f"ids{number}"][0].tolist()
        error = (model.next_logprobs(ids) - results[f"logprob_next{number}"]).abs().mean()
        assert float(error) < bound
        assert torch.equal(model.logprobs(ids).argmax(-1).int(), results[f"top1_{number}"])


def test_greedy_follows_the_logprobs(tmp_path):
    assert main(["make-checkpoint", "dense", str(tmp_path / "made")]) == 0
    model = oracle.Oracle(tmp_path / "made")
    said = model.greedy([5, 9, 3], 4)
    logprobs = model.logprobs([5, 9, 3, *said])
    assert logprobs[2:-1].argmax(-1).tolist() == said
