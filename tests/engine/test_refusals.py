"""What cannot be served is refused in seconds, by one message that names tensor, found and wanted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.server import serve_and_fail
from validate.__main__ import main as validate

MODULE = "model.layers.1.mlp.up_proj"  # 256 inputs, 512 outputs, mcg, 3 bits
SECONDS = 30

Tensors = dict[str, torch.Tensor]


def _set(suffix: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{MODULE}.{suffix}": tensor})


def _drop(suffix: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.pop(f"{MODULE}.{suffix}")


def _trellis(words: int) -> torch.Tensor:
    return torch.zeros(16, 32, words, dtype=torch.int16)


def _only_plain(tensors: Tensors) -> None:
    for name in [name for name in tensors if not name.endswith(".weight")]:
        del tensors[name]


# what is wrong -> (how to make it so, the message)
BROKEN = {
    "dtype of a trellis": (
        _set("trellis", _trellis(48).int()),
        f"{MODULE}.trellis: dtype I32, want I16",
    ),
    "dtype of a vector": (
        _set("suh", torch.ones(256)),
        f"{MODULE}.suh: dtype F32, want F16",
    ),
    "length of suh": (
        _set("suh", torch.ones(128).half()),
        f"{MODULE}.suh: shape [128], want [256]",
    ),
    "rate": (
        _set("trellis", _trellis(50)),
        f"{MODULE}.trellis: 50 words a tile, want 16*K: K whole in 1..8, or 24, 40, 56 for K = 1.5, 2.5, 3.5",
    ),
    "half rate without mul1": (
        _set("trellis", _trellis(40)),
        f"{MODULE}.trellis: codebook mcg: 2.5 bits a weight, want one of 1, 2, 3, 4, 5, 6, 7, 8",
    ),
    "two markers": (
        _set("mul1", torch.tensor(0x83DCD12D - (1 << 32), dtype=torch.int32)),
        f"{MODULE}: has both mcg and mul1, want one codebook marker or none",
    ),
    "value of a marker": (
        _set("mcg", torch.tensor(17, dtype=torch.int32)),
        f"{MODULE}.mcg: value 0x00000011, want 0xCBAC1FED",
    ),
    "no svh": (
        _drop("svh"),
        f"{MODULE}.svh: missing, and no sv either",
    ),
    "no trellis": (
        _drop("trellis"),
        f"{MODULE}: has mcg, suh, svh but no trellis",
    ),
    "rank 2 trellis": (
        lambda tensors: tensors.update({"model.embed_tokens.trellis": torch.zeros(8, 48, dtype=torch.int16)}),
        "model.embed_tokens.trellis: shape [8, 48]; a rank 2 trellis belongs to the embedding codec, "
        "which is not supported",
    ),
    "shape of the model": (
        lambda tensors: tensors.update(
            {f"{MODULE}.trellis": torch.zeros(16, 24, 48, dtype=torch.int16), f"{MODULE}.svh": torch.ones(384).half()}
        ),
        f"{MODULE}.trellis: 256 x 384 inputs x outputs, want 256 x 512 for 256 x 512",
    ),
    "nothing is EXL3": (
        _only_plain,
        "the config says exl3, but no tensor named *.trellis is there",
    ),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    assert validate(["make-checkpoint", "dense", str(folder)]) == 0
    return folder


def _break(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _draft_beside(checkpoint: Path, arguments: str = "dense") -> Path:
    folder = checkpoint.with_name("draft")
    form, *rest = arguments.split()
    assert validate(["make-checkpoint", form, str(folder), *rest]) == 0
    return folder


def _configure(target: Path, draft: Path, tp: int = 1) -> None:
    """What the front-end does before it starts an engine."""
    from vllm.engine.arg_utils import EngineArgs

    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    EngineArgs(
        model=str(target), max_model_len=256, speculative_config=speculation, tensor_parallel_size=tp
    ).create_engine_config()


def _truncate(folder: Path) -> str:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    return f"{path}: truncated: {len(data) - 100} bytes, want {len(data)}"


def _name_a_missing_file(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"{MODULE}.trellis": "model-00002-of-00002.safetensors"}}))
    return f"{index}: names model-00002-of-00002.safetensors, which is not there"


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_tensor_is_refused(engine, checkpoint, change, message):
    _break(checkpoint, change)
    with pytest.raises(Exception, match=re.escape(message)):
        engine(checkpoint)


@pytest.mark.parametrize("spoil", [_truncate, _name_a_missing_file])
def test_broken_file_is_refused(engine, checkpoint, spoil):
    message = spoil(checkpoint)
    with pytest.raises(Exception, match=re.escape(message)):
        engine(checkpoint)


def test_every_fault_is_named_at_once(engine, checkpoint):
    _break(checkpoint, BROKEN["length of suh"][0])
    _break(checkpoint, BROKEN["value of a marker"][0])
    with pytest.raises(Exception) as refusal:
        engine(checkpoint)
    assert BROKEN["length of suh"][1] in str(refusal.value)
    assert BROKEN["value of a marker"][1] in str(refusal.value)


OPTIONS = {
    "lora": ({"enable_lora": True}, "--enable-lora: adapters are not supported on EXL3 layers"),
    "load format": ({"load_format": "sharded_state"}, "--load-format sharded_state: want one of auto, hf, safetensors"),
    "load format of GPUs": ({"load_format": "fastsafetensors"}, "--load-format fastsafetensors: needs an NVIDIA GPU"),
    "offload": ({"cpu_offload_gb": 1}, "CPU offloading of weights: EXL3 layers keep theirs on the device"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_option_is_refused(engine, checkpoint, options, message):
    with pytest.raises(Exception, match=re.escape(message)):
        engine(checkpoint, **options)


def test_an_eagle_head_stored_as_exl3_is_refused(engine, checkpoint):
    speculation = {"method": "eagle", "model": str(checkpoint), "num_speculative_tokens": 1}
    message = "--speculative-config of method eagle: want its head unquantized, this one is EXL3"
    with pytest.raises(Exception, match=re.escape(message)):
        engine(checkpoint, speculative_config=speculation)


@pytest.mark.parametrize("wrong", ["length of suh", "rate", "nothing is EXL3"])
def test_a_broken_draft_is_refused_before_its_target_is_loaded(checkpoint, wrong):
    draft = _draft_beside(checkpoint)
    _configure(checkpoint, draft)
    change, message = BROKEN[wrong]
    _break(draft, change)
    with pytest.raises(Exception, match=re.escape(f"draft {draft}: ")) as refusal:
        _configure(checkpoint, draft)
    assert message in str(refusal.value)


def test_ranks_that_cannot_share_a_draft_are_refused_before_its_target_is_loaded(checkpoint):
    draft = _draft_beside(checkpoint, "dense --hidden 256 --heads 2 --kv-heads 2 --head-dim 64 --intermediate 512")
    message = f"draft {draft}: model.layers.0.self_attn.o_proj.trellis: tensor parallel size 2 cuts its 128 inputs"
    with pytest.raises(Exception, match=re.escape(message)):
        _configure(checkpoint, draft, tp=2)


@pytest.mark.slow
def test_server_refuses_a_broken_draft_before_a_worker_starts(checkpoint, tmp_path):
    draft = _draft_beside(checkpoint)
    _break(draft, BROKEN["length of suh"][0])
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    message = f"draft {draft}: {BROKEN['length of suh'][1]}"
    _refused_over_cli(checkpoint, tmp_path, message, "--speculative-config", json.dumps(speculation))
    assert "EngineCore" not in (tmp_path / "refused.log").read_text()


def test_variables_that_contradict_each_other_are_refused(engine, checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_EXL3_FUSED", "0")
    monkeypatch.setenv("VLLM_EXL3_BACKEND", "native")
    message = "VLLM_EXL3_FUSED=0 with VLLM_EXL3_BACKEND=native: want one of the two unset"
    with pytest.raises(Exception, match=re.escape(message)):
        engine(checkpoint)


def _refused_over_cli(folder: Path, where: Path, message: str, *options: str) -> None:
    code, log, seconds = serve_and_fail(folder, where, *options)
    assert code != 0
    assert message in log
    assert seconds < SECONDS


def test_server_refuses_before_a_worker_starts(checkpoint, tmp_path):
    _break(checkpoint, BROKEN["length of suh"][0])
    _refused_over_cli(checkpoint, tmp_path, BROKEN["length of suh"][1])
    assert "EngineCore" not in (tmp_path / "refused.log").read_text()


def test_server_refuses_a_cut_inside_a_block(tmp_path):
    folder = tmp_path / "checkpoint"
    sizes = "--hidden 256 --heads 2 --kv-heads 2 --head-dim 64 --intermediate 512"
    assert validate(["make-checkpoint", "dense", str(folder), *sizes.split()]) == 0
    message = (
        "model.layers.0.self_attn.o_proj.trellis: tensor parallel size 2 cuts its 128 inputs "
        "inside a Hadamard block; want multiples of 128: tensor parallel size 1"
    )
    _refused_over_cli(folder, tmp_path, message, "--tensor-parallel-size", "2")


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_server_refuses_a_broken_tensor(checkpoint, tmp_path, change, message):
    _break(checkpoint, change)
    _refused_over_cli(checkpoint, tmp_path, message)


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [_truncate, _name_a_missing_file])
def test_server_refuses_a_broken_file(checkpoint, tmp_path, spoil):
    _refused_over_cli(checkpoint, tmp_path, spoil(checkpoint))
