# SPDX-License-Identifier: Apache-2.0
"""Importing this says whether the overlay lies over the upstream version that it was made for.

Imported before anything else of vLLM: over another version the overlay would stop at whichever name is the first to
have moved.  A wheel of ours never fails here; a tree into which the overlay was copied by hand may.
"""

from __future__ import annotations

from vllm.version import __version__

UPSTREAM = "0.32.0"  # as release/pins.toml has it; a test compares


def require_upstream(found: str) -> None:
    """Raise ImportError unless `found` is UPSTREAM, whatever it says behind a plus."""
    if found.partition("+")[0] != UPSTREAM:
        raise ImportError(f"this EXL3 overlay is for vLLM {UPSTREAM}, found {found}")


require_upstream(__version__)
