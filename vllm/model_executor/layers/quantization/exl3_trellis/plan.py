"""Choose a kernel provider for a layer: query + device -> frozen plan, or reasons why not.

Knows what a layer needs and what a device is; knows nothing of vLLM, and nothing of how a provider
computes.  Providers live in `backends/`, one module each, in the order `auto` tries them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .backends import Backend


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a layer will run.  Numbers come from the driver, never from a product name."""

    kind: str  # "cuda" or "cpu"
    sm: int = 0  # compute capability, 90 for 9.0
    sms: int = 0  # multiprocessors
    smem: int = 0  # bytes of shared memory one block may opt in to

    @staticmethod
    def of(device: torch.device) -> Device:
        """Describe a torch device."""
        if device.type != "cuda":
            return Device(kind=device.type)
        import torch

        props = torch.cuda.get_device_properties(device)
        return Device(
            kind="cuda",
            sm=10 * props.major + props.minor,
            sms=props.multi_processor_count,
            smem=props.shared_memory_per_block_optin,
        )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One output of a linear layer, on this rank.

    The stored trellis has `n` columns, a multiple of 128; the layer's output is its columns
    [first, first + width).  `first` is not 0 only where a tensor parallel cut falls inside a block of 128
    outputs: the whole block is kept, since its Hadamard transform needs it, and the rest is cut away.
    """

    n: int
    width: int
    rate: float  # bits per weight: 1..8, or 1.5, 2.5, 3.5
    codebook: str  # "3inst", "mcg" or "mul1"
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class LinearQuery:
    """What a linear layer asks of a provider: y[m, sum of widths] = x[m, width] through its shards."""

    k: int  # rows of every trellis, a multiple of 128
    width: int  # columns of the activations; those up to k are zero
    shards: tuple[Shard, ...]  # outputs side by side; several where vLLM merges projections
    io_dtype: str  # "float16", "bfloat16" or "float32": activations and outputs
    max_rows: int  # the most rows one call may bring

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return sum(shard.width for shard in self.shards)

    def __str__(self) -> str:
        parts = ", ".join(f"{s.codebook} {s.rate:g} bit x {s.n}" for s in self.shards)
        return f"linear {self.k} -> [{parts}] {self.io_dtype}"


class NoBackendError(RuntimeError):
    """No provider can run the query; the message lists every refusal."""


def choose(query: LinearQuery, device: Device, candidates: tuple[Backend, ...], forced: str | None = None) -> Backend:
    """Return the first provider that can run `query` on `device`.

    Args:
        query: the layer.
        device: where it will run.
        candidates: providers in order of preference.
        forced: name of the only provider to consider (VLLM_EXL3_BACKEND), or None for `auto`.

    Raises:
        NoBackendError: none can; the message holds each one's reason.
    """
    refusals = []
    for backend in candidates:
        if forced is not None and backend.name != forced:
            continue
        ok, why = backend.can_run(query, device)
        if ok:
            return backend
        refusals.append(f"{backend.name}: {why}")
    names = ", ".join(backend.name for backend in candidates)
    reasons = "; ".join(refusals) or f"{forced!r} is not one of {names}"
    raise NoBackendError(f"no EXL3 kernel for {query} on {device}: {reasons}")


def self_check(error: float, limit: float, what: str) -> None:
    """Refuse a kernel whose output disagrees with the reference on this very device.

    Args:
        error: relative error, |y - reference| / |reference|; NaN never passes.
        limit: the largest error allowed.
        what: provider and query, for the message.
    """
    if math.isnan(error) or error > limit:
        raise NoBackendError(f"{what} disagrees with the reference: relative error {error:.2e}, at most {limit:.0e} allowed")


Plan = Any  # a provider's own frozen plan; `workspace_bytes` is the one attribute all have
