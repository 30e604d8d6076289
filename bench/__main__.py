# SPDX-License-Identifier: Apache-2.0
"""`python -m bench NAME`: run one measurement."""

from __future__ import annotations

import importlib
import sys

MEASUREMENTS = {
    "decode": "decode speed of a whole engine against bf16 and exllamav3 on one GPU",
    "linear": "dense EXL3 products against exllamav3, bf16 and FP8 on one GPU",
    "loading": "loading a rank-sliced checkpoint on one GPU, against repacking experts afterwards",
    "moe": "a layer of routed experts against b12x, exllamav3 and bf16 on one GPU",
    "prefill_ab": "prefill of a whole engine, with only VLLM_EXL3_PREFILL_TRELLIS flipped",
}


def main() -> int:
    """Dispatch to the measurement named first; its own options follow."""
    if len(sys.argv) < 2 or sys.argv[1] not in MEASUREMENTS:
        print("usage: python -m bench NAME [options]")
        for name, what in MEASUREMENTS.items():
            print(f"  {name:10} {what}")
        return 2
    return int(importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
