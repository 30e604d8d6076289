# SPDX-License-Identifier: Apache-2.0
"""Routed experts as a checkpoint stores them: from the names, dtypes and shapes of their tensors to one spec a layer.

    ordinary     PREFIX.{expert}.{projection}.{trellis|suh|svh|mcg|mul1|su|sv}
    rank-sliced  PREFIX.{expert}.{projection}.rank{r}.{trellis|suh|svh|mcg}
                 PREFIX.shared_h.{projection}.rank{r}.{suh|svh}               shared rotations only

A model may have hundreds of thousands of these, so a spec keeps a byte or two for each module and no name.  No torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import MARKERS, SUFFIXES, LinearSpec, read_linear
from .layout import padded
from .rank_sliced import EXPERT_COUNTS, SECTION, RankSliced
from .safetensors_headers import CheckpointError, TensorInfo

EXPERT = re.compile(rf"(.+\.experts)\.(\d+|shared_h)\.(\w+)(?:\.rank(\d+))?\.({'|'.join(SUFFIXES)})")
# vLLM's shard id of each projection -> the names that checkpoints give it.
PROJECTIONS = {"w1": ("gate_proj", "w1"), "w3": ("up_proj", "w3"), "w2": ("down_proj", "w2")}
SHARDS = {name: shard for shard, names in PROJECTIONS.items() for name in names}
SHARED = "shared_h"
HIDDEN_SIDE = {"w1": "suh", "w3": "suh", "w2": "svh"}  # the vector that shared rotations share

Key = tuple[str, str, str | None]  # expert or "shared_h", projection, rank
Module = dict[str, TensorInfo]  # suffix -> tensor


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One projection of all experts of a layer."""

    name: str  # in the checkpoint
    halves: bytes  # [experts]: twice the rate, in bits a weight
    stored: bytes  # [experts]: bit i is set where SUFFIXES[i] is stored

    def rate(self, expert: int) -> float:
        """Bits a weight of one expert."""
        return self.halves[expert] / 2

    def has(self, expert: int, suffix: str) -> bool:
        """Whether the checkpoint holds this tensor for the expert."""
        return bool(self.stored[expert] >> SUFFIXES.index(suffix) & 1)

    def codebook(self, expert: int) -> str:
        """Name of the expert's codebook."""
        return next((marker for marker in MARKERS if self.has(expert, marker)), "3inst")


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The routed experts of one layer."""

    count: int
    hidden: int  # channels of the hidden side, padded as stored
    width: int  # channels of the intermediate side of one slice, padded as stored
    projections: Mapping[str, Projection]  # by vLLM's shard id; without "w3" where there is no gate
    ranks: int | None = None  # slices stored of each expert; None: not rank-sliced
    shared_h: bool = False

    def sizes(self, shard: str) -> tuple[int, int]:
        """(inputs, outputs) of a stored module."""
        return (self.width, self.hidden) if shard == "w2" else (self.hidden, self.width)


def split_experts(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], dict[str, dict[Key, Module]]]:
    """Separate the EXL3 tensors of routed experts, by prefix and module, from all others."""
    others: dict[str, TensorInfo] = {}
    layers: dict[str, dict[Key, Module]] = defaultdict(lambda: defaultdict(dict))
    for name, info in tensors.items():
        match = EXPERT.fullmatch(name) if ".experts." in name else None
        if match is None:
            others[name] = info
            continue
        prefix, expert, projection, rank, suffix = match.groups()
        # A value is checked when it is loaded: one seek for each of so many scalars would take minutes on a cold disk.
        layers[prefix][expert, projection, rank][suffix] = info._replace(file=None) if suffix in MARKERS else info
    return others, layers


def read_experts(
    layers: Mapping[str, Mapping[Key, Module]], container: RankSliced | None, files: str = "the files"
) -> dict[str, ExpertsSpec]:
    """The spec of each layer's experts, by prefix.

    Args:
        layers: what `split_experts` found.
        container: the rank-sliced metadata, None where config.json has none.
        files: what to call the place the tensors come from.

    Raises:
        CheckpointError: with every fault found, tensor by tensor.
    """
    specs: dict[str, ExpertsSpec] = {}
    problems: list[str] = []
    wanted = container.names() if container else {}
    for prefix, modules in layers.items():
        if any(rank is not None for _, _, rank in modules) and prefix not in wanted:
            why = f"{SECTION}.moe_layers does not name this layer" if container else f"config.json has no {SECTION}"
            problems.append(f"{prefix}: rank-sliced, but {why}")
            continue
        spec, found = _Layer(prefix, modules, container, wanted.get(prefix)).read()
        problems += found
        if spec is not None:
            specs[prefix] = spec
    missing = [prefix for prefix in wanted if prefix not in layers]
    problems += [f"{prefix}: not in {files}, though {SECTION}.moe_layers names its layer" for prefix in missing]
    if problems:
        raise CheckpointError(problems)
    return specs


class _Layer:
    """Reads the experts of one layer; collects what is wrong with them."""

    def __init__(self, prefix: str, modules: Mapping[Key, Module], container: RankSliced | None, layer: int | None):
        self.prefix = prefix
        self.modules = modules
        self.container = container if layer is not None else None
        self.wanted = container.by_layer.get(layer) if container and layer is not None else None
        self.shared = self.container is not None and self.container.shared_h
        self.problems: list[str] = []
        self.good: dict[tuple, LinearSpec] = {}

    def read(self) -> tuple[ExpertsSpec | None, list[str]]:
        names = self._names()
        experts = sorted({int(expert) for expert, _, _ in self.modules if expert != SHARED})
        count = self.container.experts if self.container else (experts[-1] + 1 if experts else 0)
        if not names or not count:
            return None, self.problems or [f"{self.prefix}: no {' or '.join(SHARDS)} of an expert"]
        ranks: list[str | None] = [None]
        if self.container:
            ranks = [str(rank) for rank in range(self.container.ranks)]
        self._refuse_strangers(set(names.values()), count, ranks)
        sizes: set[tuple[int, int]] = set()
        projections = {shard: self._projection(shard, name, count, ranks, sizes) for shard, name in names.items()}
        self._check_rates(projections)
        if len(sizes) > 1:
            want = " or ".join(f"{hidden} x {width}" for hidden, width in sorted(sizes))
            why = f"experts of different sizes: {want}, want one hidden x intermediate size"
            self.problems.append(f"{self.prefix}: {why}")
        if self.problems or not sizes:
            return None, self.problems
        hidden, width = sizes.pop()
        stored = self.container.ranks if self.container else None
        spec = ExpertsSpec(
            count=count, hidden=hidden, width=width, projections=projections, ranks=stored, shared_h=self.shared
        )
        return spec, []

    def _names(self) -> dict[str, str]:
        """Shard id -> the name that this checkpoint gives the projection."""
        found = {projection for _, projection, _ in self.modules}
        for name in sorted(found - SHARDS.keys()):
            self.problems.append(f"{self.prefix}: projection {name!r}, want one of {', '.join(SHARDS)}")
        names = {SHARDS[name]: name for name in sorted(found & SHARDS.keys())}
        if "w1" not in names and "w3" in names:
            names["w1"] = names.pop("w3")  # without a gate vLLM calls the one projection into the middle w1
        for shard in ("w1", "w2"):
            if names and shard not in names:
                self.problems.append(f"{self.prefix}: no {PROJECTIONS[shard][0]}")
                return {}
        return {shard: names[shard] for shard in PROJECTIONS if shard in names}

    def _refuse_strangers(self, names: set[str], count: int, ranks: list[str | None]) -> None:
        """Modules beyond the experts and ranks that there should be."""
        for (expert, name, rank), module in self.modules.items():
            key = self._key(expert, name, rank)
            if name not in names:
                continue
            if expert == SHARED:
                if not self.shared:
                    self.problems.append(f"{key}: shared rotations, but the layout is not shared_h_v1")
            elif int(expert) >= count or str(int(expert)) != expert:
                self.problems.append(f"{key}: expert {expert}, want 0..{count - 1}")
            if rank not in ranks:
                want = f"rank 0..{len(ranks) - 1}" if self.container else "no rank"
                self.problems.append(f"{key}: {'no rank' if rank is None else f'rank {rank}'}, want {want}")
            if self.container and "mul1" in module:
                self.problems.append(f"{key}.mul1: codebook mul1, want mcg as {SECTION}.codebook says")

    def _key(self, expert: int | str, name: str, rank: str | None) -> str:
        return f"{self.prefix}.{expert}.{name}" + (f".rank{rank}" if rank is not None else "")

    def _projection(
        self, shard: str, name: str, count: int, ranks: list[str | None], sizes: set[tuple[int, int]]
    ) -> Projection:
        """Read every module of one projection; adds the (hidden, intermediate) sizes seen to `sizes`."""
        halves, masks = bytearray(count), bytearray(count)
        side = HIDDEN_SIDE[shard]
        for rank in ranks:
            shared = self.modules.get((SHARED, name, rank), {}) if self.shared else {}
            if self.shared and set(shared) != {side}:
                held = ", ".join(shared) or "nothing"
                self.problems.append(f"{self._key(SHARED, name, rank)}: holds {held}, want {side}")
            for expert in range(count):
                key = self._key(expert, name, rank)
                module = self.modules.get((str(expert), name, rank))
                if module is None:
                    self.problems.append(f"{key}.trellis: missing")
                    continue
                if self.shared and side in module:
                    self.problems.append(f"{key}.{side}: stored for one expert, though the layout is shared_h_v1")
                mask = sum(1 << SUFFIXES.index(suffix) for suffix in module if not (self.shared and suffix == side))
                spec, found = self._read(key, {**module, side: shared[side]} if side in shared else module)
                self.problems += found
                if spec is None or found:
                    continue
                sizes.add((spec.n, spec.k) if shard == "w2" else (spec.k, spec.n))
                if self.container and spec.codebook != "mcg" and "mul1" not in module:
                    self.problems.append(f"{key}.mcg: missing: codebook {spec.codebook}, want mcg")
                twice = round(2 * spec.rate)
                if halves[expert] and (halves[expert], masks[expert]) != (twice, mask):
                    self.problems.append(f"{key}: rate or tensors differ from those of rank{ranks[0]}")
                halves[expert], masks[expert] = twice, mask
        return Projection(name=name, halves=bytes(halves), stored=bytes(masks))

    def _read(self, key: str, module: Module) -> tuple[LinearSpec | None, list[str]]:
        """`read_linear`, asked once for all modules that look the same and are in order."""
        looks = tuple((suffix, info.dtype, info.shape) for suffix, info in module.items())
        if looks in self.good:
            return self.good[looks], []
        spec, found = read_linear(key, module)
        if spec is not None and not found:
            self.good[looks] = spec
        return spec, found

    def _check_rates(self, projections: Mapping[str, Projection]) -> None:
        """The rates that metadata gives must be those of the tensors; where it gives none, they must be one of them."""
        if self.container is None:
            return
        allowed = self.container.rates
        for projection in projections.values():
            uniform = projection.halves[0] / 2
            for expert, twice in enumerate(projection.halves):
                if not twice:
                    continue  # reported already
                rate, want = twice / 2, self.wanted[expert] if self.wanted else uniform
                if rate != want or rate not in allowed:
                    shown = f"{want:g}" if want in allowed else " or ".join(map(str, allowed))
                    name = self._key(expert, projection.name, "0")
                    self.problems.append(f"{name}.trellis: {rate:g} bits a weight, want {shown} as the metadata says")


STRANGE = re.compile(rf"(.+\.experts)\.(\d+)\.(.+)\.({'|'.join((*SUFFIXES, 'bias'))})")


def strange_tensors(others: Mapping[str, TensorInfo], experts: Mapping[str, ExpertsSpec]) -> list[str]:
    """Tensors beside those of EXL3 experts that would be left out in silence: biases, slices of a projection."""
    problems = []
    for name in others:
        match = STRANGE.fullmatch(name) if ".experts." in name else None
        if match and (match[4] != "bias" or match[1] in experts):
            problems.append(f"{name}: not supported of a routed expert; want {', '.join(SUFFIXES)} of a projection")
    return problems


def model_disagreements(experts: Mapping[str, ExpertsSpec], config: Mapping[str, Any]) -> list[str]:
    """Where the experts are not as many, or not of the size, that config.json says; what it omits is not asked."""
    text = {**(config.get("text_config") or {}), **config}
    problems = []
    for prefix, spec in experts.items():
        for key in EXPERT_COUNTS:
            if isinstance(text.get(key), int) and text[key] != spec.count:
                problems.append(f"{prefix}: {spec.count} experts stored, want {text[key]} as {key} says")
        middle, stored = text.get("moe_intermediate_size"), spec.width * (spec.ranks or 1)
        if isinstance(middle, int) and padded(middle) != stored:
            why = f"intermediate size {stored} stored, want {padded(middle)} for {middle} as moe_intermediate_size says"
            problems.append(f"{prefix}: {why}")
    return problems


def codebook_rates(spec: ExpertsSpec) -> dict[str, dict[str, int]]:
    """For reports: projection name -> {"mcg 3": number of experts}."""
    table: dict[str, dict[str, int]] = {}
    for projection in spec.projections.values():
        row = table.setdefault(projection.name, {})
        for expert in range(spec.count):
            label = f"{projection.codebook(expert)} {projection.rate(expert):g}"
            row[label] = row.get(label, 0) + 1
    return {name: dict(sorted(row.items())) for name, row in table.items()}
