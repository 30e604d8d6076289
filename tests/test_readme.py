"""The README says nothing that is not so: variables, make targets and paths that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from vllm import exl3_envs

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(VLLM_EXL3_\w+)` \| (\S+) \| (.+) \|$", re.MULTILINE)


def test_knob_table_is_the_registry():
    def said(default: object) -> str:
        if default is None:
            return "unset"
        return str(int(default)) if isinstance(default, bool) else str(default)

    assert ROW.findall(README) == [(knob.name, said(knob.default), knob.help) for knob in exl3_envs.KNOBS]


def test_no_other_variable_is_named_anywhere_in_the_docs():
    known = {knob.name for knob in exl3_envs.KNOBS}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "csrc").glob("**/*.md")]:
        named = set(re.findall(r"VLLM_EXL3_[A-Z_]+[A-Z]", path.read_text(encoding="utf-8")))
        assert named <= known, path.name


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    blocks = "\n".join(re.findall(r"^    .*$|`[^`]+`", README, re.MULTILINE))
    named = {word for words in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", blocks) for word in words.split()}
    named -= {"git", "python"}  # packages in the apt-get line
    assert named
    assert named <= targets


def test_paths_exist():
    named = set(re.findall(r"`((?:release|patches|tests|vllm|csrc|docker|docs)/[\w./-]*)`", README))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
