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
    fused: bool = True  # False: the parity path, exllamav3's kernels or decoded weights and a plain product

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return sum(shard.width for shard in self.shards)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The shards as operators take them: n, first, width and 2 * rate of each."""
        return tuple(
            number for shard in self.shards for number in (shard.n, shard.first, shard.width, round(2 * shard.rate))
        )

    def __str__(self) -> str:
        parts = ", ".join(f"{s.codebook} {s.rate:g} bit x {s.n}" for s in self.shards)
        return f"linear {self.k} -> [{parts}] {self.io_dtype}"


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What happens between the two products of an expert; `name` is vLLM's, the numbers are those it comes with."""

    name: str  # "silu", "gelu", ..., or with "_no_mul" where there is no gate
    limit: float | None = None  # clamps the gate from above and the other projection from both sides
    alpha: float = 1.0  # of sigmoid(alpha * gate)
    beta: float = 0.0  # added to the other projection

    @property
    def gated(self) -> bool:
        """Whether two projections go into it."""
        return not self.name.endswith("_no_mul")


@dataclass(frozen=True, kw_only=True)
class Bank:
    """One projection of all experts: data, which may differ from layer to layer, and nothing to compile for."""

    rates: tuple[float, ...]  # [experts] bits a weight
    codebooks: tuple[str, ...]  # [experts]


@dataclass(frozen=True, kw_only=True)
class MoeQuery:
    """What a layer's routed experts ask of a provider: y = sum over a row's experts of weight * down(act(gate, up)).

    Every expert is `slices` slices of `width` channels in the middle, whose outputs are summed: each has its own
    Hadamard blocks.  One slice where the checkpoint is not cut by rank.
    """

    k: int  # channels of the hidden side, a multiple of 128
    hidden: int  # channels of activations and outputs; those up to k are zero, and cut
    slices: int
    width: int  # channels in the middle of one slice on this rank, a multiple of 128
    intermediate: int  # of all slices together, those before this one are true; the rest is noise, to be cut
    w1: Bank  # gate, or the only projection into the middle
    w3: Bank | None  # up; None without a gate
    w2: Bank  # down
    shared_h: bool  # the vectors of the hidden side are the same for all experts
    top_k: int
    activation: Activation
    weight_on_input: bool  # a row's weight multiplies its input, not its output
    io_dtype: str  # activations and outputs
    max_rows: int  # the most rows one call may bring

    @property
    def experts(self) -> int:
        """How many there are."""
        return len(self.w2.rates)

    @property
    def banks(self) -> dict[str, Bank]:
        """The projections by vLLM's shard id."""
        return {"w1": self.w1, "w2": self.w2} | ({"w3": self.w3} if self.w3 else {})

    @property
    def codebooks(self) -> frozenset[str]:
        """Every codebook that some expert has."""
        return frozenset(name for bank in self.banks.values() for name in bank.codebooks)

    @property
    def rates(self) -> tuple[float, ...]:
        """Every rate that some expert has, ascending."""
        return tuple(sorted({rate for bank in self.banks.values() for rate in bank.rates}))

    def sizes(self, shard: str) -> tuple[int, int]:
        """(inputs, outputs) of one expert's slice of a projection."""
        return (self.width, self.k) if shard == "w2" else (self.k, self.width)

    def __str__(self) -> str:
        books, rates = "/".join(sorted(self.codebooks)), "/".join(f"{rate:g}" for rate in self.rates)
        sliced = f" in {self.slices} slices" if self.slices > 1 else ""
        return (
            f"{self.experts} experts {self.k} -> {self.width}{sliced}, {books} {rates} bit, top {self.top_k}, "
            f"{self.activation.name}, {self.io_dtype}"
        )


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rows that one plan of a layer's routed experts serves."""

    name: str  # "decode", "prefill" or "parity"
    rows: int  # most rows of one call
    block: int  # rows a block of the grouped product; a provider that knows better may use other row tiles inside


class NoBackendError(RuntimeError):
    """No provider can run the query; the message lists every refusal."""


def choose(
    query: LinearQuery, device: Device, candidates: tuple[Backend, ...], forced: str | None = None
) -> tuple[Backend, tuple[str, ...]]:
    """Return the first provider that can run `query` on `device`, and why each one before it cannot.

    Args:
        query: the layer.
        device: where it will run.
        candidates: providers in order of preference.
        forced: name of the only provider to consider (VLLM_EXL3_BACKEND), or None for `auto`.  One that has nothing
            for such layers leaves them to `auto`: it was forced for others.

    Raises:
        NoBackendError: none can; the message holds each one's reason.
    """
    refusals: list[str] = []
    named = [provider for provider in candidates if provider.name == forced]
    for provider in named or candidates:
        ok, why = provider.can_run(query, device)
        if ok:
            return provider, tuple(refusals)
        refusals.append(f"{provider.name}: {why}")
    raise NoBackendError(f"no EXL3 kernel for {query} on {device}: {'; '.join(refusals)}")


def self_check(error: float, limit: float, what: str) -> None:
    """Refuse a kernel whose output disagrees with the reference on this very device.

    Args:
        error: relative error, |y - reference| / |reference|; NaN never passes.
        limit: the largest error allowed.
        what: provider and query, for the message.
    """
    if math.isnan(error) or error > limit:
        found = f"relative error {error:.2e}, at most {limit:.0e} allowed"
        raise NoBackendError(f"{what} disagrees with the reference: {found}")


Plan = Any  # a provider's own frozen plan, hashable; those of routed experts have `workspace_bytes`
