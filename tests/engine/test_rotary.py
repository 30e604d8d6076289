"""Latent attention hands the rotary embedding slices of three dimensions, which upstream's CPU kernel gets wrong."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("neox", [False, True])
def test_cpu_rotates_every_head(neox):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    tokens, heads, plain, rotated = 5, 4, 128, 64
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        rope = get_rope(rotated, max_position=64, is_neox_style=neox, rope_parameters=parameters, dtype=torch.float32)
    query = torch.randn(tokens, heads, plain + rotated)[..., plain:]
    key = torch.randn(tokens, 512 + rotated)[:, 512:].unsqueeze(1)
    positions = torch.arange(tokens)
    expected = rope.forward_native(positions, query.clone(), key.clone())
    for got, want in zip(rope.forward_cpu(positions, query, key), expected, strict=True):
        torch.testing.assert_close(got, want)
