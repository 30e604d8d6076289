# SPDX-License-Identifier: Apache-2.0
"""Routed experts cut per tensor-parallel rank before encoding, and the `hybrid_tr3_tail` metadata that says so.

Rank r of gate and up owns I/tp output channels, of down the same input channels; each slice has its own Hadamard blocks
and trellis. With shared rotations the vectors on the hidden side exist once per layer, projection and rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..trellis import codebook, layout
from .linears import Encoding, Weights

LAYOUTS = {"per_expert": "per_expert_v1", "shared_h": "shared_h_v1"}
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
SHARED_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
BITMAP = "tier_bitmap.json"
CODEBOOK = "mcg"  # the only one the container has


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """How the experts of a rank-sliced checkpoint are stored.

    layout       a key of LAYOUTS
    named        write `rotation_layout` even where its absence means the same
    ranks        tensor-parallel ranks stored
    rates        one: uniform; several: mixed, one of them per layer and expert, the first being the base rate
    tiers        mixed: experts of each rate in a layer; empty: drawn, other numbers in each layer
    layer_tiers  mixed: the same for single layers
    """

    layout: str
    named: bool = False
    ranks: int = 2
    rates: tuple[float, ...] = (3.0,)
    tiers: tuple[int, ...] = ()
    layer_tiers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}, want one of {', '.join(LAYOUTS)}")
        for rate in self.rates:
            codebook.codebook(CODEBOOK).check_rate(rate)
        if len(set(self.rates)) != len(self.rates):
            raise ValueError(f"rates {self.rates}, want each once")
        for counts in (self.tiers, *self.layer_tiers.values()):
            if counts and (len(counts) != len(self.rates) or not self.mixed or min(counts) < 0):
                raise ValueError(f"tiers {counts} for rates {self.rates}: want one count for each of several rates")

    @property
    def mixed(self) -> bool:
        """Whether experts of a layer may differ in rate."""
        return len(self.rates) > 1

    def counts(self, layer: int, experts: int) -> tuple[int, ...]:
        """How many experts of a layer have each rate; empty: to be drawn. ValueError unless they are all experts."""
        counts = self.layer_tiers.get(layer, self.tiers)
        if counts and sum(counts) != experts:
            raise ValueError(f"tiers {counts} of layer {layer}: {sum(counts)} experts, want {experts}")
        return counts

    def check_width(self, intermediate: int) -> int:
        """Channels of one rank's slice; ValueError unless they are whole Hadamard blocks."""
        if intermediate % (self.ranks * layout.BLOCK):
            want = self.ranks * layout.BLOCK
            raise ValueError(f"moe-intermediate {intermediate} over {self.ranks} ranks: want a multiple of {want}")
        return intermediate // self.ranks


def expert_rates(slicing: Slicing, seed: int, layer: int, experts: int) -> list[int]:
    """The rate of each expert of a layer, in random order. Drawn counts give each rate at least one expert."""
    rates = [int(rate) for rate in slicing.rates]
    random = np.random.default_rng([seed, layer, zlib.crc32(b"rates")])
    counts = slicing.counts(layer, experts)
    if counts:
        chosen = [rate for rate, count in zip(rates, counts, strict=True) for _ in range(count)]
    else:
        shares = random.dirichlet([4.0] * len(rates))
        chosen = rates + list(random.choice(rates, max(0, experts - len(rates)), p=shares))
    return [int(rate) for rate in random.permutation(chosen[:experts])]


def metadata(slicing: Slicing, layers: range, experts: int) -> dict:
    """The `hybrid_tr3_tail` section of config.json."""
    rates = [int(rate) for rate in slicing.rates]
    section: dict = {
        "format": "exl3-trellis",
        "bits": "mixed" if slicing.mixed else rates[0],
        "codebook": CODEBOOK,
        "experts_per_layer": experts,
        "moe_layers": [layers[0], layers[-1]],
        "tp": slicing.ranks,
        "tensor_schema": TENSOR_SCHEMA,
        "mcg_multiplier": codebook.codebook(CODEBOOK).marker,
        "scope": "routed experts",
    }
    if slicing.mixed:
        section |= {"k_values": sorted(rates), "bits_per_expert": f"{BITMAP}:k"}
    if slicing.layout != "per_expert" or slicing.named:
        section["rotation_layout"] = LAYOUTS[slicing.layout]
    if slicing.layout == "shared_h":
        section["shared_h_tensor_schema"] = SHARED_SCHEMA
    return section


def bitmap(slicing: Slicing, seed: int, layers: range, experts: int, last_layer: int) -> dict:
    """tier_bitmap.json. MTP layers, those from `last_layer` on, are uniform at the base rate and list no `k`."""
    table = {}
    for layer in layers:
        entry = {"keep_nvfp4": [], "tail_tr3": list(range(experts))}
        if layer < last_layer:
            entry = {"k": expert_rates(slicing, seed, layer, experts)} | entry
        table[str(layer)] = entry
    return table


def shim() -> dict:
    """A `quantization_config` for engines that know nothing of the experts' real format."""
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "shim"}, "ignore": ["lm_head"]}


def add_experts(
    weights: Weights, key: str, hidden: int, intermediate: int, rates: list[int], slicing: Slicing, gain: float
) -> None:
    """All slices of the routed experts of one layer, `key` being `model.layers.{L}.mlp.experts`."""
    width = slicing.check_width(intermediate)
    if slicing.layout == "shared_h":
        for rank in range(slicing.ranks):
            encoding = Encoding(codebook=CODEBOOK, rate=rates[0])  # scales do not depend on the rate
            weights.inputs(f"{key}.shared_h.gate_proj.rank{rank}", hidden, encoding)
            weights.inputs(f"{key}.shared_h.up_proj.rank{rank}", hidden, encoding)
            scale = weights.scale(intermediate, encoding, gain)
            weights.outputs(f"{key}.shared_h.down_proj.rank{rank}", hidden, encoding, scale)
    for expert, rate in enumerate(rates):
        for rank in range(slicing.ranks):
            _add_slice(
                weights,
                f"{key}.{expert}",
                rank,
                hidden,
                width,
                intermediate,
                Encoding(codebook=CODEBOOK, rate=rate),
                slicing.layout == "shared_h",
                gain,
            )


def _add_slice(
    weights: Weights,
    key: str,
    rank: int,
    hidden: int,
    width: int,
    intermediate: int,
    encoding: Encoding,
    shared: bool,
    gain: float,
) -> None:
    """gate, up and down of one expert on one rank; `shared`: without the vectors on the hidden side."""
    for name in ("gate_proj", "up_proj"):
        part = f"{key}.{name}.rank{rank}"
        weights.trellis(part, hidden, width, encoding)
        if not shared:
            weights.inputs(part, hidden, encoding)
        weights.outputs(part, width, encoding, weights.scale(hidden, encoding))
    part = f"{key}.down_proj.rank{rank}"
    weights.trellis(part, width, hidden, encoding)
    weights.inputs(part, width, encoding)
    if not shared:
        # The ranks' partial outputs are summed: scale by all the channels that go into the sum.
        weights.outputs(part, hidden, encoding, weights.scale(intermediate, encoding, gain))
