# SPDX-License-Identifier: Apache-2.0
"""The audit: what it says of sound checkpoints, and every fault of a broken one at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.validate.checkpoints import config_of, make
from validate.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT.parent / "shared" / "data" / "glm4moe-rank-sliced-mixed-tp2"
LAYER = "model.layers.1.mlp.experts"
MIXED = "moe --family glm4_moe --layers 2 --experts 4 --tp 2 --layout per_expert --rates 3,4"


def audit(capsys: pytest.CaptureFixture, folder: Path, *options: str) -> tuple[int, dict]:
    """(exit code, the report)."""
    capsys.readouterr()
    code = main(["check-checkpoint", str(folder), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit(folder: Path, name: str, change: Callable[[dict], object]) -> None:
    content = config_of(folder, name)
    change(content)
    (folder / name).write_text(json.dumps(content))


SOUND = {
    "dense --rates 3,4": ("dense", [1, 2, 4], ["mcg"]),
    "moe --layout ordinary --codebooks mul1 --rates 2.5": ("ordinary experts", [1], ["mul1"]),
    "moe --layout per_expert --rates 3 --tp 2": ("rank-sliced for 2, uniform K3, per_expert_v1", [1, 2], ["mcg"]),
    "moe --layout shared_h --rates 3,4 --tp 1": ("rank-sliced for 1, mixed K3/4, shared_h_v1", [1, 2], ["mcg"]),
}


@pytest.mark.parametrize("form, said", SOUND.items(), ids=SOUND)
def test_sound(capsys, tmp_path, form, said):
    folder = make(tmp_path / "made", form if form.startswith("moe") else f"{form} --intermediate 512")
    code, report = audit(capsys, folder)
    assert (code, report["faults"], report["warnings"]) == (0, [], [])
    assert (report["layout"], report["needs"]["tensor_parallel_sizes"], report["needs"]["codebooks"]) == said


def test_heads_of_a_text_model_decide_the_sizes(capsys, tmp_path):
    """As a model that also sees has it: what its language part takes is one level down."""
    folder = make(tmp_path / "made", "dense --heads 6 --kv-heads 2 --intermediate 1536 --hidden 768")
    sizes = audit(capsys, folder)[1]["needs"]["tensor_parallel_sizes"]
    edit(folder, "config.json", lambda c: c.update(text_config={"num_attention_heads": c.pop("num_attention_heads")}))
    code, report = audit(capsys, folder)
    assert (code, report["needs"]["tensor_parallel_sizes"], sizes) == (0, [1, 2, 3, 6], [1, 2, 3, 6])


def test_bytes_of_a_rank(capsys, tmp_path):
    folder = make(tmp_path / "made", MIXED)
    tensors = load_file(folder / "model.safetensors")
    experts = {name: tensor.nbytes for name, tensor in tensors.items() if ".experts." in name}
    for tp, share in ((1, 1), (2, 2)):
        _, report = audit(capsys, folder, "--tp", str(tp))
        held = report["bytes_per_rank"]
        assert held["experts"] == sum(size for name, size in experts.items() if ".rank0." in name) * 2 // share
        assert held["other_tensors_of_all_ranks"] == sum(t.nbytes for t in tensors.values()) - sum(experts.values())
    table = config_of(folder, "tier_bitmap.json")["1"]["k"]
    counts = {f"mcg {rate}": table.count(rate) for rate in (3, 4)}
    assert report["experts"][LAYER]["rates"] == dict.fromkeys(("gate_proj", "up_proj", "down_proj"), counts)


def _break_tensors(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.0.up_proj.rank0.trellis"] = tensors[f"{LAYER}.0.up_proj.rank0.trellis"].int()
    tensors[f"{LAYER}.1.up_proj.rank1.suh"] = tensors[f"{LAYER}.1.up_proj.rank1.suh"].float()
    for suffix in ("trellis", "suh", "svh", "mcg"):
        del tensors[f"{LAYER}.2.down_proj.rank1.{suffix}"]
    tensors["model.layers.0.mlp.gate_proj.svh"] = torch.ones(8).half()


TENSOR_FAULTS = [
    "model.layers.0.mlp.gate_proj: has svh but no trellis",
    f"{LAYER}.0.up_proj.rank0.trellis: dtype I32, want I16",
    f"{LAYER}.1.up_proj.rank1.suh: dtype F32, want F16",
    f"{LAYER}.2.down_proj.rank1.trellis: missing",
]


def test_every_fault_of_the_tensors(capsys, tmp_path):
    folder = make(tmp_path / "made", MIXED)
    rewrite(folder, _break_tensors)
    code, report = audit(capsys, folder)
    assert code == 1
    assert sorted(report["faults"]) == sorted(TENSOR_FAULTS)


def test_faults_of_metadata_do_not_hide_those_of_tensors(capsys, tmp_path):
    folder = make(tmp_path / "made", MIXED)
    rewrite(folder, _break_tensors)
    edit(folder, "config.json", lambda c: c["hybrid_tr3_tail"].update(codebook="mul1", k_values=[2.5]))
    code, report = audit(capsys, folder)
    assert code == 1
    assert sorted(report["faults"]) == sorted(
        [
            "config.json: hybrid_tr3_tail.codebook: 'mul1', want 'mcg'",
            "config.json: hybrid_tr3_tail.k_values: [2.5], want a list of different whole numbers 1..8",
            *TENSOR_FAULTS[:3],
        ]
    )


def _cut_short(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _wrong_index(folder: Path) -> None:
    edit(
        folder,
        "model.safetensors.index.json",
        lambda index: index["weight_map"].update(
            {"lm_head.weight": "model-00001-of-00003.safetensors", "nowhere.weight": "model-00001-of-00003.safetensors"}
        ),
    )


FILES = {
    "cut short": (_cut_short, ["model-00002-of-00003.safetensors: truncated: "]),
    "missing": (
        lambda folder: (folder / "model-00003-of-00003.safetensors").unlink(),
        ["names model-00003-of-00003.safetensors, which is not there"],
    ),
    "wrong index": (
        _wrong_index,
        [
            f"model.safetensors.index.json: {name}.weight is said to be in model-00001-of-00003.safetensors, which"
            for name in ("lm_head", "nowhere")
        ],
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json: missing"]),
    "bad bitmap": (
        lambda folder: (folder / "tier_bitmap.json").write_text("{"),
        ["tier_bitmap.json: unreadable"],
    ),
}

HEADER = "safetensors header"
NO_INDEX = "model.safetensors.index.json: not a safetensors index"
NOT_OBJECTS = {
    "a config that is a list": ("config.json", [1], "config.json: holds a list, want an object"),
    "heads that are null": (
        "config.json", {"num_attention_heads": None},
        "config.json: num_attention_heads: None, want a whole number, 1 or more",
    ),
    "a text model that is a list": (
        "config.json", {"text_config": [1]}, "config.json: text_config: [1], want an object",
    ),
    "an index that is a list": ("model.safetensors.index.json", [1], NO_INDEX),
    "an index of numbers": ("model.safetensors.index.json", {"weight_map": {"a": 1}}, NO_INDEX),
    "a header that is a list": (HEADER, [1], "model.safetensors: safetensors header is a list, want an object"),
    "a tensor without its place": (
        HEADER, {"a.weight": {"dtype": "F16", "shape": [1]}},
        "model.safetensors: a.weight: header says {'dtype': 'F16', 'shape': [1]}, want dtype, shape and data_offsets",
    ),
    "a tensor that is a list": (HEADER, {"a": [1]}, "model.safetensors: a: header says [1], want dtype, shape and"),
    "a shape of words": (
        HEADER, {"a": {"dtype": "F16", "shape": ["x"], "data_offsets": [0, 2]}}, "model.safetensors: a: header says {",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, content, message", NOT_OBJECTS.values(), ids=NOT_OBJECTS.keys())
def test_json_of_another_kind_is_a_fault(capsys, tmp_path, name, content, message):
    folder = make(tmp_path / "made", "dense")
    if name == HEADER:
        text = json.dumps(content).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0")
    else:
        path = folder / name
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(before | content if isinstance(content, dict) else content))
    code, report = audit(capsys, folder)
    assert code == 1
    assert any(message in fault for fault in report["faults"]), report["faults"]


@pytest.mark.parametrize("spoil, messages", FILES.values(), ids=FILES.keys())
def test_faults_of_files(capsys, tmp_path, spoil, messages):
    folder = make(tmp_path / "made", f"{MIXED} --file-per-layer")
    spoil(folder)
    code, report = audit(capsys, folder)
    assert code == 1
    for message in messages:
        assert any(message in fault for fault in report["faults"]), report["faults"]


def test_a_tensor_parallel_size_that_cannot_be(capsys, tmp_path):
    folder = make(tmp_path / "made", MIXED)
    code, report = audit(capsys, folder, "--tp", "4")
    assert code == 1
    assert report["faults"] == [
        f"{LAYER}: tensor parallel size 4 for experts with 2 stored ranks of 128 channels: want one of 1, 2"
    ]


def test_disagreeing_storage_is_a_warning(capsys, tmp_path):
    folder = make(tmp_path / "made", "dense")
    edit(folder, "quantization_config.json", lambda c: c["tensor_storage"].pop("lm_head"))
    code, report = audit(capsys, folder)
    assert (code, report["warnings"]) == (0, ["lm_head: not listed"])


def test_words(capsys, tmp_path):
    folder = make(tmp_path / "made", MIXED)
    capsys.readouterr()
    assert main(["check-checkpoint", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "rank-sliced for 2, mixed K3/4, per_expert_v1" in said
    assert said.endswith("  no faults\n")
    rewrite(folder, _break_tensors)
    assert main(["check-checkpoint", str(folder)]) == 1
    said = capsys.readouterr().out
    assert all(f"  FAULT: {fault}\n" in said for fault in TENSOR_FAULTS)
    assert main(["check-checkpoint", str(tmp_path / "nowhere")]) == 2


def test_the_example(capsys):
    if not EXAMPLE.is_dir():
        pytest.skip("shared/data is not here")
    code, report = audit(capsys, EXAMPLE)
    assert (code, report["layout"]) == (0, "rank-sliced for 2, mixed K3/4, per_expert_v1")


def test_needs_neither_torch_nor_vllm(tmp_path):
    folder = make(tmp_path / "made", MIXED)
    code = "import sys; sys.modules['torch'] = None; from validate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "check-checkpoint", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_hundred_thousand_tensors_take_seconds(capsys, tmp_path):
    """Real rank-sliced layers have 12,288 tensors each; weights are holes in the files, for headers alone are read."""
    folder = make(tmp_path / "made", MIXED)
    layers, experts = 8, 256
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "tier_bitmap.json").unlink()
    for layer in range(1, 1 + layers):
        _write_holes(folder / f"model-{layer}.safetensors", layer, experts)
    edit(
        folder,
        "config.json",
        lambda c: (
            c["hybrid_tr3_tail"].update(bits=3, experts_per_layer=experts, moe_layers=[1, layers], tp=4),
            c["hybrid_tr3_tail"].pop("k_values"),
            c["hybrid_tr3_tail"].pop("bits_per_expert"),
            c.update(n_routed_experts=experts, num_hidden_layers=1 + layers, moe_intermediate_size=512),
        ),
    )
    began = time.perf_counter()
    code, report = audit(capsys, folder)
    took = time.perf_counter() - began
    assert (code, report["tensors"]) == (0, layers * experts * 3 * 4 * 4)
    assert took < 15, f"{took:.1f} s"  # about 1 s on an idle core; the machine may be busy
    shutil.rmtree(folder)


def _write_holes(path: Path, layer: int, experts: int) -> None:
    header, offset = {}, 0
    for expert in range(experts):
        for name, k, n in (("gate_proj", 256, 128), ("up_proj", 256, 128), ("down_proj", 128, 256)):
            for rank in range(4):
                for suffix, dtype, shape, size in (
                    ("trellis", "I16", [k // 16, n // 16, 48], k * n // 256 * 96),
                    ("suh", "F16", [k], 2 * k),
                    ("svh", "F16", [n], 2 * n),
                    ("mcg", "I32", [], 4),
                ):
                    key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.rank{rank}.{suffix}"
                    header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
                    offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
