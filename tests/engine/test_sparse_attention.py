"""Which cards sparse latent attention runs on: our table against upstream's backends, and the front end's refusals."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from validate.__main__ import main as validate
from vllm.model_executor.layers.quantization.exl3_trellis import sparse_attention
from vllm.model_executor.layers.quantization.exl3_trellis.support import require_supported
from vllm.platforms.interface import DeviceCapability

ELSEWHERE = ("ROCM", "XPU")  # platforms whose backends ask for no compute capability


@pytest.mark.parametrize("major", range(7, 14))
def test_the_table_is_upstream_s(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    kernels = SimpleNamespace(flash_attn_varlen_func=None)  # a CPU has none
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, kernels)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    capability = DeviceCapability(major, 0)
    named = [one for one in AttentionBackendEnum if "MLA_SPARSE" in one.name and not one.name.startswith(ELSEWHERE)]
    backends = [one.get_class() for one in named if "DSV4" not in one.name]  # of models with attention of their own
    able = [one for one in backends if one.is_sparse() and one.supports_compute_capability(capability)]
    assert bool(able) == (major in sparse_attention.MAJORS)
    shares = [one for one in able if one.supports_dcp() and one.get_impl_cls().can_return_lse_for_decode]
    assert bool(shares) == (major in sparse_attention.CONTEXT_PARALLEL_MAJORS)


SPARSE = "GlmMoeDsaForCausalLM"
NO_CARD = f"compute capability 8.9 has no sparse attention for {SPARSE}, want a card of 9.x, 10.x or 12.x"
NO_SHARING = (
    f"decode context parallel size 2: sparse attention of compute capability 12.0, for {SPARSE}, cannot share a "
    "context out; want 1, or cards of 9.x or 10.x"
)
CASES = {  # architecture, compute capability (None: not CUDA), decode context parallel size -> the refusal
    (SPARSE, (8, 9), 1): NO_CARD,
    (SPARSE, (8, 9), 2): NO_CARD,
    (SPARSE, (12, 0), 1): None,
    (SPARSE, (12, 0), 2): NO_SHARING,
    (SPARSE, (9, 0), 2): None,
    (SPARSE, None, 2): None,
    ("Qwen3ForCausalLM", (12, 0), 2): None,
    ("Qwen3ForCausalLM", (8, 9), 1): None,
}


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> object:
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("sparse") / "checkpoint"
    assert validate(["make-checkpoint", "dense", str(folder)]) == 0
    return EngineArgs(model=str(folder), max_model_len=256).create_engine_config()


@pytest.mark.parametrize("case, message", CASES.items(), ids=str)
def test_the_front_end_refuses_what_the_card_cannot(configuration, monkeypatch, case, message):
    import vllm.platforms

    architecture, capability, dcp = case
    monkeypatch.setattr(configuration.model_config.model_arch_config, "architectures", [architecture])
    monkeypatch.setattr(configuration.parallel_config, "decode_context_parallel_size", dcp)
    found = None if capability is None else DeviceCapability(*capability)
    platform = SimpleNamespace(is_cuda=lambda: capability is not None, get_device_capability=lambda: found)
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    if message is None:
        require_supported(configuration, False)
        return
    with pytest.raises(ValueError) as refusal:
        require_supported(configuration, False)
    assert str(refusal.value) == f"not supported with EXL3: {message}"
