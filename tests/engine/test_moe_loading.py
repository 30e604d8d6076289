"""How routed experts get into an engine: what is read, what is refused and when, reloading, and memory on the way."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import ROOT
from tests.engine.scoring import greedy, score
from tests.exl3_trellis.moe_layers import make_layer, make_spec, stored_tensors
from tests.oracle import Oracle
from validate.__main__ import main as validate
from vllm.model_executor.layers.quantization.exl3_trellis.expert_intake import require_all_experts

IDS = [7, 3, 250, 11, 98, 402, 5, 5, 31, 77]
LAYER = "model.layers.1.mlp.experts"
MIXED = "--family glm4_moe --layout per_expert --rates 3,4 --tp 2 --layers 2"
SECONDS = 30


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(arguments) -> folder of a new mixture-of-experts checkpoint."""

    def write(arguments: str, name: str = "checkpoint") -> Path:
        folder = tmp_path / name
        assert validate(["make-checkpoint", "moe", str(folder), *arguments.split()]) == 0
        return folder

    return write


def edit(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def model_of(llm: Any) -> torch.nn.Module:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()


def test_container_wins_over_the_shim(engine, make):
    folder = make(MIXED)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "modelopt"
    shim = engine(folder)
    assert shim.llm_engine.vllm_config.model_config.quantization == "exl3"
    said = score(shim, IDS)[0]
    edit(folder, lambda config: config.pop("quantization_config"))
    # Nothing is claimed; and a loader that reads whole files, whose tensors are sorted out afterwards.
    bare = engine(folder, model_loader_extra_config={"enable_multithread_load": True})
    assert bare.llm_engine.vllm_config.model_config.quantization == "exl3"
    assert torch.equal(score(bare, IDS)[0], said)


def test_rank_reads_its_own_slices(engine, make, monkeypatch, read):
    """One rank of four, of a checkpoint stored for four: a quarter of the experts' bytes, and the rest once."""
    folder = make("--family glm4_moe --layout shared_h --rates 3,4 --tp 4 --moe-intermediate 512 --layers 3 --drafts 1")
    _pretend_to_be_rank(monkeypatch, rank=2, of=4)
    stored = {name: tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items()}
    experts = {name: size for name, size in stored.items() if ".experts." in name and ".layers.3." not in name}
    llm = engine(folder)
    parts = {p.stored_rank for m in model_of(llm).modules() for p in getattr(m, "exl3_experts", _NO_PARTS).parts}
    assert parts == {2}
    got = {name: size for name, size in read.items() if ".experts." in name}
    assert set(got) == {name for name in experts if ".rank2." in name}
    assert sum(got.values()) * 4 <= sum(experts.values())
    assert {name: size for name, size in read.items() if ".experts." not in name} == {
        name: size for name, size in stored.items() if ".experts." not in name
    }


class _NO_PARTS:  # noqa: N801 - stands for the HeldExperts of a layer that has none
    parts = ()


def _pretend_to_be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, of: int) -> None:
    """Experts are shared out as to one rank of several; all else is as on one."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    real = FusedMoEParallelConfig.make

    def made(*args: Any, **named: Any) -> FusedMoEParallelConfig:
        config = real(*args, **named)
        config.tp_size, config.tp_rank = of, rank
        return config

    monkeypatch.setattr(FusedMoEParallelConfig, "make", staticmethod(made))


def test_reload_after_preparation(engine, make):
    """New values come into the prepared storage: no address changes, nothing old is left."""
    folder, other = make(MIXED), make(f"{MIXED} --seed 5", "other")
    llm = engine(folder, enable_prefix_caching=False)
    first = score(llm, IDS)[0]
    addresses = {name: param.data_ptr() for name, param in model_of(llm).named_parameters()}
    for file in ("model.safetensors", "tier_bitmap.json"):
        shutil.copy(folder / file, folder / f"{file}.old")
    # The rates of the new experts are those of the old: slabs are laid out at start.
    tensors, new = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    for name, tensor in new.items():
        if tensors[name].shape == tensor.shape:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llm.collective_rpc("reload_weights")
    second = score(llm, IDS)[0]
    assert (second - first).abs().mean() > 0.1
    assert (second - Oracle(folder).next_logprobs(IDS)).abs().mean() < 1e-3
    (folder / "model.safetensors.old").rename(folder / "model.safetensors")
    llm.collective_rpc("reload_weights")
    assert torch.equal(score(llm, IDS)[0], first)
    assert {name: param.data_ptr() for name, param in model_of(llm).named_parameters()} == addresses


STYLES = {"gate, up, down": ("gate_proj", "down_proj", "up_proj"), "w1, w2, w3": ("w1", "w2", "w3")}


@pytest.mark.parametrize("layout", ["per expert", "shared_h", "ordinary"])
@pytest.mark.parametrize("names", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("place", ["routed_experts", ""], ids=["hand-rolled", "RoutedExperts.load_weights"])
def test_every_loader_finds_the_parameters(layout, names, place):
    """By the mapping that the loaders of all families share, MTP ones too: each stored tensor, and nothing twice."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.quantization.exl3_trellis.expert_names import local_name

    ranks = None if layout == "ordinary" else 2
    spec = make_spec({shard: [3, 4, 3] for shard in ("w1", "w3", "w2")}, ranks=ranks, shared=layout == "shared_h")
    gate, down, up = names
    layer, _ = make_layer(spec, 256 if ranks else 128)
    stored = {"w1": gate, "w3": up, "w2": down}
    mapping = RoutedExperts.build_expert_params_mapping(gate, down, up, spec.count, routed_experts_prefix=place)
    for (shard, expert, rank, suffix), tensor in stored_tensors(spec).items():
        who, where = ("shared_h", 0) if expert < 0 else (str(expert), expert)
        middle = f".rank{rank}" if ranks else ""
        name = local_name(f"model.layers.3.mlp.experts.{who}.{stored[shard]}{middle}.{suffix}")
        found = [(name.replace(old, new), e, s) for new, old, e, s in mapping if old in name]
        ((path, *slot),) = found
        assert slot == [where, shard]
        parameter = path.removeprefix("model.layers.3.mlp.experts.").removeprefix(f"{place}." if place else "")
        param = getattr(layer, parameter)
        assert param.weight_loader(param, tensor, path, shard_id=shard, expert_id=where, return_success=True)
    require_all_experts(layer)


def test_made_up_weights(engine, make):
    llm = engine(make("--family qwen3_moe --layout shared_h --rates 3,4 --tp 2"), load_format="dummy")
    assert len(greedy(llm, IDS, 4)) == 4
    assert torch.isfinite(score(llm, IDS)[0]).all()


def test_unquantized_experts_beside_exl3_linears(engine, make):
    folder = make("--family qwen3_moe --layout ordinary --plain *.experts.*")
    assert (score(engine(folder), IDS)[0] - Oracle(folder).next_logprobs(IDS)).abs().mean() < 1e-3


def test_path_selection_is_logged(engine, make, monkeypatch, caplog_vllm):
    monkeypatch.setenv("VLLM_EXL3_LOG_PATH_SELECTION", "1")
    with caplog_vllm.at_level(logging.INFO):
        engine(make(MIXED))
    chosen = "parity by torch: 8 experts 256 -> 128 in 2 slices, mcg 3/4 bit, top 2, silu, float32"
    assert f"{LAYER} (target): {chosen}" in caplog_vllm.text


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def _section(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda config: config["hybrid_tr3_tail"].update(changes))


# what is wrong -> (how to make it so, options, part of the message)
REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "schema": (_section(tensor_schema="x"), {}, "hybrid_tr3_tail.tensor_schema: 'x', want 'model.layers"),
    "codebook": (_section(codebook="3inst"), {}, "hybrid_tr3_tail.codebook: '3inst', want 'mcg'"),
    "rate": (_section(k_values=[2.5, 4]), {}, "hybrid_tr3_tail.k_values: [2.5, 4], want a list of different whole"),
    "layout": (_section(rotation_layout="v2"), {}, "hybrid_tr3_tail.rotation_layout: 'v2', want no such key or"),
    "shared schema": (_section(rotation_layout="shared_h_v1"), {}, "hybrid_tr3_tail.shared_h_tensor_schema: missing"),
    "expert count": (_section(experts_per_layer=4), {}, "experts_per_layer: 4, want 8, as n_routed_experts says"),
    "stored ranks": (_section(tp=4), {}, f"{LAYER}.0.gate_proj.rank2.trellis: missing"),
    "another container": (
        lambda folder: edit(folder, lambda config: config.update(r7_routed_experts={})),
        {},
        "config.json: r7_routed_experts: another container, which is not supported",
    ),
    "no bitmap": (lambda folder: (folder / "tier_bitmap.json").unlink(), {}, "tier_bitmap.json: unreadable"),
    "one int32 trellis": (
        _tensors(lambda t: t.update({f"{LAYER}.5.up_proj.rank1.trellis": t[f"{LAYER}.5.up_proj.rank1.trellis"].int()})),
        {},
        f"{LAYER}.5.up_proj.rank1.trellis: dtype I32, want I16",
    ),
    "tensor parallel size": (
        lambda folder: None,
        {"tensor_parallel_size": 4},
        f"{LAYER}: tensor parallel size 4 for experts with 2 stored ranks of 128 channels: want one of 1, 2",
    ),
    "expert parallelism": (
        lambda folder: None,
        {"enable_expert_parallel": True},
        "--enable-expert-parallel: routed experts are shared by tensor parallelism only",
    ),
    "another method": (
        lambda folder: None,
        {"quantization": "modelopt"},
        "(exl3) does not match the quantization method specified in the `quantization` argument (modelopt)",
    ),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "checkpoint"
    assert validate(["make-checkpoint", "moe", str(folder), *MIXED.split()]) == 0
    return folder


@pytest.mark.parametrize("spoil, options, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused_before_any_weight_is_read(engine, mixed, tmp_path, monkeypatch, spoil, options, message):
    from vllm.model_executor.model_loader import base_loader

    def load_model(*args: object, **named: object) -> None:
        raise AssertionError("loading began")

    monkeypatch.setattr(base_loader.BaseModelLoader, "load_model", load_model)
    folder = tmp_path / "spoilt"
    shutil.copytree(mixed, folder)
    spoil(folder)
    began = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(message)):
        engine(folder, **options)
    assert time.monotonic() - began < SECONDS


def test_memory_while_loading():
    """See measure_loading.py: eight layers, each prepared in turn; never more than one layer's slabs beyond the end."""
    script = ROOT / "tests" / "engine" / "measure_loading.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["slabs"] > 8e6  # enough to tell from the noise of an interpreter
    for kind in ("kept", "decoded"):
        over = figures[kind]["peak"] - figures[kind]["end"]
        assert over < figures["slabs"], figures
