# SPDX-License-Identifier: Apache-2.0
"""`add`, `drop`, `export`, `import`: the series changed in one step, and the lock with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release.__main__ import main
from release.checkout import PATCHES
from release.manifest import differences, generate
from release.patch import parse
from release.pins import read_pins
from release.stack import read_stack

from .conftest import HEADER, Refusal

NEW = "vllm/tests-say-hello.patch"
FIRST_OF_WORKER = "vllm/worker-split-workspaces.patch"  # two more patches edit gpu_worker.py after it
AFTER_IT = "vllm/worker-size-microbatches.patch"


def contents(checkout: Path) -> dict[str, bytes]:
    return {
        path.relative_to(checkout / PATCHES).as_posix(): path.read_bytes()
        for path in sorted((checkout / PATCHES).rglob("*"))
        if path.is_file()
    }


def locked(checkout: Path) -> bool:
    return differences(checkout, generate(checkout, draft=True)) == ""


def hello(line: int) -> str:
    """A patch of vllm/__init__.py whose header says `line`; the lines are upstream's first ones."""
    path = "vllm/__init__.py"
    head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -{line},2 +{line},3 @@\n"
    first = "# SPDX-License-Identifier: Apache-2.0"
    return f"{HEADER}{head} {first}\n+# hello\n # SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"


def test_add_and_drop_undo_each_other(checkout: Path) -> None:
    """What is in the series afterwards composes: the lock is written by the same command."""
    assert main(["lock"]) == 0
    before, lock = contents(checkout), (checkout / "release/manifest.lock").read_bytes()
    (checkout / "hello.patch").write_text(hello(7))  # a patch from elsewhere: its lines are at 1 here
    assert main(["add", NEW, "--from", "hello.patch", "--before", FIRST_OF_WORKER]) == 0
    names = [patch.name for patch in read_stack(checkout, read_pins(checkout), draft=True)]
    assert names.index(NEW) == names.index(FIRST_OF_WORKER) - 1
    assert parse(NEW, contents(checkout)[NEW]).edits[0].hunks[0].old_start == 1
    assert NEW in (checkout / "release/manifest.lock").read_text()
    assert locked(checkout)
    assert main(["drop", NEW]) == 0
    assert contents(checkout) == before
    assert (checkout / "release/manifest.lock").read_bytes() == lock


def test_drop_moves_what_comes_after(checkout: Path) -> None:
    old = parse(AFTER_IT, contents(checkout)[AFTER_IT]).edits[0].hunks[1].old_start
    assert main(["drop", "vllm/worker-reload-draft.patch"]) == 0
    assert main(["drop", FIRST_OF_WORKER]) == 0
    assert parse(AFTER_IT, contents(checkout)[AFTER_IT]).edits[0].hunks[1].old_start == old + 4
    assert locked(checkout)


def test_drop_of_a_patch_that_others_need(checkout: Path, refused: Refusal) -> None:
    """The second builds on the first one's line."""
    (checkout / "hello.patch").write_text(hello(1))
    assert main(["add", NEW, "--from", "hello.patch"]) == 0
    second = NEW.replace("hello", "goodbye")
    text = hello(1).split("\n # SPDX-File")[0].replace("-1,2 +1,3", "-1,2 +1,2")
    text = text.replace("+# hello", "-# hello\n+# goodbye")
    (checkout / "goodbye.patch").write_text(text + "\n")
    assert main(["add", second, "--from", "goodbye.patch"]) == 0
    before = contents(checkout)
    found = refused("drop", NEW)
    assert found.startswith(f"patches/{second}: conflict: vllm/__init__.py hunk 1 (line 1): ")
    assert contents(checkout) == before


REFUSED = {
    "unknown": (["drop", NEW], f"{NEW}: not in patches/series"),
    "there already": (["add", AFTER_IT, "--from", "hello.patch"], f"patches/{AFTER_IT}: is in the series already"),
    "no file": (["add", NEW, "--from", "none.patch"], "none.patch: No such file or directory"),
    "no place": (["add", NEW, "--from", "hello.patch", "--before", "vllm/x.patch"], "--before vllm/x.patch: not in"),
    "no header": (["add", NEW, "--from", "bare.patch"], f"patches/{NEW}: begins with [], want a From line"),
    "name": (["add", "vllm/hello.patch", "--from", "hello.patch"], "patches/vllm/hello.patch: want vllm/AREA-VERB"),
    "does not fit": (["add", NEW, "--from", "other.patch"], f"patches/{NEW}: conflict: vllm/__init__.py hunk 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_change_nothing(checkout: Path, refused: Refusal, case: str) -> None:
    arguments, message = REFUSED[case]
    (checkout / "hello.patch").write_text(hello(1))
    (checkout / "bare.patch").write_text(hello(1).removeprefix(HEADER))
    (checkout / "other.patch").write_text(hello(1).replace(" # SPDX-File", " # Other"))
    before = contents(checkout)
    assert refused(*arguments).startswith(message)
    assert contents(checkout) == before


@pytest.fixture(scope="module")
def branch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The series of the real checkout as a branch, made once."""
    folder = tmp_path_factory.mktemp("branch") / "fork"
    assert main(["export", str(folder)]) == 0
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x.invalid", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def clone(branch: Path, folder: Path) -> Path:
    git(branch.parent, "clone", "--quiet", "--shared", "--no-checkout", str(branch), str(folder))
    git(folder, "sparse-checkout", "set", "vllm/config")
    git(folder, "checkout", "--quiet", "fork")
    return folder


def test_export_then_import_is_byte_for_byte(checkout: Path, branch: Path) -> None:
    """Into a checkout whose patches are gone: all that comes back comes from the branch."""
    before = contents(checkout)
    for path in (checkout / PATCHES).rglob("*.patch"):
        path.unlink()
    series = checkout / PATCHES / "series"
    series.write_text("".join(line for line in series.read_text().splitlines(keepends=True) if line.startswith("#")))
    assert main(["import", str(branch)]) == 0
    assert contents(checkout) == before
    assert locked(checkout)


def test_the_tip_is_the_forked_tree(checkout: Path, branch: Path) -> None:
    assert git(branch, "status", "--porcelain") == ""
    for path in ("vllm/exl3_envs.py", "vllm/model_executor/layers/quantization/exl3.py"):
        assert git(branch, "show", f"fork:{path}") == (checkout / path).read_text()
    count = len(read_stack(checkout, read_pins(checkout), draft=True))
    assert int(git(branch, "rev-list", "--count", "overlay..fork")) == count


def test_an_edited_commit_comes_back_edited(checkout: Path, branch: Path, tmp_path: Path) -> None:
    work = clone(branch, tmp_path / "work")
    path = work / "vllm/config/vllm.py"
    path.write_text("# first line\n" + path.read_text())
    git(work, "commit", "--quiet", "-am", HEADER.split("Subject: ")[1].rstrip() + f"\nPatch: {NEW}")
    before = contents(checkout)
    assert main(["import", str(work)]) == 0
    after = contents(checkout)
    assert {name for name in after if after[name] != before.get(name)} == {NEW, "series"}
    assert b"+# first line\n" in after[NEW]
    assert locked(checkout)


COMMITS = {
    "no patch line": ("Say hello", "vllm/config/vllm.py", "0 lines 'Patch: vllm/AREA-VERB-OBJECT.patch', want 1"),
    "overlay": (f"Say hello\n\nPatch: {NEW}", "vllm/exl3_envs.py", "touches vllm/exl3_envs.py, which is the overlay's"),
    "twice": (f"Say hello\n\nPatch: {AFTER_IT}", "vllm/config/vllm.py", f"{AFTER_IT} is an earlier commit too"),
    "header": (f"Say hello\n\nPatch: {NEW}", "vllm/config/vllm.py", "0 lines between Subject and trailers"),
}


@pytest.mark.parametrize("case", COMMITS)
def test_commits_that_are_no_patches(checkout: Path, branch: Path, tmp_path: Path, refused: Refusal, case: str) -> None:
    message, file, told = COMMITS[case]
    work = clone(branch, tmp_path / "work")
    path = work / file
    path.write_text(path.read_text() + "# more\n")
    git(work, "commit", "--quiet", "-am", message)
    before = contents(checkout)
    assert told in refused("import", str(work))
    assert contents(checkout) == before


def test_export_into_a_folder_that_is_not_empty(checkout: Path, refused: Refusal) -> None:
    assert refused("export", "patches") == "patches: not empty, want a new folder for the branch"
