"""Routed experts in windows of rows through the whole engine: planned, warmed, run, reloaded, with the same answers.

The planning, the door and the engine are the real ones; the provider computes with the torch provider and records what
it was asked.  It comes in as vLLM lets anyone bring a quantization config: by registering one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Module

from tests.engine.scoring import greedy
from tests.engine.test_mtp import PROMPTS, TOKENS, continue_prompts, draft_of, spoil, stamped, target_of
from tests.exl3_trellis.planned_experts import SPEC
from tests.exl3_trellis.recording import Recording, windows_of
from tests.oracle import Oracle
from validate.__main__ import main as validate
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.exl3 import EXL3Config
from vllm.model_executor.layers.quantization.exl3_trellis import moe_method
from vllm.model_executor.layers.quantization.exl3_trellis.moe_method import EXL3MoEMethod
from vllm.model_executor.layers.quantization.exl3_trellis.scratch import Model, Owner

QWEN = "--family qwen3_moe --layers 2 --first-dense 0 --layout per_expert --rates 3,4 --tp 2 --seed 3"
GLM = "--family glm4_moe --layers 2 --drafts 1 --agreeing --layout shared_h --rates 3,4 --tp 2 --seed 3"
LIMITS = {"TRELLIS_MIN_M": 2, "TRELLIS_MAX_M": 4, "PREFILL_CAPACITY": 7, "PREFILL_CHUNK": 3, "TRELLIS_BLOCK_M": 16}


class RecordedConfig(EXL3Config):
    """EXL3 whose routed experts are run by `plans`, and by `parity` where no plan takes the rows."""

    plans: Recording
    parity: Recording

    @staticmethod
    def moe_providers() -> tuple[Any, ...]:
        return RecordedConfig.plans, RecordedConfig.parity


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordedConfig]]:
    """The config that every EXL3 checkpoint gets for the time of a test."""
    RecordedConfig.plans, RecordedConfig.parity = Recording(), Recording(name="torch", capturable=False)
    quantization.register_quantization_config("exl3")(RecordedConfig)
    for name, value in LIMITS.items():
        monkeypatch.setenv(f"VLLM_EXL3_{name}", str(value))
    yield RecordedConfig
    del quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG["exl3"]


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    """make(arguments) -> folder of a new mixture-of-experts checkpoint."""

    def write(arguments: str) -> Path:
        folder = tmp_path / "checkpoint"
        assert validate(["make-checkpoint", "moe", str(folder), *arguments.split()]) == 0
        return folder

    return write


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_windows_change_no_answer(engine, make, recorded, caplog_vllm, eager):
    folder = make(QWEN)
    llm = engine(folder, enforce_eager=eager)
    if eager:  # then a CPU's engine, unlike a GPU's, makes no run before the first request
        greedy(llm, PROMPTS[2], 1)
    # All plans of both layers are warm, and every kind of layer was checked once.
    assert set(windows_of(recorded.plans.warmed)) == {"decode", "prefill"}
    assert set(windows_of(recorded.parity.warmed)) == {"parity"}
    assert len(recorded.plans.checked) == len(recorded.parity.checked) == 1
    lines = [line for line in caplog_vllm.messages if line.startswith("EXL3 experts of the target")]
    assert [line.split(",")[1].split(":")[0] for line in lines] == [" decode", " prefill", " parity"]
    assert "2 layers in float32; 2 to 4 rows, 16 a block" in lines[0]
    oracle = Oracle(folder)
    for ids, expected in (
        (PROMPTS[0], [("prefill", 7), ("decode", 3)]),  # ten rows, capacity seven
        (PROMPTS[1], [("decode", 4)]),
        (PROMPTS[2], []),
    ):
        recorded.plans.ran(), recorded.parity.ran()
        assert greedy(llm, ids, 6) == oracle.greedy(ids, 6)
        calls = recorded.plans.ran()
        assert calls[: 2 * len(expected)] == expected * 2  # of two layers
        assert set(recorded.parity.ran()) == {("parity", 1)}  # each further token alone
        assert calls[2 * len(expected) :] == []


def test_kill_switch_leaves_long_batches_to_the_parity_path(engine, make, recorded, monkeypatch):
    monkeypatch.setenv("VLLM_EXL3_PREFILL_TRELLIS", "0")
    folder = make(QWEN)
    llm = engine(folder)
    assert set(windows_of(recorded.plans.planned)) == {"decode"}
    recorded.plans.ran(), recorded.parity.ran()
    assert greedy(llm, PROMPTS[0], 4) == Oracle(folder).greedy(PROMPTS[0], 4)
    assert recorded.plans.ran() == []
    assert recorded.parity.ran()[:2] == [("parity", 10)] * 2


def test_target_and_draft_plan_apart_and_survive_a_reload(engine, make, recorded):
    folder = make(GLM)
    expected = [Oracle(folder).greedy(ids, TOKENS) for ids in PROMPTS]
    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    llm = engine(folder, speculative_config=speculation, disable_log_stats=False, enable_prefix_caching=False)
    said, taken = continue_prompts(llm)
    assert said == expected
    assert taken > len(PROMPTS) * TOKENS // 10
    models = (target_of(llm), draft_of(llm))
    experts = [[layer.exl3_moe for layer in model.modules() if hasattr(layer, "exl3_moe")] for model in models]
    owners = [{owner for name, owner in stamped(model).items() if name.endswith("experts")} for model in models]
    assert [owner.role for role in owners for owner in role] == ["target", "draft"]
    arenas = [{it.startup.arena(it.owner).data_ptr() for it in each} for each in experts]
    assert [len(each) for each in arenas] == [1, 1]
    assert arenas[0].isdisjoint(arenas[1])
    assert {call.arena for call in recorded.plans.calls + recorded.parity.calls} == arenas[0] | arenas[1]
    plans = [plans_of(model) for model in models]
    assert [len(each) for each in plans] == [3, 3]  # decode, prefill and parity
    warmed = len(recorded.plans.warmed)
    assert warmed == 4
    assert {call.warmed for call in recorded.plans.calls} == {warmed}  # the draft's, too, before the target first ran
    assert {name for name, _ in recorded.plans.ran()} == {"decode", "prefill"}
    spoil(draft_of(llm))
    llm.collective_rpc("reload_weights")
    recorded.plans.ran()
    assert continue_prompts(llm) == (said, taken)
    assert len(recorded.plans.warmed) == warmed
    assert [plans_of(model) for model in models] == plans  # the same objects, which hold what a library compiled
    assert {call.arena for call in recorded.plans.calls} == arenas[0] | arenas[1]


def plans_of(model: Module) -> set[int]:
    """The identities of the plans of a model's routed experts."""
    experts = [layer.exl3_moe for layer in model.modules() if hasattr(layer, "exl3_moe")]
    return {id(route.plan) for each in experts for route in each.routes.values()}


def test_providers_that_view_the_slabs_share_them(engine, make, recorded):
    """As kernels do on a GPU: what was loaded is what both run, and what a reload writes to."""
    recorded.plans.views = recorded.parity.views = True
    folder = make(QWEN)
    llm = engine(folder, enable_prefix_caching=False)
    (layer, _) = [each for each in target_of(llm).modules() if hasattr(each, "exl3_moe")]
    routes = layer.exl3_moe.routes
    assert routes["parity"].backend is not routes["prefill"].backend
    held = {name: param.data_ptr() for name, param in layer.named_parameters()}
    assert len(held) == len(set(held.values())) == 2 * 6  # of two slices
    assert {param for route in routes.values() for param in route.names.values()} == set(held)
    said = Oracle(folder).greedy(PROMPTS[1], 3)
    assert greedy(llm, PROMPTS[1], 3) == said
    for param in layer.parameters():
        param.data.zero_()
    assert greedy(llm, PROMPTS[1], 3) != said
    llm.collective_rpc("reload_weights")
    assert greedy(llm, PROMPTS[1], 3) == said
    assert {name: param.data_ptr() for name, param in layer.named_parameters()} == held


def test_a_provider_that_disagrees_stops_the_start_by_name(engine, make, recorded):
    recorded.plans.disagrees = True
    with pytest.raises(Exception, match="recording: .* experts .* disagrees with the reference"):
        greedy(engine(make(QWEN)), PROMPTS[2], 1)  # a GPU's engine does not get that far


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("refusing", "message"),
    [
        (("plans", "parity"), "no EXL3 kernel for .* experts .*: recording: too old; torch: too old"),
        (("parity",), "no EXL3 kernel for the parity rows of routed experts: torch: too old"),
    ],
)
def test_that_nobody_can_run_them_is_said_before_a_weight_is_read(
    engine, make, recorded, read, refusing, message, load_format
):
    for name in refusing:
        getattr(recorded, name).refusal = "too old"
    with pytest.raises(Exception, match=message):
        engine(make(QWEN), load_format=load_format)
    assert not read
    assert not recorded.plans.prepared


def test_providers_are_asked_once_whatever_is_reloaded(engine, make, recorded, read):
    llm = engine(make(QWEN))
    assert read  # by the same counter as above
    asked = recorded.plans.asked
    assert asked == 2  # layers
    llm.collective_rpc("reload_weights")
    assert recorded.plans.prepared == 4
    assert recorded.plans.asked == asked


def test_a_layer_on_the_meta_device_chooses_when_it_has_another(recorded, monkeypatch):
    monkeypatch.setattr(moe_method, "capacity_of", lambda config: 24)
    parallel = SimpleNamespace(use_ep=False, tp_size=1, tp_rank=0)
    moe = SimpleNamespace(moe_parallel_config=parallel, has_bias=False, is_act_and_mul=True, swiglu_limit=None)
    routed = {"activation": MoEActivation.SILU, "top_k": 2, "apply_router_weight_on_input": False, "swiglu_limit": None}
    layer, method = Module(), EXL3MoEMethod(moe, SPEC, "experts", print, dummy=True, providers=recorded.moe_providers)
    layer.layer_name, layer.moe_config = "experts", moe
    layer.exl3_owner = Owner(model=Model(), role="target", device="cpu", capacity=24)
    for name, value in routed.items():
        setattr(layer, name, value)
    with torch.device("meta"):
        method.create_weights(layer, SPEC.count, SPEC.hidden, 2 * SPEC.width, torch.float32)
    assert recorded.plans.asked == 0
    for name, param in list(layer.named_parameters()):  # as vLLM puts tensors in their place
        real = torch.nn.Parameter(torch.empty_like(param, device="cpu"), requires_grad=False)
        real.__dict__.update(param.__dict__)
        layer.register_parameter(name, real)
    method.process_weights_after_loading(layer)
    assert recorded.plans.asked == 1
    assert layer.exl3_moe.routes["decode"].backend is recorded.plans


def test_path_of_every_layer_is_logged(engine, make, recorded, caplog_vllm, monkeypatch):
    monkeypatch.setenv("VLLM_EXL3_LOG_PATH_SELECTION", "1")
    engine(make(QWEN), dtype="bfloat16")
    paths = "decode by recording, prefill by recording, parity by torch"
    for layer in range(2):
        start = f"model.layers.{layer}.mlp.experts (target): {paths}: "
        assert sum(line.startswith(start) for line in caplog_vllm.messages) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PREFILL_CAPACITY": "8192"}, "VLLM_EXL3_PREFILL_CAPACITY=8192: want at most max_num_batched_tokens=256"),
        (
            {"TRELLIS_MIN_M": "200"},
            "VLLM_EXL3_TRELLIS_MIN_M=200: want .*VLLM_EXL3_PREFILL_CHUNK=128: want at least 199",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_built(make, monkeypatch, variables, message):
    from vllm.engine.arg_utils import EngineArgs

    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_EXL3_{name}", value)
    with pytest.raises(Exception, match=message):
        EngineArgs(model=str(make(QWEN)), max_model_len=256, max_num_batched_tokens=256).create_engine_config()


@pytest.mark.parametrize("remembering", [True, False])
def test_memory_remembered_for_the_next_start_is_that_of_the_same_arenas(make, monkeypatch, remembering):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.startup_plan import compute_plan_fingerprint

    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", str(int(remembering)))
    folder = make(QWEN)
    found = set()
    for capacity in ("128", "256", "256"):
        monkeypatch.setenv("VLLM_EXL3_PREFILL_CAPACITY", capacity)
        config = EngineArgs(model=str(folder), max_model_len=256, max_num_batched_tokens=256).create_engine_config()
        found.add(compute_plan_fingerprint(config, 0, 1))
    assert len(found) == (2 if remembering else 1)  # the same configuration is part of the compile cache's key
