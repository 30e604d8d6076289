"""Dense checkpoints through the whole engine, against a float32 evaluation that shares no code with the overlay."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.scoring import greedy, score
from tests.oracle import Oracle
from validate.__main__ import main as validate

# name -> arguments of `make-checkpoint dense`: one row per shape class of the format.
CHECKPOINTS = {
    "whole rates, every codebook": "--rates 1,2,3,4,5,6,7,8 --codebooks 3inst,mcg,mul1 --layers 2",
    "half rates": "--rates 1.5,2.5,3.5 --codebooks mul1 --head-rate 4",
    "legacy signs": "--signs packed",
    "legacy signs of inputs only": "--signs packed-inputs --arch qwen3",
    "padded on both sides": "--hidden 192 --heads 3 --kv-heads 3 --head-dim 64 --intermediate 320 --vocab 500",
    "bias, padded": "--arch qwen2 --bias --hidden 192 --heads 3 --kv-heads 1 --head-dim 64 --intermediate 320",
    "tied config, stored head": "--tie",
    "plain sibling in qkv": "--plain *.k_proj --plain *.up_proj",
    "plain sibling, padded": "--plain *.v_proj --hidden 192 --heads 3 --kv-heads 3 --head-dim 64",
    "plain head": "--plain lm_head",
    "plain layer": "--plain model.layers.1.*",
    "sliced MLP": "--intermediate 768 --slices 3",
    "sliced MLP, padded": "--intermediate 720 --slices 2",
    "several files": "--shard-size 300KB",
}
IDS = [7, 3, 250, 11, 98, 402, 5, 5, 31, 77]


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    """make(arguments) -> folder of a new dense checkpoint."""

    def write(arguments: str, name: str = "checkpoint") -> Path:
        folder = tmp_path / name
        assert validate(["make-checkpoint", "dense", str(folder), *arguments.split()]) == 0
        return folder

    return write


@pytest.mark.parametrize("arguments", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_logprobs_are_those_of_the_decoded_weights(engine, make, arguments):
    folder = make(arguments)
    logprobs, top = score(engine(folder), IDS)
    expected = Oracle(folder).logprobs(IDS)
    torch.testing.assert_close(logprobs, expected[range(len(IDS) - 1), IDS[1:]], atol=2e-3, rtol=0)
    assert top == expected[:-1].argmax(dim=-1).tolist()


def test_detected_without_a_flag(engine, make):
    llm = engine(make(""))
    assert llm.llm_engine.vllm_config.model_config.quantization == "exl3"


def test_flag_is_accepted(engine, make):
    assert engine(make(""), quantization="exl3").llm_engine.vllm_config.model_config.quantization == "exl3"


def test_bfloat16_is_close_to_float32(engine, make):
    folder = make("")
    logprobs, _ = score(engine(folder, dtype="bfloat16"), IDS)
    assert (logprobs - Oracle(folder).next_logprobs(IDS)).abs().mean() < 0.05


def test_files_beside_the_checkpoint_are_ignored(engine, make):
    folder = make("")
    save_file({"not.of.this.model": torch.zeros(3)}, folder / "measurement.safetensors")
    logprobs, _ = score(engine(folder), IDS)
    torch.testing.assert_close(logprobs, Oracle(folder).next_logprobs(IDS), atol=2e-3, rtol=0)


def test_two_engines_one_after_the_other(engine, make):
    first, second = make("--seed 1", "first"), make("--seed 2 --codebooks mul1", "second")
    for folder in (first, second, first):
        llm = engine(folder)
        assert greedy(llm, IDS, 8) == Oracle(folder).greedy(IDS, 8)


def test_two_engines_at_once(engine, make):
    folders = make("--seed 1", "first"), make("--seed 2 --rates 4", "second")
    engines = [engine(folder) for folder in folders]
    for llm, folder in zip(engines, folders, strict=True):
        assert greedy(llm, IDS, 8) == Oracle(folder).greedy(IDS, 8)


def test_reload_takes_the_weights_that_are_there_now(engine, make):
    kind = "--arch qwen2 --heads 2 --kv-heads 1 --bias --signs packed"
    folder, other = make(f"--seed 1 {kind}", "served"), make(f"--seed 2 {kind}", "other")
    llm = engine(folder, enable_prefix_caching=False)
    before = greedy(llm, IDS, 8)
    assert before == Oracle(folder).greedy(IDS, 8)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    llm.collective_rpc("reload_weights")
    after = greedy(llm, IDS, 8)
    assert after == Oracle(other).greedy(IDS, 8)
    assert after != before


def test_config_file_that_disagrees_loses_with_one_warning(engine, make, caplog_vllm):
    folder = make("--rates 3")
    path = folder / "quantization_config.json"
    stated = json.loads(path.read_text())
    for module, entry in stated["tensor_storage"].items():
        if f"{module}.trellis" in entry["stored_tensors"]:
            entry["stored_tensors"][f"{module}.trellis"]["shape"][-1] = 16 * 5
    path.write_text(json.dumps(stated))
    llm = engine(folder)
    assert greedy(llm, IDS, 4) == Oracle(folder).greedy(IDS, 4)
    warnings = [record for record in caplog_vllm.records if "disagrees with the tensors" in record.getMessage()]
    assert len(warnings) == 1


def test_hub_id_in_the_local_cache_is_served_like_a_folder(engine, make, tmp_path, monkeypatch):
    folder = make("")
    cache = tmp_path / "hub"
    repository = cache / "models--someone--tiny-exl3"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    llm = engine("someone/tiny-exl3")
    assert greedy(llm, IDS, 4) == Oracle(folder).greedy(IDS, 4)


def test_every_engine_names_the_chosen_provider_with_the_reasons_against_others(engine, make, caplog_vllm):
    folder = make("")
    for _ in range(2):
        engine(folder)
    said = [record.getMessage() for record in caplog_vllm.records if "EXL3: provider" in record.getMessage()]
    why = "runs on CUDA, not on cpu"
    assert said == [f"EXL3: provider torch for linear layers in float32; not native: {why}; not exllamav3: {why}"] * 2


def test_layers_that_nobody_can_run_are_refused_before_weights_are_read(engine, make, read, monkeypatch):
    folder = make("")
    monkeypatch.setenv("VLLM_EXL3_BACKEND", "native")
    with pytest.raises(Exception, match="no EXL3 kernel for linear .* on .*: native: runs on CUDA, not on cpu"):
        engine(folder)
    assert read == {}


def test_where_vllm_moves_weights_the_choice_waits_for_them(engine, make, monkeypatch):
    """As with a load device of its own: what runs where they are read to need not run where they will be."""
    from vllm.model_executor.layers.quantization.exl3_trellis.linear_method import EXL3LinearMethod
    from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device

    create, elsewhere = EXL3LinearMethod.create_weights, Device(kind="cuda", sm=90)

    def create_elsewhere(self, layer, *args, **named):
        create(self, layer, *args, **named)
        layer.exl3_choices = next(choices)

    choices = itertools.cycle([None, (elsewhere, ())])
    monkeypatch.setattr(EXL3LinearMethod, "create_weights", create_elsewhere)
    folder = make("")
    assert greedy(engine(folder), IDS, 4) == Oracle(folder).greedy(IDS, 4)


def test_dummy_weights_need_only_the_headers(engine, make):
    llm = engine(make(""), load_format="dummy")
    assert len(greedy(llm, IDS, 4)) == 4


def test_every_module_is_decoded_once_and_the_trellis_let_go(engine, make):
    llm = engine(make("--arch qwen2 --heads 2 --kv-heads 1 --bias"))

    def parameters(worker) -> dict[str, tuple[int, ...]]:
        return {name: tuple(param.shape) for name, param in worker.model_runner.model.named_parameters()}

    names = llm.collective_rpc(parameters)[0]
    assert names["model.layers.0.self_attn.qkv_proj.exl3_0_weight"] == (512, 256)
    assert not [name for name in names if name.endswith(("trellis", "suh", "svh"))]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.suh", "lm_head.trellis"])
def test_tensor_that_never_arrives_is_named(engine, make, name):
    """Headers list it, the loader does not bring it: the layer is refused, not served with what memory held."""
    folder = make("")
    tensors = load_file(folder / "model.safetensors")
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.get_all_weights

    def without(self, *args):
        return ((key, tensor) for key, tensor in original(self, *args) if key != name)

    assert name in tensors
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception, match=f"{name}: never loaded"):
        patch.setattr(DefaultModelLoader, "get_all_weights", without)
        engine(folder)
