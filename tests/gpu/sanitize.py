# SPDX-License-Identifier: Apache-2.0
"""Every kernel once on small shapes, for compute-sanitizer:  compute-sanitizer python tests/gpu/sanitize.py [mcg:3 ...]

All codebooks and rates unless some are named; the tool takes seconds for each.  Prints `sanitized N calls` when done;
out-of-bounds accesses and races are the tool's to report.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.cases import BOOK_RATES, DEVICE, SM90, fused, layer, many_rows  # noqa: E402
from vllm.model_executor.layers.quantization.exl3_trellis import ops  # noqa: E402


def main() -> int:
    """One call of each kernel at each rate."""
    formats = [(book, rate) for book, rate in BOOK_RATES if f"{book}:{rate:g}" in sys.argv[1:] or not sys.argv[1:]]
    if not ops.EXTENSION.is_file():
        ops.EXTENSION = ROOT / "build" / "exl3" / ops.EXTENSION.name
    ok, why = ops.load()
    if not ok:
        print(why)
        return 1
    calls = 0
    for book, rate in formats:
        of = layer(256, 128, rate, book)
        code, rate2 = ops.CODEBOOK_CODES[book], round(2 * rate)
        for rows in (1, 9, 17, 33, 65):
            fused(of, torch.randn(rows, 250, device=DEVICE, dtype=torch.float16), 3)
            calls += 1
        for blocks in (1, 3) if SM90 else ():
            many_rows(of, torch.randn(300, 250, device=DEVICE, dtype=torch.float16), blocks)
            calls += 1
        w = torch.empty(256, 128, dtype=torch.float16, device=DEVICE)
        torch.ops.exl3.reconstruct(w, of.trellis, rate2, code)
        torch.ops.exl3.reconstruct_original(w[:250, :100], of.trellis, of.suh, of.svh, 128, 0, rate2, code)
        calls += 2
    torch.cuda.synchronize()
    print(f"sanitized {calls} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
