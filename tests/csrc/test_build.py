"""The kernels as nvcc compiles them: for every card, without spills, in a library that fits any torch from 2.11 on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.compiled import ALL_TARGETS, KERNELS, REGISTERS, Compiled, compiled, nvcc_version, registers, spills

SYMBOLS = Path(__file__).parent / "symbols.txt"
SYSTEM = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$")
QUICK = "120"  # most users' card
HINT = "if that is meant: python -m tests.csrc.compiled"


@pytest.fixture(
    scope="module",
    params=[QUICK, *(pytest.param(target, marks=pytest.mark.slow) for target in ALL_TARGETS if target != QUICK)],
)
def build(request) -> Compiled:
    """For one card; the machine code of others neither adds to the library's symbols nor changes its registers."""
    return compiled(request.param)


def symbols(library: Path, which: str) -> list[str]:
    command = ["nm", "-D", f"--{which}-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[-1] for line in lines]


def test_no_kernel_spills(build):
    assert registers(build.log), "the compiler reported nothing"
    assert spills(build.log) == []


def test_registers_stay_within_the_table(build):
    """Fewer warps fit an SM with every step up, so a step is somebody's decision."""
    table = json.loads(REGISTERS.read_text(encoding="utf-8"))
    assert table["nvcc"] == nvcc_version(), HINT
    found, allowed = registers(build.log), table["registers"]
    assert sorted(found) == sorted(allowed), HINT
    for kernel, row in found.items():
        for target, count in row.items():
            assert target in allowed[kernel], f"no row of {kernel} for sm_{target}; {HINT}"
            most = allowed[kernel][target]
            assert count <= most, f"{kernel} for sm_{target}: {count} registers, want at most {most}; {HINT}"


def test_a_spill_is_an_error(build, request):
    """And each card's code comes with code that newer cards compile at load."""
    target = request.node.callspec.params["build"]
    commands = [command for command in build.commands if "--generate-code" in command]
    assert len(commands) == len(list(KERNELS.glob("*.cu")))
    for command in commands:
        assert sorted(re.findall(r"code=\[(\w+)\]", command)) == sorted([f"sm_{target}", "compute_120"])
        assert "-Xptxas=-warn-spills,-Werror" in command
    assert {name for row in registers(build.log).values() for name in row} == {target}


def test_the_wheel_is_built_for_every_card():
    found = re.search(r'set\(EXL3_ARCHS "([^"]*)"', (KERNELS / "CMakeLists.txt").read_text(encoding="utf-8"))
    assert found
    assert found[1].split(";") == list(ALL_TARGETS)


def test_torch_symbols_are_the_listed_ones(build):
    listed = [line for line in SYMBOLS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    torch_symbols = [name for name in symbols(build.library, "undefined") if not SYSTEM.search(name)]
    assert sorted(set(torch_symbols) - WEAK) == sorted(set(listed) - WEAK)


def test_the_oldest_glibc_that_it_loads_into(build):
    """What a wheel with the extension may call itself: manylinux_2_34."""
    versions = [re.search(r"@GLIBC_([\d.]+)$", name) for name in symbols(build.library, "undefined")]
    assert max(tuple(map(int, found[1].split("."))) for found in versions if found) <= (2, 34)


# Of the C++ runtime, resolved where it is there.
WEAK = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}


def test_exports_nothing(build):
    assert symbols(build.library, "defined") == []


LOAD = """
import sys, torch
torch.ops.load_library(sys.argv[1])
print(torch.ops.exl3.linear_scratch_bytes(17, 256, 2, 1, 3))
try:
    torch.ops.exl3.hadamard(torch.zeros(1, 128), torch.zeros(1, 128), None, None, 128)
except NotImplementedError as error:
    print(str(error).splitlines()[0])
"""


def test_loads_into_a_torch_without_cuda(build):
    """And says there what it can do: sizes, and no kernels for the CPU."""
    command = [sys.executable, "-c", LOAD, str(build.library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, refusal = done.stdout.splitlines()
    rotated, parts = 32 * 256 * 2, (3 + 2) * 32 * 128 * 4  # a tile of 32 rows
    assert int(size) == rotated + parts
    assert refusal.startswith("Could not run 'exl3::hadamard' with arguments from the 'CPU' backend")
