"""The watch itself: it hears a kernel's first launch, and nothing the second time."""

from __future__ import annotations

import torch

from tests.gpu.loads import Loads


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
