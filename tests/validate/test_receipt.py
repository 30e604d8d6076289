# SPDX-License-Identifier: Apache-2.0
"""What a receipt is sensitive to, and what it leaves out."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess

import pytest

from release.checkout import sha256, sha256_of_file, tree_hash
from validate import machine, receipt
from validate.__main__ import main
from validate.client import Client


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small checkpoint."""
    folder = tmp_path_factory.mktemp("receipt") / "model"
    assert main(["make-checkpoint", "dense", str(folder), "--seed", "0"]) == 0
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


def change_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))


def change_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"down_proj", b"gown_proj", 1))


def grow(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("change", [change_config, change_header, grow])
def test_another_checkpoint_has_another_digest(folder, change):
    before = receipt.checkpoint(folder)
    assert before == receipt.checkpoint(folder)
    change(folder)
    assert receipt.checkpoint(folder)["digest"] != before["digest"]


def test_what_lies_beside_a_checkpoint_is_none_of_it(folder):
    before = receipt.checkpoint(folder)
    (folder / "other.safetensors").write_bytes(b"\0" * 64)
    assert receipt.checkpoint(folder) == before
    assert before["name"] == "model"
    assert before["weight_files"] == 1


def test_recorded_trees_are_counted_as_the_lock_counts_them():
    contents = {"vllm/__init__.py": b"1", "vllm/envs.py": b"2"}
    apart = {
        "vllm/model_executor/layers/quantization/exl3_trellis/_exl3_C.abi3.so": b"3",
        "vllm/__pycache__/envs.cpython-311.pyc": b"4",
        "vllm-1.dist-info/METADATA": b"5",
        "../../../bin/vllm": b"6",
    }

    def row(path, content):
        digest = base64.urlsafe_b64encode(bytes.fromhex(sha256(content))).rstrip(b"=").decode()
        return f"{path},sha256={digest},{len(content)}"

    record = [row(*each) for each in (contents | apart).items()] + ["vllm-1.dist-info/RECORD,,"]
    assert receipt.recorded_tree("\n".join(record)) == tree_hash({name: sha256(c) for name, c in contents.items()})


def test_an_image_tells_its_build_and_a_checkout_its_lock(tmp_path, monkeypatch):
    (tmp_path / "build.json").write_text(json.dumps({"lock_sha256": "ab", "tree": "cd"}))
    monkeypatch.setenv("EXL3_HOME", str(tmp_path))
    assert receipt.build() == {"source": "image", "lock_sha256": "ab", "tree": "cd"}
    monkeypatch.delenv("EXL3_HOME")
    found = receipt.build()
    assert found["source"] == "checkout"
    assert found["lock_sha256"] == sha256_of_file(receipt.ROOT / "release" / "manifest.lock")
    assert set(found["tree"]) == {"cpu", "cuda"}
    monkeypatch.setattr(receipt, "ROOT", tmp_path / "nowhere")
    assert receipt.build() == {"source": "unknown", "tree": ""}


@pytest.mark.parametrize(
    ("tree", "as_locked"), [("ab", True), ({"cpu": "ab", "cuda": "cd"}, True), ("cd", False), ({"cuda": "cd"}, False)]
)
def test_says_whether_what_is_installed_is_what_was_locked(monkeypatch, tree, as_locked):
    monkeypatch.setattr(receipt, "build", lambda: {"tree": tree})
    monkeypatch.setattr(receipt, "installed", lambda: {"recorded_tree": "ab"})
    assert receipt.here()["installed"]["as_locked"] is as_locked


def test_gpus_are_named_with_their_driver(monkeypatch):
    rows = "0, NVIDIA RTX PRO 6000, 12.0, 97887, 97000, 580.65.06\n"
    done = subprocess.CompletedProcess([], 0, stdout=rows, stderr="")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)
    assert receipt.gpus() == [{"name": "NVIDIA RTX PRO 6000", "driver": "580.65.06"}]
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 9, "", "no driver"))
    assert receipt.gpus() == "none"


@pytest.mark.parametrize(("version", "same"), [("1.2", True), ("1.3", False)])
def test_says_whether_the_server_is_of_the_version_that_is_installed_here(monkeypatch, version, same):
    monkeypatch.setattr(receipt, "installed", lambda: {"version": "1.2"})
    client = Client(url="http://there", timeout=1, model="m", card={"id": "m", "root": "m", "max_model_len": 8})
    monkeypatch.setattr(Client, "get_json", lambda self, path: {"version": version})
    made = receipt.make(client, None)
    assert made["same_version"] is same
    assert made["server"] == {"url": "http://there", "version": version, "model": client.card}


def test_prints_and_writes(folder, tmp_path, capsys):
    assert receipt.main(["--model", str(folder)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert receipt.main(["--model", str(folder), "--out", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert printed.keys() == written.keys() == {"made", "here", "checkpoint"}
    assert printed["checkpoint"] == written["checkpoint"]


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path, capsys):
    assert receipt.main(["--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == f"validate: {tmp_path}: no config.json there, want a checkpoint's folder\n"
