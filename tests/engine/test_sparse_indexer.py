"""Which way the sparse indexer decodes several draft tokens of a request, on each kind of GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# compute capability family -> draft lengths (with the token itself) that its kernels take as they are, of 1 to 6
NATIVE = {90: {1, 2, 4}, 100: {1, 2, 3, 4, 5, 6}, 120: {1, 2, 3, 4, 5, 6}, 80: {1, 2}}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """on_gpu(family): vLLM believes to run on such a GPU, with the kernel library installed."""
    from vllm.utils import deep_gemm
    from vllm.v1.attention.backends.mla import indexer

    def pretend(family: int) -> None:
        platform = SimpleNamespace(
            is_cuda=lambda: True,
            is_rocm=lambda: False,
            is_device_capability_family=lambda asked: asked == family,
        )
        monkeypatch.setattr(indexer, "current_platform", platform)
        monkeypatch.setattr(deep_gemm, "current_platform", platform)
        monkeypatch.setattr(indexer, "has_deep_gemm", lambda: True)

    return pretend


@pytest.mark.parametrize("family", NATIVE)
def test_one_predicate_decides_how_drafts_are_decoded(on_gpu: Any, family: int) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.mla import indexer

    on_gpu(family)
    for rows in range(1, 7):
        native = rows in NATIVE[family]
        config = SimpleNamespace(
            num_speculative_tokens=rows - 1, speculative_config=SimpleNamespace(enable_adaptive_verification=False)
        )
        # The builder and the step ask these, and graph capture follows: no two may disagree.
        assert indexer._supports_native_decode(rows) is native
        assert indexer._use_flattening(config) is not native
        captured = indexer.DeepseekV32IndexerMetadataBuilder.get_cudagraph_support(config, None)
        uniform_only = native and family != 100  # one kernel of SM100 takes requests of any lengths
        assert (captured is AttentionCGSupport.UNIFORM_BATCH) is uniform_only


@pytest.mark.parametrize("rows", range(1, 7))
def test_kernel_library_takes_what_the_predicate_promises(on_gpu: Any, rows: int) -> None:
    from vllm.utils.deep_gemm import native_next_n_supported
    from vllm.v1.attention.backends.mla.indexer import _supports_native_decode

    for family in (90, 100, 120):
        on_gpu(family)
        assert _supports_native_decode(rows) is native_next_n_supported(rows)


def test_query_offsets_come_back_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(flash_attn_varlen_func=None)  # a CPU has none
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, kernels)
    from vllm.v1.attention.backends.mla.flashattn_mla_sparse import FlashAttnMLASparseImpl

    attention = object.__new__(FlashAttnMLASparseImpl)
    offsets = torch.full((9,), 1 << 30, dtype=torch.int32)  # as after sleeping at level 2
    attention.cu_seqlens_q_buffer = offsets
    attention.process_weights_after_loading(torch.bfloat16)
    assert attention.cu_seqlens_q_buffer is offsets
    assert offsets.tolist() == list(range(9))
