"""What stays when the memory pool is emptied inside which weights are loaded: tables, what libraries keep."""

from __future__ import annotations

import pytest
import torch

from vllm.model_executor.layers.quantization.exl3_trellis.backends import exllamav3, native
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


@pytest.mark.parametrize("provider", [native, exllamav3], ids=lambda provider: provider.name)
def test_the_check_of_a_kernel_takes_nothing_from_the_pool_of_weights(provider):
    """Nor does cuBLAS, which the check calls: its workspace would stay there, and be unmapped by sleeping."""
    if not provider.installed():
        pytest.skip(f"the extension of {provider.name} is not installed")
    torch._C._cuda_clearCublasWorkspaces()
    provider.check_kernels.cache_clear()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(1 << 20, device=DEVICE)
        provider.check_kernels(DEVICE, "mcg", 3.0, "bfloat16")
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    sizes = [block["size"] for block in blocks if block["state"] == "active_allocated"]
    print(f"live in the pool: {sizes}")
    assert sizes == [inside.nbytes]
