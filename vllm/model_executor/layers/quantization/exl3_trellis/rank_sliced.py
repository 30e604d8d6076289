# SPDX-License-Identifier: Apache-2.0
"""Rank-sliced containers: what the `hybrid_tr3_tail` section of config.json, and the bitmap it names, say of experts.

Routed experts are cut per tensor parallel rank before they are encoded, so each slice has Hadamard blocks and a trellis
of its own.  The section is the truth even where `quantization_config` claims another method, for other engines.
Decides everything that metadata can decide; the tensors are compared with it in `experts`.  No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .codebook import CODEBOOKS
from .safetensors_headers import CheckpointError

SECTION = "hybrid_tr3_tail"
FORMAT = "exl3-trellis"
MIXED = "mixed"
CODEBOOK = "mcg"
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
SHARED_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
PREFIX = "model.layers.{layer}.mlp.experts"
PER_EXPERT, SHARED_H = "per_expert_v1", "shared_h_v1"
OTHER_FORMATS = ("r7_routed_experts", "exl3-v1", "btx")  # containers that share a name with EXL3, and nothing else
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")  # in config.json, by family


@dataclass(frozen=True, kw_only=True)
class RankSliced:
    """A container whose metadata is in order."""

    ranks: int  # slices stored of each expert
    experts: int  # of each layer
    layers: tuple[int, int]  # first and last with experts, both included; the last may be an MTP layer
    shared_h: bool  # vectors of the hidden side are stored once per layer, projection and rank
    rates: tuple[int, ...]  # that some expert may have, ascending
    by_layer: Mapping[int, bytes] = field(default_factory=dict)  # mixed: the rate of each expert; absent: one for all

    def names(self) -> dict[str, int]:
        """Prefix of the tensors of each layer's experts -> layer."""
        return {PREFIX.format(layer=layer): layer for layer in range(self.layers[0], self.layers[1] + 1)}


def believed_quantization(config: Mapping[str, Any], claimed: dict[str, Any] | None) -> dict[str, Any] | None:
    """The `quantization_config` that vLLM should believe: ours where config.json has a rank-sliced section.

    Args:
        config: config.json.
        claimed: its own `quantization_config`, or the one of a file beside it.

    Raises:
        CheckpointError: the experts are in a container that is not EXL3, whatever its name.
    """
    words = {key for key in OTHER_FORMATS if key in config}
    for section in (claimed or {}, _section(config)):
        words |= {str(section.get(key)) for key in ("quant_method", "format")}
    for name in OTHER_FORMATS:
        if name in words:
            why = "another container, which is not supported; want EXL3 tensors"
            raise CheckpointError([f"config.json: {name}: {why}"])
    return {"quant_method": "exl3", SECTION: config[SECTION]} if SECTION in config else claimed


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get(SECTION)
    return section if isinstance(section, Mapping) else {}


def read_metadata(config: Mapping[str, Any], read_json: Callable[[str], Any]) -> RankSliced | None:
    """The rank-sliced container that `config` describes; None where it describes none.

    Args:
        config: config.json.
        read_json: gives the content of another JSON file of the checkpoint, or raises OSError or ValueError.

    Raises:
        CheckpointError: with every fault found.
    """
    if SECTION not in config:
        return None
    section = config[SECTION]
    if not isinstance(section, Mapping):
        raise CheckpointError([f"config.json: {SECTION}: {section!r}, want an object"])
    problems = _check_literals(section)
    for key in ("tp", "experts_per_layer"):
        if not _whole(section.get(key), 1):
            problems.append(_fault(key, section.get(key), "a whole number, 1 or more"))
    problems += _check_experts(section, config) + _check_layers(section, config)
    mixed = section.get("bits") == MIXED
    rates, found = _mixed_rates(section) if mixed else _uniform_rate(section)
    problems += found
    by_layer: dict[int, bytes] = {}
    if mixed and not problems:
        by_layer, problems = _read_bitmap(section, rates, read_json)
    if problems:
        raise CheckpointError(problems)
    return RankSliced(
        ranks=section["tp"],
        experts=section["experts_per_layer"],
        layers=tuple(section["moe_layers"]),
        shared_h=section.get("rotation_layout") == SHARED_H,
        rates=rates,
        by_layer=by_layer,
    )


def _fault(key: str, found: Any, want: str) -> str:
    return f"config.json: {SECTION}.{key}: {'missing' if found is None else repr(found)}, want {want}"


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_literals(section: Mapping[str, Any]) -> list[str]:
    """Faults of the keys that must have one of a few values."""
    shared = section.get("rotation_layout") == SHARED_H
    rows: list[tuple[str, tuple[Any, ...]]] = [
        ("format", (FORMAT,)),
        ("codebook", (CODEBOOK,)),
        ("tensor_schema", (TENSOR_SCHEMA,)),
        ("rotation_layout", (None, PER_EXPERT, SHARED_H)),
        ("shared_h_tensor_schema", (SHARED_SCHEMA,) if shared else (None,)),
    ]
    problems = []
    for key, wanted in rows:
        found = section.get(key)
        if not any(found == value for value in wanted):
            want = " or ".join("no such key" if value is None else repr(value) for value in wanted)
            problems.append(_fault(key, found, want))
    return problems


def _check_experts(section: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The container must hold as many experts as the model has."""
    stored = section.get("experts_per_layer")
    for part in (config, config.get("text_config") or {}):
        for key in EXPERT_COUNTS:
            if _whole(part.get(key), 1):
                want = f"{part[key]}, as {key} says"
                return [] if stored == part[key] else [_fault("experts_per_layer", stored, want)]
    return [f"config.json: no {' or '.join(EXPERT_COUNTS)}: the model has no routed experts for {SECTION}"]


def _check_layers(section: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """`moe_layers` must be two layers of the model, in order; MTP layers follow the others."""
    layers = section.get("moe_layers")
    text = config if "num_hidden_layers" in config else config.get("text_config") or {}
    count = text.get("num_hidden_layers", 0) + (text.get("num_nextn_predict_layers") or 0)
    if not isinstance(layers, list) or len(layers) != 2 or not all(_whole(layer, 0) for layer in layers):
        return [_fault("moe_layers", layers, "[first, last]")]
    if not layers[0] <= layers[1] < count:
        return [_fault("moe_layers", layers, f"first <= last < {count}, the model's layers with its MTP layers")]
    return []


def _uniform_rate(section: Mapping[str, Any]) -> tuple[tuple[int, ...], list[str]]:
    bits = section.get("bits")
    problems = [
        _fault(key, section[key], f'no such key unless bits is "{MIXED}"')
        for key in ("k_values", "bits_per_expert")
        if section.get(key) not in (None, [bits])
    ]
    if not _whole(bits, 1) or bits not in CODEBOOKS[CODEBOOK].rates:
        return (), [*problems, _fault("bits", bits, f'a whole number 1..8, or "{MIXED}"')]
    return (bits,), problems


def _mixed_rates(section: Mapping[str, Any]) -> tuple[tuple[int, ...], list[str]]:
    values = section.get("k_values")
    want = "a list of different whole numbers 1..8"
    if not isinstance(values, list) or not values or not all(_whole(value, 1) for value in values):
        return (), [_fault("k_values", values, want)]
    if len(set(values)) != len(values) or not all(value in CODEBOOKS[CODEBOOK].rates for value in values):
        return (), [_fault("k_values", values, want)]
    return tuple(sorted(values)), []


def _read_bitmap(
    section: Mapping[str, Any], rates: tuple[int, ...], read_json: Callable[[str], Any]
) -> tuple[dict[int, bytes], list[str]]:
    """The rate of each expert of each layer that lists them, and what is wrong with the file that does."""
    where = section.get("bits_per_expert")
    match = re.fullmatch(r"([^/\\:]+\.json):(\w+)", where) if isinstance(where, str) else None
    if match is None:
        return {}, [_fault("bits_per_expert", where, '"file.json:field", a file beside config.json')]
    name, key = match.groups()
    try:
        table = read_json(name)
    except (OSError, ValueError) as error:
        return {}, [f"{name}: unreadable ({error}); {SECTION}.bits_per_expert names it"]
    if not isinstance(table, Mapping):
        return {}, [f"{name}: {type(table).__name__}, want an object with an entry per layer"]
    by_layer: dict[int, bytes] = {}
    problems: list[str] = []
    for layer in range(section["moe_layers"][0], section["moe_layers"][1] + 1):
        entry = table.get(str(layer))
        found = _check_entry(f"{name}: layer {layer}", entry, key, rates, section["experts_per_layer"])
        problems += found
        if not found and isinstance(entry, Mapping) and key in entry:
            by_layer[layer] = bytes(entry[key])
    return by_layer, problems


def _check_entry(where: str, entry: Any, key: str, rates: tuple[int, ...], experts: int) -> list[str]:
    """Faults of one layer's entry: a rate for each expert, or every expert in `tail_tr3`."""
    if not isinstance(entry, Mapping):
        return [f"{where}: {'missing' if entry is None else repr(entry)}, want an object with {key!r}"]
    tail = entry.get("tail_tr3")
    if tail is not None and (not isinstance(tail, list) or sorted(map(str, tail)) != sorted(map(str, range(experts)))):
        held = f"{len(tail)} experts" if isinstance(tail, list) else repr(tail)
        return [f"{where}: tail_tr3: {held}, want all {experts}: experts kept in another format are not supported"]
    values = entry.get(key)
    if values is None:
        return [] if tail is not None else [f"{where}: neither {key!r} nor 'tail_tr3', want one of them"]
    if not isinstance(values, list) or len(values) != experts:
        held = f"{len(values)} entries" if isinstance(values, list) else repr(values)
        return [f"{where}: {key}: {held}, want {experts}, one for each expert"]
    wrong = [expert for expert, value in enumerate(values) if not _whole(value, 1) or value not in rates]
    if wrong:
        want = " or ".join(map(str, rates))
        more = f" and {len(wrong) - 1} more experts" if len(wrong) > 1 else ""
        return [f"{where}: {key}: expert {wrong[0]} has {values[wrong[0]]!r}{more}, want {want}"]
    return []
