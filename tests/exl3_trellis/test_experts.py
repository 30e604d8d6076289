# SPDX-License-Identifier: Apache-2.0
"""Routed experts read from headers: specs, and each inconsistency word for word."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.validate.checkpoints import make
from vllm.model_executor.layers.quantization.exl3_trellis import contents
from vllm.model_executor.layers.quantization.exl3_trellis.safetensors_headers import (
    CheckpointError,
    TensorInfo,
    read_folder,
)

LAYER = "model.layers.1.mlp.experts"
Headers = dict[str, TensorInfo]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each layout: 4 experts, hidden 256, intermediate 256; two ranks stored where rank-sliced."""
    sizes = "--family glm4_moe --layers 2 --experts 4 --tp 2 --seed 1"
    forms = {
        "ordinary": f"moe {sizes} --layout ordinary --rates 3,4,2.5 --codebooks mul1",
        "mixed": f"moe {sizes} --layout per_expert --rates 3,4 --drafts 1",
        "shared": f"moe {sizes} --layout shared_h --rates 3",
    }
    root = tmp_path_factory.mktemp("experts")
    return {name: make(root / name, form) for name, form in forms.items()}


def read(folder: Path, change: Callable[[Headers], None] = lambda headers: None, **config: object) -> contents.Contents:
    """The contents of `folder` with its headers, and keys of its config.json, changed."""
    headers = read_folder(folder)
    change(headers)

    def read_json(name: str) -> object:
        return json.loads((folder / name).read_text())

    return contents.read_contents(read_json("config.json") | config, read_json, lambda: headers, "here")


def test_ordinary(folders):
    spec = read(folders["ordinary"]).experts[LAYER]
    assert (spec.count, spec.hidden, spec.width, spec.ranks, spec.shared_h) == (4, 256, 256, None, False)
    assert {shard: p.name for shard, p in spec.projections.items()} == {
        "w1": "gate_proj",
        "w3": "up_proj",
        "w2": "down_proj",
    }
    assert {p.rate(e) for p in spec.projections.values() for e in range(4)} <= {2.5, 3, 4}
    assert all(p.codebook(e) == "mul1" and p.has(e, "suh") for p in spec.projections.values() for e in range(4))


def test_mixed_with_an_mtp_layer(folders):
    read_out = read(folders["mixed"])
    table = json.loads((folders["mixed"] / "tier_bitmap.json").read_text())
    spec = read_out.experts[LAYER]
    assert (spec.count, spec.hidden, spec.width, spec.ranks) == (4, 256, 128, 2)
    for projection in spec.projections.values():
        assert [projection.rate(expert) for expert in range(4)] == table["1"]["k"]
    draft = read_out.experts["model.layers.2.mlp.experts"]
    assert "k" not in table["2"]
    assert {p.rate(e) for p in draft.projections.values() for e in range(4)} == {3}
    assert not read_out.linears


def test_shared(folders):
    spec = read(folders["shared"]).experts[LAYER]
    assert spec.shared_h
    vectors = {shard: [s for s in ("suh", "svh") if p.has(0, s)] for shard, p in spec.projections.items()}
    assert vectors == {"w1": ["svh"], "w3": ["svh"], "w2": ["suh"]}


def test_specs_stay_small_when_they_travel(folders):
    """A model of 76 layers and 256 experts is about 75 times this for its layers, and its experts cost 6 bytes each."""
    experts = read(folders["mixed"]).experts
    assert len(pickle.dumps(experts)) < 1500 * len(experts)
    assert pickle.loads(pickle.dumps(experts)) == experts


def _set(name: str, **fields: object) -> Callable[[Headers], None]:
    return lambda headers: headers.update({name: headers[name]._replace(**fields)})


def _drop(*names: str) -> Callable[[Headers], None]:
    def change(headers: Headers) -> None:
        for name in names:
            del headers[name]

    return change


def _drop_all(*parts: str) -> Callable[[Headers], None]:
    """Drop the tensors whose names have all the parts."""
    return lambda headers: _drop(*(name for name in headers if all(part in name for part in parts)))(headers)


def _copy(old: str, new: str) -> Callable[[Headers], None]:
    return lambda headers: headers.update({new: headers[old]})


def _copy_module(old: str, new: str) -> Callable[[Headers], None]:
    suffixes = ("trellis", "suh", "svh", "mcg")
    return lambda headers: headers.update({f"{new}.{s}": headers[f"{old}.{s}"] for s in suffixes})


UP = f"{LAYER}.3.up_proj"
# layout, what is wrong -> (change, messages)
BROKEN = {
    ("ordinary", "one int32 trellis"): (_set(f"{UP}.trellis", dtype="I32"), [f"{UP}.trellis: dtype I32, want I16"]),
    ("ordinary", "an expert missing"): (_drop_all(f"{LAYER}.2.gate_proj"), [f"{LAYER}.2.gate_proj.trellis: missing"]),
    ("ordinary", "no down"): (_drop_all("experts.", "down_proj"), [f"{LAYER}: no down_proj"]),
    ("ordinary", "another size"): (
        lambda headers: headers.update(
            {
                f"{UP}.trellis": headers[f"{UP}.trellis"]._replace(shape=(16, 8, 48)),
                f"{UP}.svh": headers[f"{UP}.svh"]._replace(shape=(128,)),
            }
        ),
        [f"{LAYER}: experts of different sizes: 256 x 128 or 256 x 256, want one hidden x intermediate size"],
    ),
    ("ordinary", "ranks without a container"): (
        _copy(f"{UP}.trellis", f"{UP}.rank0.trellis"),
        [f"{LAYER}: rank-sliced, but config.json has no hybrid_tr3_tail"],
    ),
    ("ordinary", "the last expert missing"): (
        _drop_all(f"{LAYER}.3."),
        [f"{LAYER}: 3 experts stored, want 4 as n_routed_experts says"],
    ),
    ("ordinary", "a bias"): (
        _copy(f"{UP}.svh", f"{UP}.bias"),
        [f"{UP}.bias: not supported of a routed expert; want trellis, suh, svh, su, sv, mcg, mul1 of a projection"],
    ),
    ("ordinary", "a projection in slices"): (
        _copy(f"{UP}.svh", f"{UP}.slice.0.svh"),
        [
            f"{UP}.slice.0: has svh but no trellis",
            f"{UP}.slice.0.svh: not supported of a routed expert; want trellis, suh, svh, su, sv, mcg, mul1 of a "
            "projection",
        ],
    ),
    ("mixed", "one float32 suh"): (_set(f"{UP}.rank1.suh", dtype="F32"), [f"{UP}.rank1.suh: dtype F32, want F16"]),
    ("mixed", "a rank missing"): (_drop_all(f"{UP}.rank1."), [f"{UP}.rank1.trellis: missing"]),
    ("mixed", "a rank too many"): (
        _copy_module(f"{UP}.rank0", f"{UP}.rank2"),
        [f"{UP}.rank2: rank 2, want rank 0..1"],
    ),
    ("mixed", "an expert too many"): (
        _copy_module(f"{UP}.rank0", f"{LAYER}.4.up_proj.rank0"),
        [f"{LAYER}.4.up_proj.rank0: expert 4, want 0..3"],
    ),
    ("mixed", "no marker"): (
        _drop(f"{UP}.rank0.mcg", f"{UP}.rank1.mcg"),
        [f"{UP}.rank0.mcg: missing: codebook 3inst, want mcg", f"{UP}.rank1.mcg: missing: codebook 3inst, want mcg"],
    ),
    ("mixed", "a layer missing"): (
        _drop_all(f"{LAYER}."),
        [f"{LAYER}: not in the files, though hybrid_tr3_tail.moe_layers names its layer"],
    ),
    ("shared", "a vector for one expert"): (
        _copy(f"{LAYER}.shared_h.up_proj.rank0.suh", f"{UP}.rank0.suh"),
        [f"{UP}.rank0.suh: stored for one expert, though the layout is shared_h_v1"],
    ),
    ("shared", "no shared vector"): (
        _drop(f"{LAYER}.shared_h.down_proj.rank1.svh"),
        [f"{LAYER}.shared_h.down_proj.rank1: holds nothing, want svh"]
        + [f"{LAYER}.{expert}.down_proj.rank1.svh: missing, and no sv either" for expert in range(4)],
    ),
    ("mixed", "a shared vector"): (
        _copy(f"{UP}.rank0.suh", f"{LAYER}.shared_h.up_proj.rank0.suh"),
        [f"{LAYER}.shared_h.up_proj.rank0: shared rotations, but the layout is not shared_h_v1"],
    ),
}


ROWS = [(layout, *row) for (layout, _), row in BROKEN.items()]


@pytest.mark.parametrize("layout, change, messages", ROWS, ids=map(" - ".join, BROKEN))
def test_refusal(folders, layout, change, messages):
    with pytest.raises(CheckpointError) as refused:
        read(folders[layout], change)
    assert refused.value.problems == messages


def test_another_intermediate_size_is_refused(folders):
    with pytest.raises(CheckpointError) as refused:
        read(folders["ordinary"], moe_intermediate_size=300)
    why = "intermediate size 256 stored, want 384 for 300 as moe_intermediate_size says"
    assert refused.value.problems == [f"{LAYER}: {why}"]


def test_names_of_another_style(folders):
    """w1, w3 and w2 for gate, up and down; experts without a gate, whose projection into the middle is vLLM's w1."""
    other = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def rename(headers: Headers) -> None:
        for name in [name for name in headers if ".experts." in name]:
            parts = name.split(".")
            parts[-2] = other[parts[-2]]
            headers[".".join(parts)] = headers.pop(name)

    expected = read(folders["ordinary"]).experts[LAYER]
    got = read(folders["ordinary"], rename).experts[LAYER]
    assert {shard: p.name for shard, p in got.projections.items()} == {"w1": "w1", "w3": "w3", "w2": "w2"}
    assert all(got.projections[shard].halves == expected.projections[shard].halves for shard in got.projections)
    ungated = read(folders["ordinary"], _drop_all("gate_proj")).experts[LAYER]
    assert {shard: p.name for shard, p in ungated.projections.items()} == {"w1": "up_proj", "w2": "down_proj"}


def test_the_rates_of_the_metadata_must_be_those_of_the_tensors(folders, tmp_path):
    table = json.loads((folders["mixed"] / "tier_bitmap.json").read_text())
    real = table["1"]["k"]
    table["1"]["k"] = [7 - rate for rate in real]

    def read_json(name: str) -> object:
        return table if name == "tier_bitmap.json" else json.loads((folders["mixed"] / name).read_text())

    with pytest.raises(CheckpointError) as refused:
        contents.read_contents(read_json("config.json"), read_json, lambda: read_folder(folders["mixed"]), "here")
    assert refused.value.problems == [
        f"{LAYER}.{expert}.{name}.rank0.trellis: {rate} bits a weight, want {7 - rate} as the metadata says"
        for name in ("gate_proj", "up_proj", "down_proj")
        for expert, rate in enumerate(real)
    ]
