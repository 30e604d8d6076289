# SPDX-License-Identifier: Apache-2.0
"""Where a hunk lies in another file: every verdict, from the smallest file that gives it."""

from __future__ import annotations

import pytest

from release.fit import CLEAN, CONFLICT, PRESENT, Tree, fit_series
from release.patch import Patch, parse

PATH, NAME = "vllm/place.py", "vllm/tests-edit-place.patch"
OLD = ["a", "b", "c", "d", "e", "f", "g", "h"]
NEW = ["a", "b", "c", "added one", "d", "e", "f", "G", "h"]
DIFF = """\
diff --git a/vllm/place.py b/vllm/place.py
--- a/vllm/place.py
+++ b/vllm/place.py
@@ -2,4 +2,5 @@
 b
 c
+added one
 d
 e
@@ -6,3 +7,3 @@
 f
-g
+G
 h
"""


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def patch(name: str = NAME, diff: str = DIFF) -> Patch:
    return parse(name, f"From: x\nSubject: y\n\nwhy\n\nReason: divergent\n\n{diff}".encode())


def tree(lines: list[str] | None, **others: list[str]) -> Tree:
    files = {f"vllm/{folder}/place.py": text(content) for folder, content in others.items()}
    if lines is not None:
        files[PATH] = text(lines)
    return Tree(name="9.9", paths=frozenset(files), read=files.__getitem__)


BASE = {PATH: (text(OLD), text(NEW))}
FIRST, SECOND = f"{PATH} hunk 1 at line 2", f"{PATH} hunk 2 at line 6"
CASES: dict[str, tuple[list[str] | None, str, list[str]]] = {
    "in place": (OLD, CLEAN, [FIRST, SECOND]),
    "moved": (["new", "new", *OLD], CLEAN, [f"{PATH} hunk 1 at line 4 (was 2)", f"{PATH} hunk 2 at line 8 (was 6)"]),
    "only the second moved": ([*OLD[:5], "new", *OLD[5:]], CLEAN, [FIRST, f"{PATH} hunk 2 at line 7 (was 6)"]),
    "repeated elsewhere, but one is where the first says": (
        ["new", *OLD, *OLD[5:]], CLEAN, [f"{PATH} hunk 1 at line 3 (was 2)", f"{PATH} hunk 2 at line 7 (was 6)"],
    ),
    "context changed": (
        ["a", "B", *OLD[2:]], CLEAN, [f"{PATH} hunk 1 (line 2): the lines around it changed, merged", SECOND],
    ),
    "the very line changed": (
        [*OLD[:6], "other", "h"], CONFLICT, [FIRST, f"{PATH} hunk 2 (line 6): line 7 is 'other', want 'g'"],
    ),
    "shorter": (OLD[:6], CONFLICT, [FIRST, f"{PATH} hunk 2 (line 6): line 7 is '<end of file>', want 'g'"]),
    "there already": (
        NEW, PRESENT,
        [f"{PATH} hunk 1 (line 2): its change is there already, at line 2",
         f"{PATH} hunk 2 (line 6): its change is there already, at line 7"],
    ),
    "there already, among other lines": (
        [*NEW[:1], "B", *NEW[2:]], PRESENT,
        [f"{PATH} hunk 1 (line 2): its change is there already, at line 3",
         f"{PATH} hunk 2 (line 6): its change is there already, at line 7"],
    ),
    "half there": (
        [*NEW[:7], "g", "h"], CONFLICT,
        [f"{PATH} hunk 1 (line 2): its change is there already, at line 2", f"{PATH} hunk 2 at line 7 (was 6)"],
    ),
    "vanished": (None, CONFLICT, [f"{PATH} hunk {n} (line {at}): 9.9 has no such file" for n, at in ((1, 2), (2, 6))]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str) -> None:
    lines, status, hunks = CASES[case]
    found = next(fit_series([patch()], tree(lines), [BASE]))
    assert (found.status, [str(hunk) for hunk in found.hunks]) == (status, hunks)


@pytest.mark.parametrize("case", [case for case, (_, status, _) in CASES.items() if status == CLEAN])
def test_a_clean_patch_changes_its_lines_and_no_others(case: str) -> None:
    lines = CASES[case][0]
    assert lines is not None
    found = next(fit_series([patch()], tree(lines), [BASE]))
    at, last = lines.index("d"), lines.index("g")
    wanted = [*lines[:at], "added one", *lines[at:last], "G", *lines[last + 1 :]]
    assert found.after == {PATH: text(wanted)}


def test_a_file_that_went_elsewhere_is_named() -> None:
    found = next(fit_series([patch()], tree(None, far=OLD, near=OLD), [BASE]))
    assert found.hunks[0].why == "9.9 has no such file; of that name: vllm/far/place.py, vllm/near/place.py"


def test_without_a_base_nothing_is_merged() -> None:
    found = next(fit_series([patch()], tree(["a", "B", *OLD[2:]])))
    assert (found.status, found.hunks[0].why) == (CONFLICT, "line 2 is 'B', want 'b'")


def test_lines_that_are_there_twice_are_not_guessed_at() -> None:
    found = next(fit_series([patch()], tree(["new", "new", *OLD[1:5], *OLD])))
    assert (found.status, found.hunks[0].why) == (CONFLICT, "its lines are at 3, 8: which is meant?")


def test_a_patch_that_builds_on_one_left_out_says_so() -> None:
    second = DIFF.split("@@ -6,3", maxsplit=1)[0].replace("added one", "added two").replace(" c\n", " c\n added one\n")
    second = second.replace("-2,4 +2,5", "-2,5 +2,6")
    first, then = fit_series([patch(), patch(NAME.replace("place", "more"), second)], tree([*OLD[:6], "other", "h"]))
    assert (first.status, first.after) == (CONFLICT, {})
    assert then.hunks[0].why == f"line 4 is 'd', want 'added one'; builds on {NAME}, which is left out"
