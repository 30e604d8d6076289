# SPDX-License-Identifier: Apache-2.0
"""GLM-5.2-shaped rank-sliced models on two cards: tensor, pipeline and context parallel, with an MTP layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import checkpoints
from tests.gpu.life import Life, Plan, composed, differences, live
from tests.gpu.test_moe_engine import SAY, TIE, drafting

pytestmark = [
    pytest.mark.skipif(not composed(), reason="vLLM with the overlay is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
]

TENSOR = {"tensor_parallel_size": 2}
# Hopper's sparse attention takes part in context parallelism with this cache and this exchange only.
CONTEXT = {"decode_context_parallel_size": 2, "kv_cache_dtype": "fp8_ds_mla", "dcp_comm_backend": "ag_rs"}
MODES: dict[str, dict[str, Any]] = {
    "tensor": TENSOR | drafting(3),
    "pipeline": {"pipeline_parallel_size": 2},
    "context": TENSOR | drafting(1) | CONTEXT,
}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    """One engine a mode, and one on a single card."""
    folder = tmp_path_factory.mktemp("ranks")
    made: dict[str, Path] = checkpoints.make(["mixed for two ranks"], folder)
    (model,) = made.values()
    modes = {"alone": {}} | MODES
    says = ("say", SAY[1] | {"margins": True})
    plans = {
        mode: Plan(model=model, steps=[says if mode == "alone" else SAY], options=options)
        for mode, options in modes.items()
    }
    return live(plans, folder / "logs")


@pytest.mark.parametrize("mode", MODES)
def test_several_ranks_say_what_one_says(lives, mode):
    same, margins = differences(lives[mode], lives["alone"])
    print(f"{same} tokens the same, differences at margins {margins}")
    assert max(margins, default=0.0) <= (TIE if mode != "context" else 0.5)  # eight bits of cache are coarser
