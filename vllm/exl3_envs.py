"""The environment variables of the EXL3 fork: names, types, defaults, what each is for.

Standard library only, and no import from vLLM: `vllm.envs` merges this table into its own, so that every variable
here is known to vLLM (no "unknown environment variable" warning) and read by `envs.NAME`.
Blank means unset.  A bad value raises ValueError naming the variable, what was found and what was wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One variable.  `parse` turns its text into a value or raises ValueError."""

    name: str
    parse: Callable[[str], Any]
    wanted: str  # completes "want ..." in the error
    default: Any
    help: str
    compiled: bool = False  # whether the value can change a compiled graph

    def read(self, environment: Mapping[str, str] | None = None) -> Any:
        """The value from `environment`, this process's if None; the default when unset or blank."""
        text = (os.environ if environment is None else environment).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r}: want {self.wanted}") from None


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError
    return values[text.lower()]


def _rows(text: str) -> int:
    rows = int(text)
    if rows < 1:
        raise ValueError
    return rows


def _one_of(*choices: Any) -> Callable[[str], Any]:
    by_text = {str(choice): choice for choice in choices}

    def parse(text: str) -> Any:
        if text.lower() not in by_text:
            raise ValueError
        return by_text[text.lower()]

    return parse


_ROWS = "a whole number of rows, 1 or more"
_FLAG = "0 or 1"
BACKENDS = ("auto", "native", "b12x", "exllamav3", "torch")
BLOCK_ROWS = (8, 16, 32, 48, 64)

KNOBS: tuple[Knob, ...] = (
    Knob(
        name="VLLM_EXL3_BACKEND",
        parse=_one_of(*BACKENDS),
        wanted="one of " + ", ".join(BACKENDS),
        default="auto",
        help="kernel provider of every EXL3 layer that it has kernels for; auto takes the best that can run",
        compiled=True,
    ),
    Knob(
        name="VLLM_EXL3_FUSED",
        parse=_flag,
        wanted=_FLAG,
        default=True,
        help="0 forces the parity path: exllamav3's kernels, else reconstruct and a plain GEMM",
        compiled=True,
    ),
    Knob(
        name="VLLM_EXL3_LOG_PATH_SELECTION",
        parse=_flag,
        wanted=_FLAG,
        default=False,
        help="1 logs the provider of every layer and shard",
    ),
    Knob(
        name="VLLM_EXL3_TRELLIS_MIN_M",
        parse=_rows,
        wanted=_ROWS,
        default=None,
        help="fewest rows that the planned MoE runs; fewer go through the parity path; CUDA graphs start there too",
    ),
    Knob(
        name="VLLM_EXL3_TRELLIS_MAX_M",
        parse=_rows,
        wanted=_ROWS,
        default=32,
        help="most rows of the MoE decode plan",
    ),
    Knob(
        name="VLLM_EXL3_TRELLIS_BLOCK_M",
        parse=_one_of(*BLOCK_ROWS),
        wanted="one of 8, 16, 32, 48, 64",
        default=8,
        help="rows a block of the MoE decode plan of b12x; native has its own",
    ),
    Knob(
        name="VLLM_EXL3_PREFILL_TRELLIS",
        parse=_flag,
        wanted=_FLAG,
        default=True,
        help="0 drops the MoE prefill plan: long batches go through the parity path",
    ),
    Knob(
        name="VLLM_EXL3_PREFILL_BLOCK_M",
        parse=_one_of(*BLOCK_ROWS),
        wanted="one of 8, 16, 32, 48, 64",
        default=64,
        help="rows a block of the MoE prefill plan of b12x; native has its own",
    ),
    Knob(
        name="VLLM_EXL3_PREFILL_CAPACITY",
        parse=_rows,
        wanted=_ROWS,
        default=None,
        help="most rows of the MoE prefill plan; unset: max_num_batched_tokens. Longer batches run in slices",
    ),
    Knob(
        name="VLLM_EXL3_PREFILL_CHUNK",
        parse=_rows,
        wanted=_ROWS,
        default=128,
        help="rows a chunk of the MoE parity path while a prefill plan is live",
    ),
)

# What `vllm.envs` merges into its table of known variables.
environment_variables: dict[str, Callable[[], Any]] = {knob.name: knob.read for knob in KNOBS}

# Variables whose value cannot change a compiled graph: kept out of vLLM's compile cache key.
not_compiled: frozenset[str] = frozenset(knob.name for knob in KNOBS if not knob.compiled)


def bad_values(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """One message for each variable whose value does not parse; of names that nothing reads, vLLM itself warns."""
    for knob in KNOBS:
        try:
            knob.read(environment)
        except ValueError as error:
            yield str(error)
