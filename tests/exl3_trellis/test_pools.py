# SPDX-License-Identifier: Apache-2.0
"""Work outside of the caller's memory pool: in a thread of its own on a GPU, in place elsewhere."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.quantization.exl3_trellis import pools
from vllm.model_executor.layers.quantization.exl3_trellis.backends import native

CUDA, CPU = torch.device("cuda", 1), torch.device("cpu")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is asked of a driver that is not there."""
    asked: list[tuple[str, int]] = []
    stream = SimpleNamespace(synchronize=lambda: asked.append(("waited", threading.get_ident())))
    monkeypatch.setattr(torch.cuda, "device", lambda card: asked.append(("card", card)) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda card: stream)
    return asked


def test_work_for_a_gpu_has_its_own_thread_on_the_same_card(waited):
    worker = pools.outside_pools(CUDA, threading.get_ident)
    assert worker != threading.get_ident()
    assert waited == [("card", 1), ("waited", worker)]


def test_elsewhere_it_is_simply_done(waited):
    assert pools.outside_pools(CPU, threading.get_ident) == threading.get_ident()
    assert waited == []


def test_what_it_raises_arrives(waited):
    def fail() -> None:
        raise ValueError("disagrees")

    with pytest.raises(ValueError, match="disagrees"):
        pools.outside_pools(CUDA, fail)


def test_kernels_are_compared_outside_of_the_pool_of_weights(monkeypatch, waited):
    threads: list[int] = []
    monkeypatch.setattr(native, "_compare", lambda *_kernel: threads.append(threading.get_ident()))
    native.check_kernels.cache_clear()
    for _ in range(2):
        native.check_kernels(CUDA, "mcg", 3.0, "bfloat16")
    native.check_kernels.cache_clear()
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
