"""A checkpoint that says what a script says: every token decides the next, and its MTP layer knows the script too.

All attention and expert layers are real EXL3 and run, but nothing they say gets into the residual stream (their output
scales are zero).  Embeddings are one-hot, and the head looks the next token up.  Where a grammar forbids the first
choice, the next one is taken; a token without a script is followed by whatever has the lowest id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from validate.__main__ import main as validate

WIDTH = 512  # hidden size and vocabulary: one channel a token
SILENT = re.compile(r".*\.(o_proj|down_proj)(\.rank\d+)?\.svh")
MODEL = (
    f"--family glm4_moe --layers 2 --experts 4 --drafts 1 --agreeing --hidden {WIDTH} --vocab {WIDTH} "
    "--context 1024 --plain lm_head"  # and so the draft's copy of it
)


def write_scripted(folder: Path, script: Mapping[str, tuple[str, ...]]) -> None:
    """Write the checkpoint.

    Args:
        folder: new.
        script: token -> what follows it, the first choice first.  Texts that are no tokens yet become some.
    """
    assert validate(["make-checkpoint", "moe", str(folder), *MODEL.split()]) == 0
    ids = _add_tokens(folder, [*script, *(token for choices in script.values() for token in choices)])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if SILENT.fullmatch(name):
            tensor.zero_()
    one_hot = torch.eye(WIDTH, dtype=torch.bfloat16)
    table = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)  # [next token, token]
    for token, choices in script.items():
        for rank, choice in enumerate(choices):
            table[ids[choice], ids[token]] = 2.0**-rank
    for name in tensors:
        if name.endswith("embed_tokens.weight"):
            tensors[name] = one_hot.clone()
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensors[name] = table.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _add_tokens(folder: Path, texts: list[str]) -> dict[str, int]:
    """Turn fillers of the vocabulary into tokens for the texts that are none; returns the ids of all texts."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    fillers = [token for token in vocabulary if re.fullmatch(r"<\d+>", token)]
    added = {entry["content"] for entry in tokenizer["added_tokens"]}
    flags = {key: value for key, value in tokenizer["added_tokens"][-1].items() if key not in ("id", "content")}
    ids = {}
    for text in dict.fromkeys(texts):
        key = text.replace("\n", "Ċ") if len(text) == 1 else text
        if key not in vocabulary:
            vocabulary[key] = vocabulary.pop(fillers.pop(0))
        ids[text] = vocabulary[key]
        if len(text) > 1 and text not in added:  # a text in a prompt is that one token too
            tokenizer["added_tokens"].append({"id": ids[text], "content": text, **flags})
    tokenizer["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    tokenizer["added_tokens"].sort(key=lambda entry: entry["id"])
    path.write_text(json.dumps(tokenizer))
    return ids
