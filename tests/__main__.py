# SPDX-License-Identifier: Apache-2.0
"""Runs the tests in two processes: the kernels' under the emulator, which take one core for minutes, beside the rest.

python -m tests PYTEST_OPTIONS
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = "tests/csrc"
NONE_COLLECTED = 5  # pytest's status where no test was selected, as by -k


def main(options: list[str]) -> int:
    """The rest's output as it comes, then the kernels'; 1 if either failed."""
    pytest = [sys.executable, "-m", "pytest", *options]
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryFile() as output:
        kernels = subprocess.Popen([*pytest, KERNELS], cwd=root, stdout=output, stderr=subprocess.STDOUT)
        try:
            rest = subprocess.run([*pytest, "tests", f"--ignore={KERNELS}"], cwd=root, check=False).returncode
            print(f"{KERNELS}, which ran beside these:", flush=True)
            found = {rest, kernels.wait()}
        finally:
            kernels.terminate()  # where this was interrupted
            kernels.wait()
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
    return int(bool(found - {0, NONE_COLLECTED}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
