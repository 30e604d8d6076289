"""The watch itself: it hears a kernel's first launch, and nothing the second time."""

from __future__ import annotations

import torch

from tests.gpu.loads import Loads, late


def test_hears_the_first_launch_of_a_kernel_only():
    x = torch.rand(100, device="cuda")
    torch.cuda.synchronize()
    with Loads() as first:
        torch.special.airy_ai(x)
        torch.cuda.synchronize()
    assert first.names
    with Loads() as second:
        torch.special.airy_ai(x)
        torch.cuda.synchronize()
    assert second.names == []


def test_kernels_of_libraries_are_told_from_ours():
    library = ["_ZN2at6native29vectorized_elementwise_kernelI", "nvjet_sm90_tst_64x8", "cuLibraryLoadData"]
    ours = ["_ZN12_GLOBAL__N_113linear_kernelI", "triton_poi_fused_add"]
    assert late([*library, f"module of 512 bytes: {library[1]}"]) == []
    assert late([*library, *ours, f"module of 512 bytes: {ours[0]}"]) == [*ours, ours[0]]
