"""The check that providers of routed experts pass before they serve, as vLLM runs it: while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.moe_layers import query
from vllm.model_executor.layers.quantization.exl3_trellis.backends import b12x, torch_moe
from vllm.model_executor.layers.quantization.exl3_trellis.expert_check import compare, random_experts

CPU = torch.device("cpu")
LAYER = query([3, 4, 3, 3], 256, 256, 2)


@pytest.fixture(autouse=True)
def loading() -> Iterator[None]:
    """vLLM makes the model's dtype torch's default meanwhile."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


class Noting:
    """The torch provider; notes the dtype of the routing weights it is given."""

    name = "noting"

    def __getattr__(self, verb):
        return getattr(torch_moe, verb)

    def run(self, plan, prepared, arena, x, topk_weights, topk_ids, y):
        self.weights = topk_weights.dtype
        torch_moe.run(plan, prepared, arena, x, topk_weights, topk_ids, y)


def test_routing_weights_have_the_dtype_of_the_contract():
    provider = Noting()
    compare(provider, LAYER, CPU, 0.02)
    assert provider.weights is torch.float32


def test_b12x_gets_scales_of_four_bytes():
    assert b12x.prepare(LAYER, random_experts(LAYER, CPU))["ones"].dtype is torch.float32
