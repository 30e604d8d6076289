# SPDX-License-Identifier: Apache-2.0
"""An unquantized EAGLE head drafts for a model stored as EXL3."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.engine.scoring import greedy
from tests.engine.test_mtp import PROMPTS
from validate.__main__ import main as validate

# A head takes twice the hidden size and gives it back, as the second projection of this MLP does.
SIZES = "dense --hidden 256 --heads 4 --kv-heads 2 --head-dim 64 --intermediate 512 --vocab 512 --context 512"
FUSED = "model.layers.0.mlp.down_proj.weight"


def make(folder: Path, options: str) -> Path:
    form, *sizes = SIZES.split()
    assert validate(["make-checkpoint", form, str(folder), *sizes, *options.split()]) == 0
    return folder


def make_head(folder: Path) -> Path:
    """One layer under the names that EAGLE gives it, without the norm in front of it."""
    plain = make(folder, "--layers 1 --plain * --seed 2")
    tensors = load_file(plain / "model.safetensors")
    head = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.layers.0.")}
    del head["layers.0.input_layernorm.weight"]
    save_file(head | {"fc.weight": tensors[FUSED].clone()}, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "quantization_config.json").unlink(missing_ok=True)
    return plain


def test_drafts_of_an_unquantized_head_change_no_token(engine, tmp_path):
    target, head = make(tmp_path / "target", "--layers 2 --rates 3,4"), make_head(tmp_path / "head")
    alone = engine(target, enable_prefix_caching=False)
    expected = [greedy(alone, ids, 12) for ids in PROMPTS]
    speculation = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    llm = engine(target, speculative_config=speculation, disable_log_stats=False, enable_prefix_caching=False)
    assert [greedy(llm, ids, 12) for ids in PROMPTS] == expected
    drafted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")
    assert drafted >= 2 * len(PROMPTS)
