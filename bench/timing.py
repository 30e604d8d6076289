# SPDX-License-Identifier: Apache-2.0
"""How GPU work is timed: CUDA graph replays, weights in rotation, the median of several runs.

A graph holds every call of a rotation over several sets of weights, together larger than the L2 cache, so that each
call reads its weights from memory as a model does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

L2_MULTIPLE = 4  # the rotation is at least this many times the L2 cache
REPEATS = 7
WINDOW_US = 4000.0  # one timed window is about this long
WARM_US = 40000.0  # a card that idled, if only while weights were made, runs slowly at first


def sets_needed(bytes_each: int, device: torch.device) -> int:
    """How many sets of weights make a rotation."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-L2_MULTIPLE * l2 // bytes_each))


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, from replays of a graph of all `calls` in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    window(graph, 1)
    once = max(window(graph, 2), 1.0)
    window(graph, max(1, round(WARM_US / once)))
    replays = max(1, round(WINDOW_US / once))
    return statistics.median(window(graph, replays) for _ in range(REPEATS)) / len(calls)


def stream_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of an elementwise kernel; a plain copy goes another, slower way."""
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds([lambda: torch.add(source, 1.0, out=target)] * 4) * 1e-6)


def window(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Microseconds a replay, over `replays` of them back to back."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / replays
