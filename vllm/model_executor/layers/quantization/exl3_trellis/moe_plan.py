# SPDX-License-Identifier: Apache-2.0
"""Plan a layer's routed experts: which rows go through which window, and which provider serves it.

    fewest .. decode rows        the decode plan
    above, .. capacity           the prefill plan
    fewer than `fewest`          the parity path; without a prefill plan, whatever the decode plan does not take
    more than capacity           contiguous slices, each by its own rows

Numbers and reasons only: no torch, no vLLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .plan import Bank, NoBackendError, Window

if TYPE_CHECKING:
    from .backends import MoeBackend
    from .plan import Device, MoeQuery

# Fewest rows that planned experts serve, of target and draft alike, unless VLLM_EXL3_TRELLIS_MIN_M says otherwise: the
# smallest batch that vLLM captures a CUDA graph of.
MIN_ROWS = 1

# Order in which `auto` tries the planned providers.  (least SM, names, why)
ORDER = (
    (120, ("b12x", "native"), "b12x is made for SM12x, where native has not been measured"),
    (0, ("native", "b12x"), "bench moe, one H200: native takes 0.21 to 0.71 of b12x's time in every row measured"),
)
PARITY = ("exllamav3", "torch")  # the providers of the parity path, in the order they are tried


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the environment asks of every layer's windows; each field names its variable."""

    min_rows: int = MIN_ROWS  # VLLM_EXL3_TRELLIS_MIN_M
    decode_rows: int = 32  # VLLM_EXL3_TRELLIS_MAX_M
    decode_block: int = 8  # VLLM_EXL3_TRELLIS_BLOCK_M
    prefill: bool = True  # VLLM_EXL3_PREFILL_TRELLIS
    prefill_block: int = 64  # VLLM_EXL3_PREFILL_BLOCK_M
    capacity: int | None = None  # VLLM_EXL3_PREFILL_CAPACITY; None: as many rows as a step brings
    chunk: int = 128  # VLLM_EXL3_PREFILL_CHUNK

    @staticmethod
    def read(environment: Any) -> Limits:
        """From what has a `VLLM_EXL3_...` attribute for each variable, as `vllm.envs` has."""
        fewest = environment.VLLM_EXL3_TRELLIS_MIN_M
        return Limits(
            min_rows=MIN_ROWS if fewest is None else fewest,
            decode_rows=environment.VLLM_EXL3_TRELLIS_MAX_M,
            decode_block=environment.VLLM_EXL3_TRELLIS_BLOCK_M,
            prefill=environment.VLLM_EXL3_PREFILL_TRELLIS,
            prefill_block=environment.VLLM_EXL3_PREFILL_BLOCK_M,
            capacity=environment.VLLM_EXL3_PREFILL_CAPACITY,
            chunk=environment.VLLM_EXL3_PREFILL_CHUNK,
        )

    def problems(self, most_rows: int) -> Iterator[str]:
        """What contradicts itself, or a step of at most `most_rows` rows."""
        if self.min_rows > self.decode_rows:
            fewest, most = f"VLLM_EXL3_TRELLIS_MIN_M={self.min_rows}", f"VLLM_EXL3_TRELLIS_MAX_M={self.decode_rows}"
            yield f"{fewest}: want at most {most}"
        if not self.prefill:
            return
        if self.capacity is not None and self.capacity > most_rows:
            yield f"VLLM_EXL3_PREFILL_CAPACITY={self.capacity}: want at most max_num_batched_tokens={most_rows}"
        if most_rows <= self.decode_rows:
            return  # the decode plan takes every row
        if self.capacity is not None and self.capacity <= self.decode_rows:
            want = f"more than VLLM_EXL3_TRELLIS_MAX_M={self.decode_rows}, or VLLM_EXL3_PREFILL_TRELLIS=0"
            yield f"VLLM_EXL3_PREFILL_CAPACITY={self.capacity}: want {want}"
        if self.chunk < self.min_rows - 1:
            below = f"the rows below VLLM_EXL3_TRELLIS_MIN_M={self.min_rows}"
            yield f"VLLM_EXL3_PREFILL_CHUNK={self.chunk}: want at least {self.min_rows - 1}, {below}"


Cut = tuple[str, int, int]  # name of a window, first row, one past the last row


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of one layer; those that no number of rows falls into are None."""

    min_rows: int
    decode: Window | None = None
    prefill: Window | None = None
    parity: Window | None = None

    @property
    def all(self) -> tuple[Window, ...]:
        """Those there are."""
        return tuple(window for window in (self.decode, self.prefill, self.parity) if window)

    @property
    def most_rows(self) -> int:
        """Of one slice."""
        return self.prefill.rows if self.prefill else max(window.rows for window in self.all)

    def find(self, rows: int) -> Window:
        """The window that `rows` rows, at most `most_rows`, fall into."""
        if self.decode and self.min_rows <= rows <= self.decode.rows:
            return self.decode
        if self.prefill and self.decode and rows > self.decode.rows:
            return self.prefill
        if self.parity is None:
            raise ValueError(f"{rows} rows fall into no window of {self}")
        return self.parity

    def describe(self, name: str) -> str:
        """Which rows go through a window, in words."""
        window = next(one for one in self.all if one.name == name)
        if self.decode is None:
            spans = [(1, window.rows)]
        elif name == "decode":
            spans = [(self.min_rows, window.rows)]
        else:
            spans = [(1, self.min_rows - 1)] if name == "parity" else []
            if window is self.prefill or not self.prefill:
                spans.append((self.decode.rows + 1, window.rows))
        rows = " and ".join(f"{first} to {last}" for first, last in spans if first <= last)
        return f"{rows} rows, {window.block} a block"

    def remedy(self, rows: int) -> str:
        """What to set so that `rows` rows need no parity path."""
        if self.decode and rows < self.min_rows:
            return f"VLLM_EXL3_TRELLIS_MIN_M to at most {rows}"
        if self.decode:
            return f"VLLM_EXL3_PREFILL_TRELLIS to 1, or VLLM_EXL3_TRELLIS_MAX_M to at least {rows}"
        return "--enforce-eager, or neither VLLM_EXL3_FUSED nor VLLM_EXL3_BACKEND"

    def cuts(self, rows: int) -> list[Cut]:
        """The slices that `rows` rows run in, in order, and the window of each."""
        if rows <= self.most_rows:
            return [(self.find(rows).name, 0, rows)] if rows else []
        found, start = [], 0
        while start < rows:
            left = rows - start
            taken = min(left, self.most_rows)
            short = self.min_rows - (left - taken)
            if 0 < short < self.min_rows and taken - short >= self.min_rows:
                taken -= short  # so that what is left at the end is enough for a plan
            found.append((self.find(taken).name, start, start + taken))
            start += taken
        return found


def require_limits(limits: Limits, most_rows: int) -> None:
    """Raise ValueError listing every variable that cannot be followed."""
    if problems := list(limits.problems(most_rows)):
        raise ValueError("EXL3 routed experts cannot be planned: " + "; ".join(problems))


def windows(limits: Limits, most_rows: int, planned: bool) -> Windows:
    """The windows of a layer.

    Args:
        limits: what the environment asks.
        most_rows: a step brings no more.
        planned: whether a provider was found that serves decode and prefill; the parity path takes all rows otherwise.

    Raises:
        ValueError: listing every variable that cannot be followed.
    """
    require_limits(limits, most_rows)
    decode_rows = min(limits.decode_rows, most_rows)
    if not planned or limits.min_rows > decode_rows:
        chunk = min(limits.chunk, most_rows)
        return Windows(min_rows=1, parity=Window(name="parity", rows=most_rows, block=chunk))
    decode = Window(name="decode", rows=decode_rows, block=limits.decode_block)
    prefill = parity = None
    staged = most_rows
    if most_rows > decode_rows and limits.prefill:
        prefill = Window(name="prefill", rows=limits.capacity or most_rows, block=limits.prefill_block)
        staged = min(limits.chunk, most_rows)
    if limits.min_rows > 1 or (most_rows > decode_rows and not prefill):
        parity = Window(name="parity", rows=staged, block=min(limits.chunk, staged))
    return Windows(min_rows=limits.min_rows, decode=decode, prefill=prefill, parity=parity)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who serves a layer."""

    planned: MoeBackend | None  # decode and prefill; None: all rows take the parity path
    parity: MoeBackend | None  # None: there is none, which is a fault only where rows would take it
    refusals: tuple[str, ...]  # why those before `planned` were passed over
    parity_refusals: tuple[str, ...]

    def of(self, window: str) -> tuple[MoeBackend, tuple[str, ...]]:
        """The provider of a window, and why not those before it.

        Raises:
            NoBackendError: nobody serves the parity path.
        """
        found, refusals = self.planned, self.refusals
        if window == "parity":
            found, refusals = self.parity, self.parity_refusals
        if found is None:
            raise NoBackendError(f"no EXL3 kernel for the {window} rows of routed experts: {'; '.join(refusals)}")
        return found, refusals


def choose_experts(
    query: MoeQuery,
    device: Device,
    candidates: Sequence[MoeBackend],
    forced: str | None = None,
    fused: bool = True,
) -> Choice:
    """Find the providers of a layer.

    Args:
        query: the layer.
        device: where it will run.
        candidates: every provider.
        forced: VLLM_EXL3_BACKEND, None for `auto`.  One of the parity path takes all rows.
        fused: VLLM_EXL3_FUSED; False leaves all rows to the parity path.

    Raises:
        NoBackendError: nobody can; or on CUDA nobody can plan, and the parity path was not asked for.
    """
    parity = sorted((one for one in candidates if one.name in PARITY), key=lambda one: PARITY.index(one.name))
    planned = [one for one in candidates if one.name not in PARITY]
    order = next(names for least, names, _ in ORDER if device.sm >= least)
    planned.sort(key=lambda one: order.index(one.name) if one.name in order else len(order))
    only_parity = not fused or forced in PARITY
    if only_parity:
        planned = []
    if forced in PARITY:
        parity = [one for one in parity if one.name == forced]
    elif forced is not None:
        planned = [one for one in planned if one.name == forced]
    plans, refusals = _first(planned, query, device)
    fallback, parity_refusals = _first(parity, query, device)
    required = not only_parity and (device.kind == "cuda" or forced is not None)
    if plans is None and (required or fallback is None):
        reasons = "; ".join((*refusals, *parity_refusals)) or f"no provider is called {forced!r}"
        hint = "; VLLM_EXL3_FUSED=0 runs it, slowly and without CUDA graphs" if fallback and not forced else ""
        raise NoBackendError(f"no EXL3 kernel for {query} on {device}: {reasons}{hint}")
    return Choice(planned=plans, parity=fallback, refusals=refusals, parity_refusals=parity_refusals)


def _first(
    candidates: Sequence[MoeBackend], query: MoeQuery, device: Device
) -> tuple[MoeBackend | None, tuple[str, ...]]:
    """The first that can run, and why those before it cannot."""
    refusals: list[str] = []
    for provider in candidates:
        ok, why = provider.can_run(query, device)
        if ok:
            return provider, tuple(refusals)
        refusals.append(f"{provider.name}: {why}")
    return None, tuple(refusals)


def kernels_of(query: MoeQuery) -> Hashable:
    """What layers have in common that run the same kernels: all but how many experts have which rates."""
    banks = query.banks.values()
    kinds = set(zip(*(zip(bank.rates, bank.codebooks, strict=True) for bank in banks), strict=True))
    one = Bank(rates=(), codebooks=())
    return replace(query, w1=one, w2=one, w3=query.w3 and one, max_rows=1), frozenset(kinds)
