# SPDX-License-Identifier: Apache-2.0
"""The extension of exllamav3: whether it is there, and whether its kernels are those that the providers call.

Knows how many arguments they take; the meaning of each is the providers'.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os

MODULE = "exllamav3_ext"
MIN_SM = 80
# Arguments of each kernel that is called; they changed between versions.
ARGUMENTS = {"exl3_gemm": 10, "reconstruct": 5, "had_r_128": 5, "exl3_moe": 35}
# Its int8 and GEMV shortcuts, which deviate from the format's arithmetic; it reads these once.
SHORTCUTS = {"EXL3_INT8_GEMV": "0", "EXL3_GEMV": "0"}


def installed() -> bool:
    """Whether it would be found; nothing is imported."""
    return importlib.util.find_spec(MODULE) is not None


@functools.cache
def missing(*kernels: str) -> str:
    """Why some of ARGUMENTS cannot be called, or an empty string.  Imports the library, its shortcuts turned off."""
    if not installed():
        return f"the module {MODULE} is not installed"
    os.environ.update(SHORTCUTS)  # also where the environment turns them on
    try:
        library = importlib.import_module(MODULE)
    except (ImportError, OSError) as error:
        return f"{MODULE} cannot be imported: {error}"
    for name in kernels:
        kernel = getattr(library, name, None)
        if kernel is None:
            return f"{MODULE} has no {name}: another version of exllamav3"
        found = (kernel.__doc__ or "").count("arg")
        if found != ARGUMENTS[name]:
            return f"{name} takes {found} arguments, want {ARGUMENTS[name]}: another version of exllamav3"
    return ""
