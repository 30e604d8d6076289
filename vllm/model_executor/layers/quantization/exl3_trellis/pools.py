# SPDX-License-Identifier: Apache-2.0
"""Work whose memory must not come from the memory pool that its caller may be inside of.

vLLM loads weights inside a pool that sleeping unmaps: tables that are kept, and what a library keeps for itself at its
first call (cuBLAS its workspace, 32 MiB on SM90), would be lost with it, or be used while it is not there.  Torch's
pools take the allocations of one thread, and cuBLAS's handles belong to threads, so another thread does such work.
No vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_pools(device: torch.device, work: Callable[[], T]) -> T:
    """What `work` returns or raises, finished on `device` when this returns; anywhere but on a GPU simply `work()`.

    Not for live requests: it waits for the device.
    """
    if device.type != "cuda":
        return work()
    card = torch.cuda.current_device() if device.index is None else device.index

    def done() -> T:
        with torch.cuda.device(card):  # a new thread's is the first
            result = work()
            torch.cuda.current_stream(card).synchronize()  # the caller's stream does not wait for this one
        return result

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(done).result()
