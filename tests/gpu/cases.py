# SPDX-License-Identifier: Apache-2.0
"""Random layers and their float64 truth, for the kernel tests."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.codebook import HALF_RATES, WHOLE_RATES
from vllm.model_executor.layers.quantization.exl3_trellis.layout import trellis_shape
from vllm.model_executor.layers.quantization.exl3_trellis.reference import decode_rotated, hadamard

DEVICE = torch.device("cuda")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
SM90 = CAPABILITY == (9, 0)
BOOK_RATES = [(book, rate) for book in ("3inst", "mcg", "mul1") for rate in WHOLE_RATES]
BOOK_RATES += [("mul1", rate) for rate in HALF_RATES]
ROWS = [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 512, 2048]


@dataclass(frozen=True)
class Layer:
    """One quantized matrix: trellis [k/16, n/16, 16*rate] i16, suh [k] f16, svh [n] f16."""

    k: int
    n: int
    rate: float
    book: str
    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor

    @property
    def shard(self) -> list[int]:
        """The whole matrix, in the operator's terms."""
        return [self.n, 0, self.n, round(2 * self.rate)]

    @functools.cached_property
    def rotated(self) -> torch.Tensor:
        """Wr [k, n] f64."""
        return decode_rotated(self.trellis, self.book).double()

    def truth(self, x: torch.Tensor) -> torch.Tensor:
        """y [m, n] f64 of x [m, k'], k' <= k."""
        wide = torch.nn.functional.pad(x.double(), (0, self.k - x.shape[1]))
        return hadamard(hadamard(wide * self.suh.double()) @ self.rotated) * self.svh.double()


@functools.cache
def layer(k: int, n: int, rate: float, book: str, seed: int = 0) -> Layer:
    """A layer of random bits and scales between one half and three halves, of both signs."""
    g = torch.Generator(device=DEVICE).manual_seed(1000 * seed + round(2 * rate))
    trellis = torch.randint(-(1 << 15), 1 << 15, trellis_shape(k, n, rate), generator=g, device=DEVICE)

    def scales(count: int) -> torch.Tensor:
        signs = torch.randn(count, generator=g, device=DEVICE).sign()
        return (signs * (0.5 + torch.rand(count, generator=g, device=DEVICE))).half()

    return Layer(k, n, rate, book, trellis.to(torch.int16), scales(k), scales(n))


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative error |y - truth| / |truth|; NaN stays NaN and passes no comparison."""
    return ((y.double() - truth).norm() / truth.norm()).item()


def fused(of: Layer, x: torch.Tensor, splits: int = 11, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """y by the fused kernels, from poisoned scratch into a poisoned output."""
    y = torch.full((x.shape[0], of.n), float("nan"), dtype=dtype, device=DEVICE)
    size = ops.fused_scratch_bytes(x.shape[0], of.k, of.n, 1, splits)
    poison = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    code = ops.CODEBOOK_CODES[of.book]
    torch.ops.exl3.linear(y, x, of.trellis.view(-1), of.suh, of.svh, poison, of.k, of.shard, code, splits, True)
    return y


def many_rows(of: Layer, x: torch.Tensor, blocks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """y by SM90's kernel for many rows, from poisoned scratch into a poisoned output."""
    y = torch.full((x.shape[0], of.n), float("nan"), dtype=dtype, device=DEVICE)
    size = ops.many_scratch_bytes(x.shape[0], of.k, 1, blocks)
    poison = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    code = ops.CODEBOOK_CODES[of.book]
    torch.ops.exl3.linear_many_rows(y, x, of.trellis.view(-1), of.suh, of.svh, poison, of.k, of.shard, code, blocks)
    return y
