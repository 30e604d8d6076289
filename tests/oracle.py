# SPDX-License-Identifier: Apache-2.0
"""The truth for engine tests: what a checkpoint's model says, worked out without vLLM and without this project's code.

    oracle = Oracle(folder)
    oracle.logprobs([5, 9, 3])      # float32 [3, vocabulary]: log probabilities of the token after each
    oracle.next_logprobs([5, 9, 3]) # float32 [2]: of the tokens that do follow
    oracle.greedy([5, 9, 3], 8)     # the 8 tokens it would say

Weights are decoded here a second time, plainly, bit by bit from the description of the format, so that a misreading in
the overlay shows. The dense float32 model then runs in transformers. It expects a good checkpoint and checks little.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

# Names of tensors that together are one linear: ordinary, a slice of a wide MLP, a rank's slice of an expert.
LINEAR = re.compile(r"(?P<module>.*?)(\.slice\.(?P<slice>\d+)|\.rank(?P<rank>\d+))?\.trellis")


def states_of(trellis: np.ndarray) -> np.ndarray:
    """int16 [tiles, 16*K] -> uint32 [256, tiles]: the state of each position on the ring."""
    tiles, words = trellis.shape
    ring = 16 * words  # bits
    rate = ring / 256
    # Stream bit b is bit 31 - b % 32 of uint32 word b // 32: so the stream is the words' bytes, highest first.
    stream = np.unpackbits(trellis.view("<u4").astype(">u4").view(np.uint8), axis=1).T
    stream = np.ascontiguousarray(stream, dtype=np.uint16)  # one row a bit, so that what follows runs along rows
    assert stream.shape == (ring, tiles)
    states = np.zeros((256, tiles), dtype=np.uint16)
    end = 0
    for position in range(256):
        end += int(rate) if rate % 1 == 0 or position % 2 == 0 else int(rate) + 1
        for bit in range(end - 16, end):
            states[position] = states[position] << 1 | stream[bit % ring]
    return states.astype(np.uint32)


def values_of(states: np.ndarray, codebook: str) -> np.ndarray:
    """uint32 states -> float16 values."""
    if codebook == "mul1":
        x = states * np.uint32(0x83DCD12D)
        total = sum((x >> np.uint32(8 * byte)) & np.uint32(255) for byte in range(4))
        scale, shift = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        return ((1024 + total) * scale + shift).astype(np.float16)
    x = states * np.uint32(0xCBAC1FED) if codebook == "mcg" else states * np.uint32(89226354) + np.uint32(64248484)
    x = (x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    low, high = (half.astype(np.uint16).view(np.float16) for half in (x & np.uint32(0xFFFF), x >> np.uint32(16)))
    return low + high


def rotated_weight(trellis: np.ndarray, codebook: str) -> np.ndarray:
    """int16 [k/16, n/16, 16*K] -> float16 [k, n]."""
    rows, columns, words = trellis.shape
    values = values_of(states_of(trellis.reshape(-1, words)), codebook).reshape(256, rows, columns)
    weight = np.empty((rows, 16, columns, 16), dtype=np.float16)
    for position in range(256):
        t, j = position >> 3, position & 7
        row = (t & 3) * 2 + (j & 1) + 8 * ((j >> 1) & 1)
        column = (t >> 2) + 8 * ((j >> 2) & 1)
        weight[:, row, :, column] = values[position]
    return weight.reshape(rows * 16, columns * 16)


def hadamard_128() -> np.ndarray:
    """float32 [128, 128]: entry (i, j) is minus one to the number of bits that i and j share, over sqrt(128)."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    return (np.array(signs) / np.sqrt(128)).astype(np.float32)


HADAMARD = hadamard_128()


def dense_weight(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str) -> np.ndarray:
    """float32 [k, n]: diag(suh) H Wr H diag(svh)."""
    weight = rotated_weight(trellis, codebook).astype(np.float32)
    k, n = weight.shape
    weight = (weight.reshape(-1, 128) @ HADAMARD).reshape(k, n)
    weight = np.matmul(HADAMARD, weight.reshape(-1, 128, n)).reshape(k, n)
    return suh.astype(np.float32)[:, None] * weight * svh.astype(np.float32)[None, :]


def signs_of(packed: np.ndarray) -> np.ndarray:
    """Legacy int16 [c/16] -> float32 [c] of +1 and -1."""
    bits = [[(int(word) >> bit) & 1 for bit in range(16)] for word in packed]
    return 1 - 2 * np.array(bits, dtype=np.float32).reshape(-1)


class Checkpoint:
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path):
        self.files = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name.startswith("model"):  # others hold results kept beside a model
                handle = safe_open(path, framework="pt")
                self.files |= dict.fromkeys(handle.keys(), handle)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> torch.Tensor:
        return self.files[name].get_tensor(name)

    def vector(self, key: str, shared: str, side: str) -> np.ndarray:
        """A side vector: `suh` or `svh` of the module, of its layer's shared rotations, or unpacked from signs."""
        for name in (f"{key}.{side}", f"{shared}.{side}"):
            if name in self:
                return self.read(name).numpy()
        return signs_of(self.read(f"{key}.{side[:2]}").numpy())

    def linear(self, key: str) -> np.ndarray:
        """float32 [k, n]: the dense weight of one stored linear, padding included."""
        book = "mcg" if f"{key}.mcg" in self else "mul1" if f"{key}.mul1" in self else "3inst"
        shared = re.sub(r"\.experts\.\d+\.", ".experts.shared_h.", key)
        trellis = self.read(f"{key}.trellis").numpy()
        return dense_weight(trellis, self.vector(key, shared, "suh"), self.vector(key, shared, "svh"), book)


def expert_shape(module: str, config: dict) -> tuple[int, int] | None:
    """True (inputs, outputs) of a routed expert's projection, None for another module."""
    match = re.search(r"\.experts\.\d+\.(gate|up|down)_proj$", module)
    if not match:
        return None
    wide, narrow = config["hidden_size"], config["moe_intermediate_size"]
    return (narrow, wide) if match[1] == "down" else (wide, narrow)


def dense_tensors(folder: Path, config: dict, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """float32 tensors under the names of an unquantized checkpoint; `shapes` are those of the model's parameters."""
    stored = Checkpoint(folder)
    parts: dict[str, dict[int, str]] = {}  # module -> {number of the part: key}
    tensors = {}
    for name in stored.files:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= config["num_hidden_layers"]:
            continue  # drafts are not part of the target
        if match := LINEAR.fullmatch(name):
            number = int(match["slice"] or match["rank"] or 0)
            parts.setdefault(match["module"], {})[number] = name.removesuffix(".trellis")
        elif not name.endswith((".suh", ".svh", ".su", ".sv", ".mcg", ".mul1")):
            tensors[re.sub(r"\.slice\.\d+", "", name)] = stored.read(name).float()
    for module, keys in parts.items():
        # Slices and ranks share out the intermediate channels: outputs of gate and up, inputs of down.
        axis = 0 if module.endswith("down_proj") else 1
        weight = np.concatenate([stored.linear(keys[number]) for number in sorted(keys)], axis=axis)
        k, n = expert_shape(module, config) or reversed(shapes[f"{module}.weight"])
        tensors[f"{module}.weight"] = torch.from_numpy(np.ascontiguousarray(weight[:k, :n].T))
        if f"{module}.bias" in tensors:
            tensors[f"{module}.bias"] = tensors[f"{module}.bias"][:n].clone()
    return tensors


class Oracle:
    """The dense float32 model of a checkpoint folder, in transformers."""

    def __init__(self, folder: Path | str):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        for key in ("quantization_config", "hybrid_tr3_tail", "num_nextn_predict_layers"):
            config.pop(key, None)
        # A stored head wins over a configuration that says tied.
        config |= {"dtype": "float32", "num_mtp_layers": 0}
        text = config.get("text_config", config)  # nested where a tower for images wraps the model
        if any(name.startswith("lm_head.") for name in Checkpoint(folder).files):
            config["tie_word_embeddings"] = text["tie_word_embeddings"] = False
        auto = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
        with tempfile.TemporaryDirectory() as plain:
            (Path(plain) / "config.json").write_text(json.dumps(config))
            with torch.device("meta"):
                skeleton = auto.from_config(AutoConfig.from_pretrained(plain))
            shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
            tensors = dense_tensors(folder, text, shapes)
            save_file(tensors, Path(plain) / "model.safetensors", metadata={"format": "pt"})
            self.model, report = auto.from_pretrained(
                plain, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        if any(report.values()):
            raise ValueError(f"{folder}: the model and the decoded tensors do not match: {report}")
        self.model.eval()

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """float32 [len(ids), vocabulary]: log probability of every token after each prefix."""
        return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def next_logprobs(self, ids: list[int]) -> torch.Tensor:
        """float32 [len(ids) - 1]: log probability of each token but the first, given those before it."""
        return self.logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The `count` most probable tokens that follow, one at a time."""
        said = list(ids)
        for _ in range(count):
            said.append(int(self.logprobs(said)[-1].argmax()))
        return said[len(ids) :]
