"""The emulated tests can fail: each planted fault is noticed by one of them, and by no other accident."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.emulation import build_mutant, sources
from tests.csrc.mutants import MUTANTS, plant

ROOT = Path(__file__).resolve().parents[2]
NOTICED = re.compile(
    r"^E +(AssertionError|assert |RuntimeError: check_launch, |tests[.]csrc[.]emulation[.]KernelError)", re.MULTILINE
)
QUICK = ("stage-read-before-all-copied",)  # a build of the emulator each


def test_the_table_fits_the_sources():
    texts = sources()
    for name in MUTANTS:
        assert plant(name, texts) != texts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MUTANTS]
)
def test_fault_is_noticed(name):
    build_mutant(name, "warp", "exl3_warp")  # it must compile
    test = f"tests/csrc/{MUTANTS[name].suite}::{MUTANTS[name].test}"
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", test]
    environment = os.environ | {"EXL3_MUTANT": name}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, f"not noticed: {done.stdout[-2000:]}"
    assert NOTICED.search(done.stdout), done.stdout[-2000:]
