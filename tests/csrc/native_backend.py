"""Runs the backend `native` on the emulated device: its plan, its operators and its start-up check, whole.

For a process of its own: it registers the operators of layers for the CPU, and hands out scratch without streams.
"""

from __future__ import annotations

import sys

import torch

from tests.csrc import emulation
from tests.csrc.memory import Arena
from tests.csrc.shards import error, random_shard, random_x
from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device

CPU = torch.device("cpu")
SM90 = Device(kind="cuda", sm=90, sms=2, smem=232_448)
SM120 = Device(kind="cuda", sm=120, sms=2, smem=101_376)
MERGED = [
    random_shard(256, 256, 3, "mul1", first=0, width=200),
    random_shard(256, 128, 2.5, "mul1", first=28, width=100),
]


def prepare(target: str) -> None:
    emulation.load(target, "exl3").block_launches()
    library = torch.library.Library("exl3_trellis", "FRAGMENT")
    library.impl("linear", ops._linear, "CPU")
    globals()["_library"] = library  # registrations live as long as it does
    arena = Arena()
    ops.scratch = lambda _x, size: arena.empty((size,), torch.uint8, align=256)  # NaN
    card = SM90 if target == "warpgroup" else SM120
    native.Device.of = staticmethod(lambda _device: card)


def check_merged(rows: int, fused_rows: int, many_rows: int = 0) -> None:
    """The operator that layers call, under torch's own checks of schemas and fake tensors, then against float64."""
    x = random_x(rows, 256, torch.bfloat16)
    shards = [number for shard in MERGED for number in (shard.n, shard.first, shard.width, shard.rate2)]
    tensors = [torch.cat([getattr(shard, name).view(-1) for shard in MERGED]) for name in ("trellis", "suh", "svh")]
    arguments = (x, *tensors, 256, shards, ops.CODEBOOK_CODES["mul1"], 3, fused_rows, many_rows, 128, 90, 2)
    torch.library.opcheck(ops.linear, arguments, test_utils=("test_schema", "test_faketensor"))
    want = torch.cat([shard.product(x) for shard in MERGED], dim=1)
    got = error(ops.linear(*arguments), want)
    assert got < 5e-3, f"{rows} rows, up to {fused_rows} fused, up to {many_rows} by SM90's kernel: error {got}"


if __name__ == "__main__":
    prepare(sys.argv[1])
    assert ops.load() == (True, "")
    native.check_kernels(CPU, "mcg", 3.0, "bfloat16")
    check_merged(rows=5, fused_rows=8)
    check_merged(rows=5, fused_rows=0)
    if sys.argv[1] == "warpgroup":
        check_merged(rows=5, fused_rows=0, many_rows=8)
    print("native agrees")
