# SPDX-License-Identifier: Apache-2.0
"""The rules of the series, each broken once."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from release.checkout import PATCHES
from release.pins import read_pins
from release.stack import apply_stack, mark_changed, read_stack

from .conftest import COMPOSE, HEADER, Refusal, write_patch

NAME = "vllm/tests-edit-context.patch"
TARGET = "vllm/forward_context.py"


@pytest.fixture(autouse=True)
def _empty_series(checkout: Path) -> None:
    """The copy's own patches are none of these tests' business."""
    (checkout / "patches/series").write_text("")
    for path in (checkout / "patches").rglob("*.patch"):
        path.unlink()


@pytest.fixture
def target_lines(upstream_wheels: dict[str, Path]) -> list[str]:
    with zipfile.ZipFile(upstream_wheels["cpu"]) as wheel:
        return wheel.read(TARGET).decode().splitlines()


def insertion(
    lines: list[str], text: str = "# hello", *, at: int = 5, says: int | None = None, path: str = TARGET
) -> str:
    """A hunk that adds `text` after line `at`, whose header may say another line."""
    line = says or at
    head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -{line},2 +{line},3 @@\n"
    return f"{head} {lines[at - 1]}\n+{text}\n {lines[at]}\n"


def test_a_good_patch_is_taken(checkout: Path, target_lines: list[str]) -> None:
    """What the refusals below start from is right in everything else."""
    write_patch(checkout, NAME, HEADER + insertion(target_lines))
    assert read_stack(checkout, read_pins(checkout))[-1].name == NAME


HEADERS: dict[str, tuple[Callable[[str], str], str]] = {
    "from": (lambda text: text.replace("From: EXL3 fork of vLLM", "From: Someone"), "From: Someone"),
    "body": (lambda text: text.replace("The second line that says why.\n", ""), "1 lines between Subject and trailers"),
    **{
        trailer: (lambda text, t=trailer: "".join(
            line for line in text.splitlines(keepends=True) if not line.startswith(f"{t}:")
        ), f"no {trailer} line in its header")
        for trailer in ("Reason", "Origin", "Base", "Remove-when", "Test")
    },
    "reason": (lambda text: text.replace("divergent", "because"), "Reason: because, want one of compatibility"),
    "base": (lambda text: text.replace("v0.32.0", "v0.31.0"), "Base: v0.31.0, want v0.32.0"),
    "unknown": (lambda text: text.replace("Origin:", "Cause: x\nOrigin:"), "header line Cause: x, want one of"),
    "test file": (lambda text: text.replace("test_stack", "test_none"), "tests/release/test_none.py does not exist"),
    "test name": (lambda text: text.replace("::test_the", "::test_not_the"), "defines no test_not_the_stack"),
    "test form": (lambda text: text.replace("::", " "), "want tests/PATH.py::NAME"),
}  # fmt: skip


@pytest.mark.parametrize("fault", HEADERS)
def test_header_faults(checkout: Path, refused: Refusal, target_lines: list[str], fault: str) -> None:
    spoil, message = HEADERS[fault]
    write_patch(checkout, NAME, spoil(HEADER) + insertion(target_lines))
    found = refused("compose", "--target", "cpu")
    assert found.startswith(f"patches/{NAME}: ")
    assert message in found


def test_series_lists_a_missing_file(checkout: Path, refused: Refusal) -> None:
    with (checkout / "patches/series").open("a") as series:
        series.write(f"{NAME}\n")
    assert refused(*COMPOSE) == f"patches/series: lists {NAME}, and patches/{NAME} does not exist"


def test_patch_is_not_listed(checkout: Path, refused: Refusal) -> None:
    (checkout / PATCHES / "vllm").mkdir(exist_ok=True)
    (checkout / PATCHES / NAME).write_text("")
    assert refused(*COMPOSE) == f"patches/{NAME}: not listed in patches/series"


def test_series_lists_a_patch_twice(checkout: Path, refused: Refusal, target_lines: list[str]) -> None:
    write_patch(checkout, NAME, HEADER + insertion(target_lines))
    write_patch(checkout, NAME, HEADER + insertion(target_lines))
    assert refused(*COMPOSE) == f"patches/series: lists {NAME} 2 times, want once"


def test_patch_has_another_name(checkout: Path, refused: Refusal, target_lines: list[str]) -> None:
    write_patch(checkout, "vllm/Fix.patch", HEADER + insertion(target_lines))
    assert refused(*COMPOSE) == "patches/series: vllm/Fix.patch, want vllm/AREA-VERB-OBJECT.patch in lower case"


@pytest.mark.parametrize("path", ["vllm/_version.py", "vllm/platforms/__init__.py", "vllm/utils/cpu_triton_utils.py"])
def test_patch_touches_a_forbidden_file(checkout: Path, refused: Refusal, target_lines: list[str], path: str) -> None:
    write_patch(checkout, NAME, HEADER + insertion(target_lines, path=path))
    found = refused(*COMPOSE)
    assert found == f"patches/{NAME}: touches {path}, which differs between the upstream wheels; no patch may"


def test_patch_touches_an_overlay_file(checkout: Path, refused: Refusal, target_lines: list[str]) -> None:
    path = "vllm/model_executor/layers/quantization/exl3_trellis/codebook.py"
    write_patch(checkout, NAME, HEADER + insertion(target_lines, path=path))
    assert refused(*COMPOSE) == f"patches/{NAME}: touches {path}, which is the overlay's own; edit it there"


def test_patch_edits_a_file_upstream_lacks(checkout: Path, refused: Refusal, target_lines: list[str]) -> None:
    write_patch(checkout, NAME, HEADER + insertion(target_lines, path="vllm/nowhere.py"))
    assert refused(*COMPOSE) == f"patches/{NAME}: edits vllm/nowhere.py, which upstream does not have"


def test_patch_has_an_offset(checkout: Path, refused: Refusal, target_lines: list[str]) -> None:
    write_patch(checkout, NAME, HEADER + insertion(target_lines, at=5, says=7))
    where = f"patches/{NAME}: {TARGET}, hunk 1 at line 7"
    assert refused(*COMPOSE) == f"{where}: its lines are at line 5, and offsets are refused"


def test_patch_fuzzes(checkout: Path, refused: Refusal, target_lines: list[str]) -> None:
    text = insertion([*target_lines[:4], "something else", *target_lines[5:]])
    write_patch(checkout, NAME, HEADER + text)
    found = refused(*COMPOSE)
    assert found == f"patches/{NAME}: {TARGET}, hunk 1 at line 5: line 5 is {target_lines[4]!r}, want 'something else'"


def test_the_stack_is_applied_in_order(checkout: Path, target_lines: list[str]) -> None:
    """The second patch's context is what the first one added, and the file says which patches changed it."""
    second = NAME.replace("context", "context-again")
    write_patch(checkout, NAME, HEADER + insertion(target_lines, "# one"))
    write_patch(checkout, second, HEADER + insertion([*target_lines[:5], "# one"], "# two"))
    stack = read_stack(checkout, read_pins(checkout))
    upstream = "\n".join(target_lines).encode() + b"\n"
    states = [files[TARGET] for _, files in apply_stack(stack, {TARGET: upstream}.__getitem__, {TARGET}.__contains__)]
    assert [state.decode().splitlines()[5:7] for state in states] == [["# one", target_lines[5]], ["# two", "# one"]]
    marked = mark_changed(TARGET, states[-1], stack).decode().splitlines()
    assert marked[-1] == f"# Changed by the EXL3 fork of vLLM: {NAME}, {second}"
