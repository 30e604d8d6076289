# SPDX-License-Identifier: Apache-2.0
"""Where a model's headers are: a folder, the hub client's cache, or the hub itself.

    folder                          it
    hub id, downloaded as a whole   its snapshot in the cache
    hub id, partly or not at all    the hub: vLLM's loader downloads, or goes on downloading, what is not there
    s3://, gs://, az://             refused: vLLM hands over a folder with the JSON alone

A folder that vLLM filled is told from a user's by its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contents import Contents, read_contents
from .safetensors_headers import INDEX, SINGLE, CheckpointError, TensorInfo, read_folder, read_index

if TYPE_CHECKING:
    from vllm.config import ModelConfig

MOST_NAMED = 4  # files in a message


def local_folder(model: str, revision: str | None) -> Path | None:
    """The folder that holds all of the model's safetensors: `model` itself, or its snapshot in the hub cache."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    snapshot = _snapshot(model, revision)
    return snapshot if snapshot is not None and not _absent(snapshot) else None


def _snapshot(model: str, revision: str | None) -> Path | None:
    """What the hub client's cache has of the model, which may be a part."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _absent(snapshot: Path) -> list[str]:
    """The files of weights that a snapshot lacks; empty too where its index cannot be read, so that reading says so."""
    try:
        listed = sorted(set(read_index(snapshot).values()))
    except FileNotFoundError:
        return [] if (snapshot / SINGLE).is_file() else [f"{INDEX} or {SINGLE}"]
    except CheckpointError:
        return []
    return [name for name in listed if not (snapshot / name).is_file()]


def _require_weights(folder: Path) -> None:
    """Refuse a folder that vLLM made, not the user, and that lacks weights.

    Raises:
        CheckpointError: the JSON of a model in object storage, or the unfinished download that HF_HUB_OFFLINE makes
            vLLM take instead of the hub's id.
    """
    import vllm.envs as envs

    if folder.parent == Path(envs.VLLM_ASSETS_CACHE, "model_streamer"):
        why = "the headers of a model in object storage (s3://, gs://, az://) cannot be read before it is loaded"
        raise CheckpointError([f"{why} (vLLM keeps only its JSON, in {folder}); want a folder or a hub id"])
    if folder.parent.name == "snapshots" and (absent := _absent(folder)):
        if not (folder / INDEX).is_file() and any(folder.glob("*.safetensors")):
            return  # files by names of their own: who knows how many there are
        raise CheckpointError([_unfinished(folder, absent)])


def _tensors_here(snapshot: Path) -> set[str]:
    """The tensors of a snapshot's index whose files are there."""
    if not (snapshot / INDEX).is_file():
        return set()
    return {tensor for tensor, name in read_index(snapshot).items() if (snapshot / name).is_file()}


def _unfinished(snapshot: Path, absent: list[str]) -> str:
    names = ", ".join(absent[:MOST_NAMED]) + (f" and {len(absent) - MOST_NAMED} more" if absent[MOST_NAMED:] else "")
    return f"{snapshot}: not downloaded as a whole: {names} missing; download it first"


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
    _require_weights(folder)
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
    metadata.pop("__metadata__", None)  # of a file's own header, which is what upstream takes from the cache
    snapshot = _snapshot(model, revision)
    if snapshot is not None and (absent := _absent(snapshot)) and set(metadata) <= _tensors_here(snapshot):
        # The hub was not reached: upstream falls back to what is in the cache.
        raise CheckpointError([_unfinished(snapshot, absent)])
    if not metadata:
        why = "no folder, not in the hub cache, and its safetensors headers could not be read"
        raise CheckpointError([f"{model}: {why}; download it first"])
    return {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in metadata.items()}
