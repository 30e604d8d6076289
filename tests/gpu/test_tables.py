"""The reference's tables stay when the memory pool is emptied inside which they were first asked for."""

from __future__ import annotations

import torch

from vllm.model_executor.layers.quantization.exl3_trellis.reference import hadamard_matrix, value_table

DEVICE = torch.device("cuda", 0)


def test_tables_lie_outside_the_memory_pool_of_whoever_asks_first():
    for tables in (value_table, hadamard_matrix):
        tables.cache_clear()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(1 << 20, device=DEVICE)
        outside = [value_table("mcg", DEVICE), hadamard_matrix(torch.float64, DEVICE)]
    spans = [(segment["address"], segment["total_size"]) for segment in pool.snapshot()]

    def held(tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < start + size for start, size in spans)

    assert held(inside)
    assert not any(map(held, outside))
    assert outside[0].equal(value_table("mcg").to(DEVICE))
