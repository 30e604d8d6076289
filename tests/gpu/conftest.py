# SPDX-License-Identifier: Apache-2.0
"""Kernel tests: need a CUDA card, torch and the compiled extension, which is built for this card if it is not there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "exl3"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a card."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def extension() -> None:
    """Load the extension, installed or from the build folder."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA card")
    from vllm.model_executor.layers.quantization.exl3_trellis import ops

    if not ops.EXTENSION.is_file():
        ops.EXTENSION = BUILD / ops.EXTENSION.name
        if not ops.EXTENSION.is_file():
            _build()
    ok, why = ops.load()
    assert ok, why


def _build() -> None:
    if shutil.which("cmake") is None or shutil.which("nvcc") is None:
        pytest.skip("the extension is not built, and cmake or nvcc is missing")
    major, minor = torch.cuda.get_device_capability()
    arch = "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
    torch_dir = Path(torch.__file__).parent
    configure = ["cmake", "-S", str(ROOT / "csrc" / "exl3"), "-B", str(BUILD), f"-DTORCH_DIR={torch_dir}"]
    subprocess.run([*configure, f"-DEXL3_ARCHS={arch}"], check=True)
    subprocess.run(["cmake", "--build", str(BUILD), "-j"], check=True)
