# SPDX-License-Identifier: Apache-2.0
"""All that a checkpoint holds in EXL3: its linears and its routed experts, read from headers and JSON alone.

    config.json, tier bitmap, tensor headers  ->  Contents, or one error with every fault

Needs neither torch nor, for a local folder, vLLM.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import LinearSpec, read_linears
from .experts import ExpertsSpec, model_disagreements, read_experts, split_experts, strange_tensors
from .rank_sliced import RankSliced, believed_quantization, read_metadata
from .safetensors_headers import CheckpointError, TensorInfo, read_folder


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The EXL3 modules of a checkpoint, by the checkpoint's own names."""

    linears: dict[str, LinearSpec]
    experts: dict[str, ExpertsSpec]  # by prefix, "model.layers.3.mlp.experts"
    container: RankSliced | None = None


def read_contents(
    config: Mapping[str, Any],
    read_json: Callable[[str], Any],
    read_tensors: Callable[[], Mapping[str, TensorInfo]],
    where: str,
) -> Contents:
    """Read and check a checkpoint; metadata first, so that a wrong container is refused before its headers are read.

    Args:
        config: config.json.
        read_json: gives the content of another JSON file of the checkpoint.
        read_tensors: gives every tensor's header.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: with every fault found.
    """
    believed_quantization(config, config.get("quantization_config"))
    container = read_metadata(config, read_json)
    linears: dict[str, LinearSpec] = {}
    experts: dict[str, ExpertsSpec] = {}
    problems: list[str] = []
    with without_collections():
        others, layers = split_experts(read_tensors())
        try:
            linears = read_linears(others)
        except CheckpointError as error:
            problems += error.problems
        try:
            experts = read_experts(layers, container)
        except CheckpointError as error:
            problems += error.problems
        problems += strange_tensors(others, experts) + model_disagreements(experts, config)
        del others, layers
    if not problems and not linears and not experts:
        problems.append(f"{where}: the config says exl3, but no tensor named *.trellis is there")
    if problems:
        raise CheckpointError(problems)
    return Contents(linears=linears, experts=experts, container=container)


@contextmanager
def without_collections() -> Iterator[None]:
    """A million headers are millions of objects, none of them garbage: walking them all again and again would take
    longer than reading them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_local(folder: Path) -> Contents:
    """The contents of the checkpoint in `folder`.

    Raises:
        CheckpointError: with every fault found.
    """

    def read_json(name: str) -> Any:
        return json.loads((folder / name).read_text())

    try:
        config = read_json("config.json") if (folder / "config.json").is_file() else {}
    except ValueError as error:
        raise CheckpointError([f"{folder / 'config.json'}: not JSON ({error})"]) from None
    return read_contents(config, read_json, lambda: read_folder(folder), str(folder))
