# SPDX-License-Identifier: Apache-2.0
"""What a converter writes about its work: `quantization_config` in config.json, and quantization_config.json."""

from __future__ import annotations

import math

from ..trellis import codebook, layout
from .files import TORCH_NAMES, Folder

CONVERTER = "1.6.5"  # the exllamav3 version these files imitate; formats do not branch on it


def modules(folder: Folder) -> dict[str, dict[str, tuple[str, tuple[int, ...], int]]]:
    """{module: {tensor: header}} of what was written, a tensor's module being its name less the last part."""
    grouped: dict[str, dict] = {}
    for name, header in folder.headers.items():
        grouped.setdefault(name.rpartition(".")[0], {})[name] = header
    return grouped


def average_bits(folder: Folder, head: bool) -> float:
    """Bits a weight over the EXL3 modules, of the head or of all the rest; 16 if there is none."""
    bits = weights = 0.0
    for name, (_, shape, size) in folder.headers.items():
        if name.endswith(".trellis") and name.endswith("lm_head.trellis") == head:
            bits += 8 * size
            weights += math.prod(shape[:2]) * layout.TILE_VALUES
    return bits / weights if weights else 16.0


def quantization_config(folder: Folder) -> dict:
    """The dictionary in config.json; `codebook` is the one most modules use."""
    trellises = [name.removesuffix(".trellis") for name in folder.headers if name.endswith(".trellis")]
    books = [next((b for b in codebook.CODEBOOKS if f"{key}.{b}" in folder.headers), "3inst") for key in trellises]
    return {
        "quant_method": "exl3",
        "version": CONVERTER,
        "bits": round(average_bits(folder, head=False), 2),
        "head_bits": round(average_bits(folder, head=True)),
        "calibration": {"rows": 0, "cols": 0},
        "out_scales": "auto",
        "codebook": max(sorted(set(books)), key=books.count) if books else "mcg",
    }


def tensor_storage(folder: Folder) -> dict:
    """The `tensor_storage` table of quantization_config.json."""
    table = {}
    for module, tensors in modules(folder).items():
        entry: dict = {
            "stored_tensors": {
                name: {"shape": list(shape), "n_bytes": size, "dtype": f"torch.{TORCH_NAMES[dtype]}"}
                for name, (dtype, shape, size) in tensors.items()
            }
        }
        words = tensors.get(f"{module}.trellis")
        if words:
            entry["quant_format"] = "exl3"
            rate = codebook.rate_of_tile_words(words[1][2])
            entry["bits_per_weight"] = int(rate) if rate == int(rate) else rate
        for book in codebook.CODEBOOKS.values():
            if f"{module}.{book.name}" in tensors:
                entry[f"{book.name}_multiplier"] = book.marker
        table[module] = entry
    return table


def write_configs(folder: Folder, config: dict, exl3: bool = True) -> None:
    """config.json, and for an EXL3 model its quantization section there and quantization_config.json."""
    if exl3:
        section = quantization_config(folder)
        folder.add_json("quantization_config.json", {**section, "tensor_storage": tensor_storage(folder)})
        config = {**config, "quantization_config": section}
    folder.add_json("config.json", config)
