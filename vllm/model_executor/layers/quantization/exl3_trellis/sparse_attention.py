# SPDX-License-Identifier: Apache-2.0
"""Which cards upstream has sparse latent attention (DSA) for: a model that needs it fails elsewhere in the worker only.

Knows upstream's backends by major compute capability (a test holds the table against them); knows nothing of dtypes and
layouts of the KV cache, of which they refuse some too.
"""

from __future__ import annotations

from collections.abc import Sequence

ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM")
MAJORS = (9, 10, 12)
# Where a backend returns the softmax's logarithm, by which ranks that share a context join their parts.
CONTEXT_PARALLEL_MAJORS = (9, 10)


def sparse_problems(architectures: Sequence[str], capability: tuple[int, int], context_parallel: int) -> list[str]:
    """Why a card cannot attend as a model does; empty for models with another attention.

    Args:
        architectures: as config.json names them.
        capability: compute capability of the card, (major, minor).
        context_parallel: decode context parallel size.
    """
    found = ".".join(map(str, capability))
    problems = []
    for name in ARCHITECTURES:
        if name not in architectures:
            continue
        if capability[0] not in MAJORS:
            want = f"want a card of {_versions(MAJORS)}"
            problems.append(f"compute capability {found} has no sparse attention for {name}, {want}")
        elif context_parallel > 1 and capability[0] not in CONTEXT_PARALLEL_MAJORS:
            want = f"want 1, or cards of {_versions(CONTEXT_PARALLEL_MAJORS)}"
            why = f"sparse attention of compute capability {found}, for {name}, cannot share a context out"
            problems.append(f"decode context parallel size {context_parallel}: {why}; {want}")
    return problems


def _versions(majors: Sequence[int]) -> str:
    *first, last = (f"{major}.x" for major in majors)
    return f"{', '.join(first)} or {last}"
