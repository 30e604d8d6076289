# SPDX-License-Identifier: Apache-2.0
"""`python -m validate check-checkpoint DIR`: audit an EXL3 checkpoint from its headers and JSON; no weight is read.

Says what the checkpoint is, what it needs, how many bytes each rank holds, and all that is wrong with it at once.
Exit code 0: it can be served; 1: it has faults; 2: there is nothing to audit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import trellis

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.exl3_trellis import (
        checkpoint,
        contents,
        experts,
        placement,
        rank_sliced,
        safetensors_headers,
        slabs,
    )
else:
    checkpoint = trellis.load("checkpoint")
    contents = trellis.load("contents")
    experts = trellis.load("experts")
    placement = trellis.load("placement")
    rank_sliced = trellis.load("rank_sliced")
    safetensors_headers = trellis.load("safetensors_headers")
    slabs = trellis.load("slabs")

DTYPE_BYTES = {"trellis": 2, "suh": 2, "svh": 2, "su": 2, "sv": 2} | dict.fromkeys(checkpoint.MARKERS, 4)
Tensors = dict[str, "safetensors_headers.TensorInfo"]


class Audit:
    """One checkpoint, read as far as it can be; `faults` and `warnings` say where it could not."""

    def __init__(self, folder: Path, tp: int) -> None:
        self.folder = folder
        self.tp = tp
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self.places: dict[str, str] = {}  # tensor -> name of its file
        self.config = self._read_config()
        self.heads = self._read_heads()
        self.container = self._try(self._read_container)
        self.tensors = self._read_tensors()
        others, layers = experts.split_experts(self.tensors)
        self.linears = self._try(checkpoint.read_linears, others) or {}
        self.experts = self._read_experts(layers)
        self.faults += experts.strange_tensors(others, self.experts)
        self.faults += experts.model_disagreements(self.experts, self.config)
        if not self.faults and not self.linears and not self.experts:
            self.faults.append(f"{folder}: no tensor named *.trellis is there")
        self.warnings += checkpoint.storage_disagreements(folder, self.linears)
        self._check_tp()

    def _try(self, step: Any, *arguments: Any) -> Any:
        """The step's result; None where it found faults, which are kept."""
        try:
            return step(*arguments)
        except safetensors_headers.CheckpointError as error:
            self.faults += error.problems
        return None

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            self.faults.append(f"{name}: missing")
        except ValueError as error:
            self.faults.append(f"{name}: not JSON ({error})")
        return None

    def _read_config(self) -> dict[str, Any]:
        """config.json without what is not of the kind it should be, which is a fault."""
        config = self._json("config.json")
        if config is not None and not isinstance(config, dict):
            self.faults.append(f"config.json: holds a {type(config).__name__}, want an object")
        if not isinstance(config, dict):
            return {}
        for key in ("text_config", "quantization_config"):
            if not isinstance(config.get(key, {}), dict | None):
                self.faults.append(f"config.json: {key}: {config.pop(key)!r}, want an object")
        return config

    def _read_heads(self) -> int | None:
        """Attention heads, of the text model where there are several; None where there is no one number of them."""
        parts = (self.config, self.config.get("text_config") or {})
        found = [part["num_attention_heads"] for part in parts if "num_attention_heads" in part]
        for heads in found:
            if isinstance(heads, int) and heads > 0:
                return heads
        if found and not isinstance(found[-1], list):  # some models list them by layer
            self.faults.append(f"config.json: num_attention_heads: {found[-1]!r}, want a whole number, 1 or more")
        return None

    def _read_container(self) -> rank_sliced.RankSliced | None:
        def read_json(name: str) -> Any:
            return json.loads((self.folder / name).read_text())

        rank_sliced.believed_quantization(self.config, self.config.get("quantization_config"))
        return rank_sliced.read_metadata(self.config, read_json)

    def _read_tensors(self) -> Tensors:
        """Every readable header; a file at fault does not hide the others'."""
        tensors: Tensors = {}
        for path in self._try(safetensors_headers.weight_files, self.folder) or []:
            found = self._try(safetensors_headers.read_header, path) or {}
            for name in found.keys() & tensors.keys():
                self.faults.append(f"{path.name}: {name} is stored in {self.places[name]} too")
            self.places |= dict.fromkeys(found, path.name)
            tensors |= found
        index = self.folder / safetensors_headers.INDEX
        if index.is_file() and not self.faults:
            listed = safetensors_headers.read_index(self.folder)
            self.faults += [
                f"{index.name}: {name} is said to be in {file}, which does not hold it"
                for name, file in listed.items()
                if self.places.get(name) != file
            ]
            self.faults += [f"{index.name}: does not list {name}" for name in tensors.keys() - listed.keys()]
        return tensors

    def _read_experts(self, layers: Any) -> dict[str, experts.ExpertsSpec]:
        if self.container is not None or rank_sliced.SECTION not in self.config:
            return self._try(experts.read_experts, layers, self.container) or {}
        for prefix, modules in layers.items():  # the metadata is at fault: look at each module by itself
            for (expert, name, rank), module in modules.items():
                if expert != experts.SHARED and "trellis" in module:
                    key = f"{prefix}.{expert}.{name}" + ("" if rank is None else f".rank{rank}")
                    found = checkpoint.read_linear(key, module)[1]
                    self.faults += [fault for fault in found if "missing" not in fault]
        return {}

    def _check_tp(self) -> None:
        if self.tp > 1:
            self.faults += placement.split_blocks(self.linears, self.tp)
        self.faults += [
            slabs.tp_refusal(spec, self.intermediate(spec), self.tp, prefix)
            for prefix, spec in self.experts.items()
            if self.tp not in slabs.legal_tp(spec, self.intermediate(spec))
        ]

    def intermediate(self, spec: experts.ExpertsSpec) -> int:
        """The true intermediate size of all ranks together."""
        stored = (spec.ranks or 1) * spec.width
        for part in (self.config, self.config.get("text_config") or {}):
            true = part.get("moe_intermediate_size")
            if isinstance(true, int) and stored - 128 < true <= stored:
                return true
        return stored

    def layout(self) -> str:
        """What kind of checkpoint it is, in words."""
        if not self.experts:
            return "dense"
        if self.container is None:
            return "ordinary experts"
        rates = "/".join(map(str, self.container.rates))
        kind = "mixed" if self.container.by_layer else "uniform"
        rotations = "shared_h_v1" if self.container.shared_h else "per_expert_v1"
        return f"rank-sliced for {self.container.ranks}, {kind} K{rates}, {rotations}"

    def legal_tp(self) -> list[int]:
        """Tensor parallel sizes up to 64 that every layer can serve."""
        sizes = {size for size in range(1, 65) if (self.heads or 64) % size == 0}
        sizes = {size for size in sizes if size == 1 or not placement.split_blocks(self.linears, size)}
        for spec in self.experts.values():
            sizes &= set(slabs.legal_tp(spec, self.intermediate(spec)))
        return sorted(sizes)

    def rank_bytes(self) -> dict[str, int]:
        """Bytes of rank 0 at the asked tensor parallel size, when loaded and before any kernel prepares them."""
        held = 0
        for prefix, spec in self.experts.items():
            if self.tp in slabs.legal_tp(spec, self.intermediate(spec)):
                parts = slabs.local_parts(spec, self.intermediate(spec), self.tp, 0, prefix)
                held += sum(param.elements * DTYPE_BYTES[param.suffix] for param in slabs.expert_params(spec, parts))
        rest = sum(_bytes(info) for name, info in self.tensors.items() if not experts.EXPERT.fullmatch(name))
        return {"experts": held, "other_tensors_of_all_ranks": rest}

    def report(self) -> dict[str, Any]:
        """All of it, as JSON."""
        linears = Counter(f"{spec.codebook} {spec.rate:g}" for spec in self.linears.values())
        return {
            "checkpoint": str(self.folder),
            "layout": self.layout(),
            "tensors": len(self.tensors),
            "bytes": sum(map(_bytes, self.tensors.values())),
            "linears": dict(sorted(linears.items())),
            "experts": {
                prefix: {
                    "count": spec.count,
                    "hidden": spec.hidden,
                    "slice": spec.width,
                    "rates": experts.codebook_rates(spec),
                }
                for prefix, spec in self.experts.items()
            },
            "tensor_parallel_size": self.tp,
            "bytes_per_rank": self.rank_bytes(),
            "needs": {"tensor_parallel_sizes": self.legal_tp(), "codebooks": self._codebooks()},
            "warnings": self.warnings,
            "faults": self.faults,
        }

    def _codebooks(self) -> list[str]:
        tables = [experts.codebook_rates(spec) for spec in self.experts.values()]
        books = {label.split()[0] for table in tables for row in table.values() for label in row}
        return sorted(books | {spec.codebook for spec in self.linears.values()})


def _bytes(info: safetensors_headers.TensorInfo) -> int:
    size = safetensors_headers.DTYPE_BYTES.get(info.dtype, 0)
    for extent in info.shape:
        size *= extent
    return size


def _counts(row: dict[str, int]) -> str:
    return ", ".join(f"{count} x {label} bit" for label, count in row.items())


def describe(report: dict[str, Any]) -> str:
    """The report for people."""
    held = report["bytes_per_rank"]
    lines = [
        f"{report['checkpoint']}: {report['layout']}",
        f"  {report['tensors']} tensors, {report['bytes'] / 1e9:.3f} GB",
        "  linears: " + (_counts(report["linears"]) or "none in EXL3"),
    ]
    for prefix, layer in report["experts"].items():
        rates = {name: _counts(row) for name, row in layer["rates"].items()}
        same = len(set(rates.values())) == 1
        shown = next(iter(rates.values())) if same else "; ".join(f"{name} {row}" for name, row in rates.items())
        lines.append(f"  {prefix}: {layer['count']} experts {layer['hidden']} x {layer['slice']}: {shown}")
    sizes = ", ".join(map(str, report["needs"]["tensor_parallel_sizes"])) or "none"
    own, rest = held["experts"] / 1e9, held["other_tensors_of_all_ranks"] / 1e9
    tp = report["tensor_parallel_size"]
    lines += [
        f"  tensor parallel size {tp}: each rank holds {own:.3f} GB of routed experts and its part of {rest:.3f} GB",
        f"  needs: tensor parallel size {sizes}; codebooks {', '.join(report['needs']['codebooks']) or 'none'}",
    ]
    lines += [f"  warning: {warning}" for warning in report["warnings"]]
    lines += [f"  FAULT: {fault}" for fault in report["faults"]]
    lines.append(f"  {len(report['faults'])} faults" if report["faults"] else "  no faults")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Audit one checkpoint. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m validate check-checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, help="tensor parallel size (default: the ranks stored, else 1)")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"check-checkpoint: {options.folder}: no such folder", file=sys.stderr)
        return 2
    if options.tp is not None and options.tp < 1:
        print(f"check-checkpoint: --tp {options.tp}, want 1 or more", file=sys.stderr)
        return 2
    tp = options.tp
    if tp is None:
        tp = _stored_ranks(options.folder)
    with contents.without_collections():
        report = Audit(options.folder, tp).report()
    print(json.dumps(report, indent=2) if options.json else describe(report))
    return 1 if report["faults"] else 0


def _stored_ranks(folder: Path) -> int:
    try:
        ranks = json.loads((folder / "config.json").read_text())[rank_sliced.SECTION]["tp"]
    except (OSError, ValueError, KeyError, TypeError):
        return 1
    return ranks if isinstance(ranks, int) and ranks > 0 else 1
