# SPDX-License-Identifier: Apache-2.0
"""The provider `exllamav3` of linear layers: refused where its library is another, compared before it serves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.quantization.exl3_trellis import ops
from vllm.model_executor.layers.quantization.exl3_trellis.backends import LinearWeights, exllamav3
from vllm.model_executor.layers.quantization.exl3_trellis.backends import exllamav3_library as library
from vllm.model_executor.layers.quantization.exl3_trellis.plan import Device, LinearQuery, NoBackendError, Shard

CARD = Device(kind="cuda", sm=90, sms=132, smem=232_448)
SHARD = Shard(n=128, width=128, rate=3, codebook="mcg")
QUERY = LinearQuery(k=128, width=128, shards=(SHARD, SHARD), io_dtype="bfloat16", max_rows=64)
CPU = torch.device("cpu")


def kernel(arguments: int) -> SimpleNamespace:
    """What the extension's functions say of themselves."""
    return SimpleNamespace(__doc__=f"f({', '.join(f'arg{i}: int' for i in range(arguments))}) -> None\n\nf\n")


@pytest.fixture
def library_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """library_of(kernel=arguments, ...): an extension with these kernels is installed, the rest as wanted."""

    def install(**kernels: int | None) -> None:
        found = {name: kernel(count) for name, count in (library.ARGUMENTS | kernels).items() if count is not None}
        monkeypatch.setattr(library, "installed", lambda: True)
        monkeypatch.setitem(sys.modules, library.MODULE, SimpleNamespace(**found))
        library.missing.cache_clear()

    yield install
    library.missing.cache_clear()


VERSIONS = [
    ({}, ""),
    ({"exl3_gemm": 11}, "exl3_gemm takes 11 arguments, want 10: another version of exllamav3"),
    ({"reconstruct": None}, "exllamav3_ext has no reconstruct: another version of exllamav3"),
    ({"had_r_128": 4}, "had_r_128 takes 4 arguments, want 5: another version of exllamav3"),
    ({"exl3_moe": 34}, ""),  # not called here
]


@pytest.mark.parametrize(("kernels", "why"), VERSIONS)
def test_another_version_is_refused(library_of, kernels, why):
    library_of(**kernels)
    assert exllamav3.can_run(QUERY, CARD) == (not why, why)


def test_a_library_that_does_not_load_is_refused(monkeypatch, library_of):
    library_of()
    monkeypatch.setitem(sys.modules, library.MODULE, None)  # as if its import failed
    ok, why = exllamav3.can_run(QUERY, CARD)
    assert not ok
    assert why.startswith("exllamav3_ext cannot be imported: ")


def test_its_shortcuts_are_off_even_where_they_were_turned_on(monkeypatch, library_of):
    for name in library.SHORTCUTS:
        monkeypatch.setenv(name, "1")
    library_of()
    assert exllamav3.can_run(QUERY, CARD) == (True, "")
    assert {name: os.environ[name] for name in library.SHORTCUTS} == {"EXL3_INT8_GEMV": "0", "EXL3_GEMV": "0"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each call of the operator, which the reference stands in for; its error is `calls.factor`."""
    asked = Calls()

    def parity_linear(x, trellis, suh, svh, k, shards, codebook):
        asked.append(x.shape[0])
        return ops.reference_linear(x, trellis, suh, svh, k, shards, [codebook] * (len(shards) // 4)) * asked.factor

    monkeypatch.setattr(ops, "parity_linear", parity_linear)
    exllamav3.check_kernels.cache_clear()
    yield asked
    exllamav3.check_kernels.cache_clear()


class Calls(list):
    factor = 1.0


def prepare() -> None:
    """A layer of two shards alike, whose values do not matter."""
    weights = LinearWeights(trellis=torch.zeros(8), suh=torch.zeros(8), svh=torch.zeros(8))
    assert exllamav3.prepare(exllamav3.plan(QUERY, CARD), weights)["trellis"] is weights.trellis


def test_both_ways_are_compared_once(calls):
    prepare()
    assert calls == [5, ops.PARITY_ROWS + 1]
    prepare()
    assert len(calls) == 2


def test_one_that_disagrees_is_refused(calls):
    calls.factor = 1.01
    with pytest.raises(NoBackendError, match="exllamav3: mcg, 3 bit, bfloat16, 5 rows, disagrees with the reference"):
        prepare()
