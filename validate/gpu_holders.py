# SPDX-License-Identifier: Apache-2.0
"""Which processes hold a GPU's memory, as nvidia-smi tells: nothing in a container that does not see the host's."""

from __future__ import annotations

from . import machine

GIB_IN_MIB = 1024


def look(index: int) -> list[str]:
    """The processes that compute on a GPU, by its number; graphics are not among them."""
    rows, _ = machine.nvidia_smi("--query-compute-apps=pid,process_name,used_memory", f"--id={index}")
    return read(rows)


def read(text: str) -> list[str]:
    """`name (process 123, 4.5 GiB)` for each of nvidia-smi's rows; a size that it does not know is left out."""
    found = []
    for row in text.splitlines():
        parts = [part.strip() for part in row.split(",")]
        if len(parts) < 3 or not parts[0].isdecimal():
            continue  # a sentence instead of a row
        pid, name, used = parts[0], ",".join(parts[1:-1]), parts[-1]
        size = f", {int(used) / GIB_IN_MIB:.1f} GiB" if used.isdecimal() else ""
        found.append(f"{name.rpartition('/')[2]} (process {pid}{size})")
    return found
