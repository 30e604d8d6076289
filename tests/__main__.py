# SPDX-License-Identifier: Apache-2.0
"""Runs the tests in two processes: the kernels' under the emulator, which take one core for minutes, beside the rest.

python -m tests PYTEST_OPTIONS
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = "tests/csrc"
NONE_COLLECTED = 5  # pytest's status where no test was selected, as by -k


def main(options: list[str]) -> int:
    """The rest's output as it comes, then the kernels'; 1 if either failed, or neither had a test to run."""
    pytest = [sys.executable, "-m", "pytest", *options]
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryFile() as output:
        # Each has its own cache: the last to end would write over what the other found.
        caches = [["-o", f"cache_dir=.pytest_cache/{name}"] for name in ("kernels", "rest")]
        kernels = subprocess.Popen([*pytest, *caches[0], KERNELS], cwd=root, stdout=output, stderr=subprocess.STDOUT)
        rest = subprocess.Popen([*pytest, *caches[1], "tests", f"--ignore={KERNELS}"], cwd=root)

        def interrupt(*_: object) -> None:
            for process in (kernels, rest):
                process.send_signal(signal.SIGINT)

        signal.signal(signal.SIGTERM, interrupt)
        found = {ended(rest)}
        print(f"{KERNELS}, which ran beside these:", flush=True)
        found.add(ended(kernels))
        output.seek(0)
        sys.stdout.buffer.write(output.read())
    return int(bool(found - {0, NONE_COLLECTED}) or found == {NONE_COLLECTED})


def ended(process: subprocess.Popen) -> int:
    """Its status. A keyboard's interrupt reaches it too: it stops what it started, and is waited for."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
