"""What layers call, with the extension and without: `ops` and the backend `native`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.csrc.emulation import EMULATOR, KERNELS, TARGETS, load
from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native

ROOT = Path(__file__).resolve().parents[2]
WRAPPER = re.compile(r"^__device__ __forceinline__ \w+ (\w+)\(", re.MULTILINE)


@pytest.mark.parametrize("target", TARGETS)
def test_native_backend(target):
    """Operators, fused and reconstructed products, and torch's checks of schema and fake, on the emulated device."""
    command = [sys.executable, "-m", "tests.csrc.native_backend", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "native agrees\n"), done.stderr


@pytest.mark.parametrize("rows", [1, 8, 9, 17, 64, 65, 128, 129, 500])
@pytest.mark.parametrize("k, columns, shards, splits", [(128, 128, 1, 1), (384, 640, 3, 7), (4096, 1024, 8, 264)])
def test_scratch_is_sized_as_the_kernels_size_it(rows, k, columns, shards, splits):
    want = load("warp").ops.linear_scratch_bytes(rows, k, columns // 128, shards, splits)
    assert ops.fused_scratch_bytes(rows, k, columns, shards, splits) == want


@pytest.mark.parametrize("rows", [1, 256, 257, 2048])
@pytest.mark.parametrize("k, shards, sms", [(128, 1, 1), (4096, 8, 132)])
def test_scratch_for_many_rows_is_sized_as_the_kernel_sizes_it(rows, k, shards, sms):
    want = load("warp").ops.many_rows_scratch_bytes(rows, k, shards, sms)
    assert ops.many_scratch_bytes(rows, k, shards, sms) == want
    assert ops.many_scratch_bytes(3 * ops.MANY_SLICE, k, shards, sms) == ops.many_scratch_bytes(2048, k, shards, sms)


def test_numbers_agree_with_the_sources():
    header = (KERNELS / "exl3.h").read_text(encoding="utf-8")
    assert f"kMaxShards = {native.MAX_SHARDS};" in header
    assert f"kMaxFusedRows = {ops.ROW_TILES[-1]};" in header


def test_the_emulator_has_every_wrapper():
    for path in sorted(EMULATOR.glob("*.cuh")):
        wrapped = WRAPPER.findall((KERNELS / path.name).read_text(encoding="utf-8"))
        emulated = path.read_text(encoding="utf-8")
        assert wrapped
        assert [name for name in wrapped if not re.search(rf"\b{name}\(", emulated)] == [], path.name


def test_assembly_stays_in_the_files_that_the_emulator_replaces():
    for path in sorted(KERNELS.iterdir()):
        if path.suffix in (".cu", ".cuh") and not (EMULATOR / path.name).exists():
            assert not re.search(r"\basm\b", path.read_text(encoding="utf-8")), path.name


WITHOUT = """
from pathlib import Path
from vllm.model_executor.layers.quantization.exl3_trellis import ops
ops.EXTENSION = Path(__import__("sys").argv[1])
print(ops.load())
"""


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "_exl3_C.abi3.so is not installed: the wheel was built without csrc/exl3"),
        (b"no library", "_exl3_C.abi3.so does not load: "),
    ],
)
def test_imports_without_the_extension(tmp_path, content, reason):
    """And says why it is missing."""
    extension = tmp_path / "_exl3_C.abi3.so"
    if content:
        extension.write_bytes(content)
    command = [sys.executable, "-c", WITHOUT, str(extension)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"(False, {reason!r}"[:-1])


def test_operators_of_layers_have_fakes():
    """Shapes and types for torch.compile, which has no data."""
    shards = [256, 0, 200, 6, 128, 28, 100, 5]
    meta = [
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in ((1, torch.int16), (1, torch.half), (1, torch.half))
    ]
    x = torch.empty(7, 250, dtype=torch.bfloat16, device="meta")
    ours = ops.linear(x, *meta, 256, shards, 2, 3, 8, 0, 128, 90, 132)
    for result in (ours, ops.parity_linear(x, *meta, 256, shards, 2)):
        assert (tuple(result.shape), result.dtype) == ((7, 300), torch.bfloat16)
