# SPDX-License-Identifier: Apache-2.0
"""Last step of the build: what was installed imports, and is of the versions that belong together."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import sysconfig
from pathlib import Path


def release_of(package: str) -> str:
    """13.0 of 13.0.88."""
    return ".".join(importlib.metadata.version(package).split(".")[:2])


def main() -> int:
    said = json.loads(Path(__file__).with_name("build.json").read_text())
    import torch

    import vllm
    from vllm.model_executor.layers.quantization import get_quantization_config

    found = {
        "vllm": (vllm.__version__, said["version"]),
        "vllm's metadata": (importlib.metadata.version("vllm"), said["version"]),
        "torch": (torch.__version__.partition("+")[0], said["torch"]),
        "Python": (f"{sys.version_info.major}.{sys.version_info.minor}", said["python"]),
        "the exl3 method": (get_quantization_config("exl3").__name__, "EXL3Config"),
    }
    if said["target"] == "cuda":  # what compiles at run time includes these headers, which refuse another compiler
        compiler, headers = (release_of(f"nvidia-cuda-{name}") for name in ("nvcc", "runtime"))
        found["nvcc"] = (compiler, headers)
    wrong = [f"{name} is {have}, want {want}" for name, (have, want) in found.items() if have != want]
    library = Path(vllm.__file__).parent / "model_executor/layers/quantization/exl3_trellis/_exl3_C.abi3.so"
    if said["target"] == "cuda":
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            wrong.append(f"the compiled extension does not load with torch {torch.__version__}: {error}")
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            wrong.append("Python.h is missing, which Triton compiles with; want a base image with Python's headers")
    if said["exllamav3"]:
        try:
            importlib.import_module("exllamav3_ext")
        except ImportError as error:
            wrong.append(f"exllamav3's extension does not load with torch {torch.__version__}: {error}")
    for line in wrong:
        print(f"handshake: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
