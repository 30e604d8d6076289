# SPDX-License-Identifier: Apache-2.0
"""Where a model's headers are: a folder, the hub client's cache, or the hub itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contents import Contents, read_contents
from .safetensors_headers import INDEX, SINGLE, CheckpointError, TensorInfo, read_folder

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def local_folder(model: str, revision: str | None) -> Path | None:
    """The folder that holds the model's safetensors: `model` itself, or its snapshot in the hub cache; else None."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return snapshot if any(snapshot.glob("*.safetensors")) else None


def weight_patterns(model_config: ModelConfig) -> list[str] | None:
    """The only files that vLLM's loader may read of an EXL3 checkpoint, or None for its own choice.

    Without an index the loader reads every safetensors file of a folder, and stops at the first tensor that belongs to
    none of the model's modules.
    """
    if model_config.quantization != "exl3":
        return None
    folder = local_folder(model_config.model, model_config.revision)
    if folder is None or (folder / INDEX).is_file() or not (folder / SINGLE).is_file():
        return None
    return [SINGLE]


def model_contents(model: str, revision: str | None) -> Contents:
    """The EXL3 modules of a model, wherever its headers are.

    A draft that shares its target's folder asks again: what was read of a folder is kept until its files change.

    Raises:
        CheckpointError: with every fault found.
    """
    folder = local_folder(model, revision)
    if folder is None:
        return _read(model, revision, None)
    return _read_unchanged(model, revision, folder, _state(folder))


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time of change and size of every file that `_read` may read."""
    files = (path for pattern in ("*.json", "*.safetensors") for path in folder.glob(pattern))
    return tuple(sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@lru_cache(maxsize=2)
def _read_unchanged(
    model: str, revision: str | None, folder: Path, state: tuple[tuple[str, int, int], ...]
) -> Contents:
    return _read(model, revision, folder)


def _read(model: str, revision: str | None, folder: Path | None) -> Contents:
    def read_json(name: str) -> Any:
        if folder is not None and ((folder / name).is_file() or folder == Path(model)):
            return json.loads((folder / name).read_text())
        return _hub_json(model, revision, name)

    try:
        config = read_json("config.json")
    except FileNotFoundError:
        config = {}
    except ValueError as error:
        raise CheckpointError([f"{model}: config.json: not JSON ({error})"]) from None
    return read_contents(
        config, read_json, lambda: read_folder(folder) if folder else remote_tensors(model, revision), model
    )


def _hub_json(model: str, revision: str | None, name: str) -> Any:
    from vllm.transformers_utils.config import get_hf_file_to_dict

    content = get_hf_file_to_dict(name, model, revision)
    if content is None:
        raise FileNotFoundError(f"not in {model}")
    return content


def remote_tensors(model: str, revision: str | None) -> Mapping[str, TensorInfo]:
    """The headers of a model on the hub, without its weights.

    Raises:
        CheckpointError: they could not be read.
    """
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    metadata = get_safetensors_params_metadata(model, revision=revision)
    if not metadata:
        why = "no folder, not in the hub cache, and its safetensors headers could not be read"
        raise CheckpointError([f"{model}: {why}; download it first"])
    return {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in metadata.items()}
