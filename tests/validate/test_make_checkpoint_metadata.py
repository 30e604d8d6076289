# SPDX-License-Identifier: Apache-2.0
"""What synthetic checkpoints say about themselves, and which ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.validate.checkpoints import config_of, headers, make
from validate.__main__ import main

EXAMPLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "glm4moe-rank-sliced-mixed-tp2"


def test_quantization_config_describes_the_tensors(tmp_path):
    folder = make(tmp_path / "made", "dense --codebook mul1 --rates 2.5,4 --head-rate 6 --plain *.o_proj")
    side = config_of(folder, "quantization_config.json")
    storage = side.pop("tensor_storage")
    assert config_of(folder)["quantization_config"] == side
    assert side["quant_method"] == "exl3"
    assert (side["codebook"], side["head_bits"]) == ("mul1", 6)
    assert 2.5 < side["bits"] < 4
    tensors = {name: tensor for module in storage.values() for name, tensor in module["stored_tensors"].items()}
    types = {"I16": "torch.int16", "I32": "torch.int32", "F16": "torch.float16", "BF16": "torch.bfloat16"}
    assert {name: (tensor["dtype"], tensor["shape"]) for name, tensor in tensors.items()} == {
        name: (types[dtype], shape) for name, (dtype, shape) in headers(folder).items()
    }
    modules = {
        name: (module["quant_format"], module["bits_per_weight"])
        for name, module in storage.items()
        if "quant_format" in module
    }
    assert modules["lm_head"] == ("exl3", 6)
    assert modules["model.layers.0.self_attn.q_proj"] == ("exl3", 2.5)
    assert "model.layers.0.self_attn.o_proj" not in modules


def test_metadata_of_mixed_rank_sliced(tmp_path):
    form = "moe --layout shared_h --rates 3,4 --mtp 1 --layers 4 --experts 16 --layer-tiers 2=0,16 --tiers 9,7"
    folder = make(tmp_path / "made", form)
    config, found = config_of(folder), headers(folder)
    assert config["quantization_config"]["quant_method"] == "modelopt"
    tail = config["hybrid_tr3_tail"]
    want = {
        "format": "exl3-trellis", "bits": "mixed", "codebook": "mcg", "experts_per_layer": 16, "moe_layers": [1, 4],
        "tensor_schema": "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}", "tp": 2,
        "k_values": [3, 4], "bits_per_expert": "tier_bitmap.json:k", "rotation_layout": "shared_h_v1",
        "shared_h_tensor_schema": "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}",
    }  # fmt: skip
    assert {key: tail.get(key) for key in want} == want
    bitmap = config_of(folder, "tier_bitmap.json")
    assert set(bitmap) == {"1", "2", "3", "4"}
    assert all(entry["tail_tr3"] == list(range(16)) for entry in bitmap.values())
    assert "k" not in bitmap["4"], "an MTP layer is uniform at the base rate without saying so"
    assert bitmap["2"]["k"] == [4] * 16
    assert sorted(bitmap["1"]["k"]) == sorted(bitmap["3"]["k"]) == [3] * 9 + [4] * 7
    assert bitmap["1"]["k"] != bitmap["3"]["k"]
    for layer, entry in bitmap.items():
        for expert, rate in enumerate(entry.get("k", [3] * 16)):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.rank1.trellis"
                assert found[name][1][2] == 16 * rate


@pytest.mark.parametrize(
    "options, want",
    [
        ("", {"bits": 4}),
        ("--name-rotation", {"bits": 4, "rotation_layout": "per_expert_v1"}),
        ("--no-shim", {"bits": 4}),
    ],
)
def test_metadata_of_uniform_rank_sliced(options, want, tmp_path):
    folder = make(tmp_path / "made", f"moe --layout per_expert --rates 4 --tp 1 {options}")
    config = config_of(folder)
    optional = ("bits", "k_values", "bits_per_expert", "rotation_layout", "shared_h_tensor_schema")
    assert {key: config["hybrid_tr3_tail"][key] for key in optional if key in config["hybrid_tr3_tail"]} == want
    assert ("quantization_config" in config) == (options != "--no-shim")
    assert not (folder / "tier_bitmap.json").exists()


@pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the example checkpoint is not part of the project")
def test_like_the_example(tmp_path):
    """An independent implementation of the format wrote the example: same names, dtypes, shapes and metadata."""
    form = "moe --layout per_expert --rates 3,4 --tp 2 --head-dim 64 --kv-heads 4 --context 512"
    folder = make(tmp_path / "made", form)
    mine, theirs = (
        headers(folder),
        {k: v for k, v in headers(EXAMPLE).items() if not k.startswith(("ids", "logp", "top"))},
    )

    def but_rates(tensors: dict) -> dict:
        return {
            name: (dtype, shape[:2] if name.endswith(".trellis") else shape) for name, (dtype, shape) in tensors.items()
        }

    assert but_rates(mine) == but_rates(theirs)
    config, example = config_of(folder), config_of(EXAMPLE)
    informational = ("exllamav3_version",)
    want = {key: value for key, value in example["hybrid_tr3_tail"].items() if key not in informational}
    assert config.pop("hybrid_tr3_tail") == want
    for key in ("hybrid_tr3_tail", "transformers_version", "pad_token_id"):
        example.pop(key)
    config.pop("pad_token_id")
    assert config == example
    bitmap, like = config_of(folder, "tier_bitmap.json"), config_of(EXAMPLE, "tier_bitmap.json")
    assert {layer: list(entry) for layer, entry in bitmap.items()} == {
        layer: list(entry) for layer, entry in like.items()
    }


def test_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make(tmp_path / "made", "dense --vocab 300"))
    text = "Two\twörds — 你好\n" + "".join(map(chr, range(256)))
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 300
    assert tokenizer.decode([299]) == "<299>", "every id that the model can emit has a text"
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert said == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("<think>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<think>")]


@pytest.mark.parametrize(
    "form, message",
    [
        ("dense --rate 2.5", "codebook mcg: 2.5 bits a weight, want one of 1, 2, 3, 4, 5, 6, 7, 8"),
        ("dense --codebook mul1 --head-rate 1.5 --rates 3 --codebook mcg,mul1",
         "codebook mcg: 1.5 bits a weight, want one of 1, 2, 3, 4, 5, 6, 7, 8"),
        ("dense --vocab 200", "vocabulary of 200, want at least 268: tags and the 256 bytes"),
        ("dense --slices 3 --intermediate 300", "300 channels in 3 slices: want at least 128 each"),
        ("dense --heads 0", "--heads 0, want at least 1"),
        ("moe --layout shared_h --tp 4", "moe-intermediate 256 over 4 ranks: want a multiple of 512"),
        ("moe --layout per_expert --rates 3,3", "rates (3.0, 3.0), want each once"),
        ("moe --layout per_expert --rates 3 --tiers 8",
         "tiers (8,) for rates (3.0,): want one count for each of several rates"),
        ("moe --layout per_expert --rates 3,4 --layer-tiers 1=5,4", "tiers (5, 4) of layer 1: 9 experts, want 8"),
        ("moe --layout per_expert --signs packed", "--signs with --layout per_expert: the layout has none to choose"),
        ("moe --family qwen3_moe --mtp 1",
         "family qwen3_moe has no MTP layers; want one of glm4_moe, deepseek_v3, glm_moe_dsa"),
    ],
)  # fmt: skip
def test_refusals(form, message, tmp_path, capsys):
    name, *options = form.split()
    assert main(["make-checkpoint", name, str(tmp_path / "made"), *options]) == 2
    assert capsys.readouterr().err == f"make-checkpoint: {message}\n"
    assert not list((tmp_path / "made").glob("*")), "nothing is left half-written"


def test_refuses_a_full_folder(tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert main(["make-checkpoint", "dense", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"make-checkpoint: {tmp_path}: not empty; want a new or empty folder\n"


@pytest.mark.parametrize("option, message", [
    ("--rates 4.5", "4.5 bits a weight, want a whole number 1..8 or 1.5, 2.5, 3.5"),
    ("--codebooks mcg,x", "codebook 'x', want one of 3inst, mcg, mul1"),
    ("--shard-size 5parsec", "'5parsec', want a size such as 800000, 5MB or 2GB"),
])  # fmt: skip
def test_refuses_bad_options(option, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["make-checkpoint", "dense", str(tmp_path), *option.split()])
    assert capsys.readouterr().err.strip().endswith(message)
