# SPDX-License-Identifier: Apache-2.0
"""What stands in the way, for machines given as data and checkpoints that are really there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from validate import check_checkpoint, gpu_holders, machine, preflight
from validate.__main__ import main
from validate.machine import Gpu, Machine

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
BLACKWELL = Gpu(
    index=0, name="RTX PRO 6000", capability=(12, 0), total_bytes=96 * GIB, free_bytes=94 * GIB, driver=(580, 95, 5)
)
BOX = Machine(
    target="cuda", free_bytes=500 * GIB, shm_bytes=32 * GIB, gpus=tuple(replace(BLACKWELL, index=i) for i in range(4))
)
PC = Machine(target="cpu", free_bytes=8 * GIB, shm_bytes=GIB)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "dense"
    assert main(["make-checkpoint", "dense", str(folder), "--seed", "0"]) == 0
    return folder


def told(folder: Path, found: Machine = BOX, tp: int = 1, **others: str | int) -> list[str]:
    """others: further sizes, in small letters, and variables of the environment."""
    ranks = preflight.Ranks(tp=tp, **{name: size for name, size in others.items() if name.islower()})
    environment = {name: value for name, value in others.items() if not name.islower()}
    return preflight.problems(folder, ranks=ranks, found=found, environment=environment, cache=None, port=None)


def test_nothing_in_the_way(checkpoint: Path) -> None:
    assert told(checkpoint) == []
    assert told(checkpoint, PC) == []
    assert told(checkpoint, tp=2) == []


def with_gpu(**changes: object) -> Machine:
    return replace(BOX, gpus=(replace(BLACKWELL, **changes), *BOX.gpus[1:]))


MACHINES: dict[str, tuple[Machine, int, str]] = {
    "no GPU": (
        replace(BOX, gpus=(), gpu_error="nvidia-smi lists none"), 1,
        "no GPU: nvidia-smi lists none; want 1 (docker/compose.gpu.yaml hands them over)",
    ),
    "too few": (replace(BOX, gpus=BOX.gpus[:1]), 2, "tensor parallel size 2: 1 GPUs are visible (TP)"),
    "old driver": (with_gpu(driver=(550, 54, 15)), 1, "driver 550.54.15: want 580.65 or newer, for CUDA 13"),
    "old card": (
        with_gpu(capability=(7, 5), name="T4"), 1, "GPU 0 (T4): compute capability 7.5, want 8.0 or newer",
    ),
    "full card": (
        with_gpu(free_bytes=0), 1, "GPU 0 (RTX PRO 6000): 0.0 of 96.0 GiB free, the weights of a rank take 0.0 GiB",
    ),
    "card that shares main memory": (
        replace(with_gpu(free_bytes=None, total_bytes=None), free_bytes=0), 1,
        "GPU 0 (RTX PRO 6000): 0.0 GiB of main memory free, the weights of a rank take 0.0 GiB",
    ),
    "little memory": (replace(PC, free_bytes=0), 1, "memory: 0.0 GiB free, the decoded weights take 0.0 GiB"),
    "Docker's /dev/shm": (
        replace(BOX, shm_bytes=64 << 20), 2,
        "/dev/shm: 64 MiB, want 512 MiB for 2 ranks (SHM_SIZE, or docker run --shm-size)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MACHINES)
def test_machine(checkpoint: Path, case: str) -> None:
    found, tp, message = MACHINES[case]
    assert told(checkpoint, found, tp) == [message]


def test_hidden_gpus_do_not_count(checkpoint: Path) -> None:
    busy = with_gpu(free_bytes=0)
    assert told(checkpoint, busy, CUDA_VISIBLE_DEVICES="1") == []
    assert len(told(checkpoint, busy, CUDA_VISIBLE_DEVICES="0")) == 1
    assert told(checkpoint, busy, CUDA_VISIBLE_DEVICES="GPU-8d1f,GPU-77aa") == told(checkpoint, busy)
    assert told(checkpoint, tp=2, CUDA_VISIBLE_DEVICES="3,1") == []
    (few,) = told(checkpoint, tp=2, CUDA_VISIBLE_DEVICES="3,7,1")  # CUDA stops at 7
    assert few == "tensor parallel size 2: 1 GPUs are visible (TP)"
    (none,) = told(checkpoint, CUDA_VISIBLE_DEVICES="9")
    assert none.startswith("no GPU: CUDA_VISIBLE_DEVICES=9, and nvidia-smi lists 0, 1, 2, 3")


def test_stages_and_machines_share_the_model(checkpoint: Path) -> None:
    whole = check_checkpoint.Audit(checkpoint, 1).rank_bytes()
    room = sum(whole[name] for name in ("experts", "other_tensors_of_all_ranks")) * 3 // 4
    small = replace(BOX, gpus=tuple(replace(gpu, free_bytes=room, total_bytes=room) for gpu in BOX.gpus))
    assert len(told(checkpoint, small)) == 1
    assert told(checkpoint, small, pp=2) == []
    assert "tensor parallel size 1, 8 data parallel replicas: 4 GPUs are visible (TP)" in told(checkpoint, dp=8)
    assert told(checkpoint, pp=4, tp=2) == ["tensor parallel size 2, pipeline parallel size 4: 4 GPUs are visible (TP)"]
    assert told(checkpoint, pp=4, tp=2, nodes=2) == []


HELD = "GPU 0 (RTX PRO 6000): 60.0 of 96.0 GiB free, utilisation 0.92 is 88.3 GiB; memory is held by "


@pytest.mark.parametrize("holders", [["python (process 7, 35.0 GiB)", "ollama (process 9)"], []])
def test_a_card_that_others_use(checkpoint: Path, holders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_holders, "look", lambda index: holders)
    unknown = "the driver or others, nvidia-smi does not say which"
    known = "python (process 7, 35.0 GiB), ollama (process 9)" if holders else unknown
    shared = with_gpu(free_bytes=60 * GIB)
    assert told(checkpoint, shared) == [f"{HELD}{known}: stop them, or lower GPU_MEMORY_UTILIZATION"]
    assert told(checkpoint, shared, CUDA_VISIBLE_DEVICES="1") == []
    asked = {"ranks": preflight.Ranks(), "environment": {}, "cache": None, "port": None}
    for utilisation, count in ((0.62, 0), (0.63, 1)):  # of 96 GiB: 59.5 and 60.5
        assert len(preflight.problems(checkpoint, found=shared, utilisation=utilisation, **asked)) == count


HOLDERS = "7, /usr/bin/python3, 35840\n9, [Not Found], [N/A]\nNo running processes found\n"


def test_nvidia_smi_s_processes() -> None:
    assert gpu_holders.read(HOLDERS) == ["python3 (process 7, 35.0 GiB)", "[Not Found] (process 9)"]


def test_docker_s_own_shm_is_enough_for_one_rank(checkpoint: Path) -> None:
    assert told(checkpoint, replace(BOX, shm_bytes=64 << 20)) == []


ENVIRONMENTS = {
    "knob": ({"VLLM_EXL3_PREFILL_CHUNK": "many"}, "VLLM_EXL3_PREFILL_CHUNK='many': want "),
    "service": ({"VLLM_PORT": "tcp://10.0.0.1:8000"}, "VLLM_PORT=tcp://10.0.0.1:8000: want a number. Kubernetes sets"),
    "compat": (
        {"LD_LIBRARY_PATH": "/usr/lib:/usr/local/cuda/compat"},
        "LD_LIBRARY_PATH: /usr/local/cuda/compat hides the driver's own libcuda",
    ),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_environment(checkpoint: Path, case: str) -> None:
    environment, message = ENVIRONMENTS[case]
    [found] = told(checkpoint, **environment)
    assert found.startswith(message)


def test_blank_knobs_are_unset(checkpoint: Path) -> None:
    assert told(checkpoint, VLLM_EXL3_PREFILL_CHUNK="", VLLM_PORT="", LD_LIBRARY_PATH="") == []


def test_wrong_number_of_ranks(checkpoint: Path) -> None:
    heads = json.loads((checkpoint / "config.json").read_text())["num_attention_heads"]
    found = told(checkpoint, tp=3)
    assert f"tensor parallel size 3: {heads} attention heads; this model takes 1" in found[-1]


def test_no_checkpoint(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert told(missing) == [f"model {missing}: no such folder; want one with an EXL3 checkpoint (MODEL_DIR)"]
    (tmp_path / "photo.jpg").touch()
    wanted = "want a folder with an EXL3 checkpoint (MODEL_DIR)"
    assert told(tmp_path) == [f"model {tmp_path}: no config.json, found photo.jpg; {wanted}"]


def test_another_kind_of_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}')
    header = b'{"a.weight":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert told(tmp_path) == [f"model {tmp_path}: no tensor named *.trellis is there"]


@pytest.fixture
def sparse(tmp_path: Path, checkpoint: Path) -> Path:
    """The checkpoint by the name of a model with sparse attention."""
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((checkpoint / "config.json").read_text()) | {"architectures": ["GlmMoeDsaForCausalLM"]}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_sparse_attention_needs_a_card_that_has_it(sparse: Path) -> None:
    assert told(sparse) == []
    ada = replace(BOX, gpus=(replace(BLACKWELL, name="L40S", capability=(8, 9)),))
    why = "compute capability 8.9 has no sparse attention for GlmMoeDsaForCausalLM, want a card of 9.x, 10.x or 12.x"
    assert told(sparse, ada) == [f"GPU 0 (L40S): {why}"]


def test_sparse_attention_shares_a_context_out_on_some_cards_only(sparse: Path, checkpoint: Path) -> None:
    one = replace(BOX, gpus=BOX.gpus[:1])
    ranks = preflight.Ranks(dcp=2)

    def said(folder: Path, found: Machine) -> list[str]:
        return preflight.problems(folder, ranks=ranks, found=found, environment={}, cache=None, port=None)

    why = "sparse attention of compute capability 12.0, for GlmMoeDsaForCausalLM, cannot share a context out"
    wanted = f"decode context parallel size 2: {why}; want 1, or cards of 9.x or 10.x"
    assert said(sparse, one) == [f"GPU 0 (RTX PRO 6000): {wanted}"]
    assert said(sparse, replace(BOX, gpus=(replace(BLACKWELL, capability=(9, 0)),))) == []
    assert said(checkpoint, one) == []


def test_busy_port(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        number = taken.getsockname()[1]
        [found] = preflight.problems(
            checkpoint, ranks=preflight.Ranks(), found=BOX, environment={}, cache=None, port=number
        )
    assert found == f"port {number}: Address already in use; stop what listens there, or choose another"


def test_cache_that_cannot_be_written(checkpoint: Path) -> None:
    """Below /proc not even root may make a folder."""
    cache = Path("/proc/cache")
    [found] = preflight.problems(checkpoint, ranks=preflight.Ranks(), found=BOX, environment={}, cache=cache, port=None)
    assert found.startswith(f"cache {cache}: ")
    assert found.endswith(f"for user {os.getuid()}:{os.getgid()}; want a folder it may write (CACHE_DIR, RUN_AS)")


def test_nvidia_smi_s_rows() -> None:
    rows = "0, NVIDIA H200, 9.0, 143771, 143150, 580.95.05\n1, NVIDIA T4, 7.5, 15360, 15000, 535.1\n"
    first, second = machine.read_gpus(rows)
    assert (first.name, first.capability, first.driver) == ("NVIDIA H200", (9, 0), (580, 95, 5))
    assert (first.total_bytes, second.free_bytes) == (143771 << 20, 15000 << 20)
    assert second.capability == (7, 5)


def test_a_card_that_shares_main_memory_has_no_number_of_its_own() -> None:
    (gpu,) = machine.read_gpus("0, NVIDIA GB10, 12.1, [N/A], [N/A], 580.95.05\n")
    assert (gpu.capability, gpu.total_bytes, gpu.free_bytes) == ((12, 1), None, None)


@pytest.mark.parametrize(
    "row",
    ["0, NVIDIA H200, [N/A], 143771, 143150, 580.95", "0, NVIDIA H200, 9.0, 143771, 143150, [N/A]", "No devices found",
     "0, NVIDIA H200, 9.0, 143771, [Unknown Error], 580.95"],
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_quoted(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{row}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = machine.look("cuda")
    wanted = "index, name, compute_cap, memory.total, memory.free, driver_version"
    assert (found.gpus, found.gpu_error) == ((), f"nvidia-smi says {row!r}, want {wanted}")


def test_the_command_tells_everything_in_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "validate", "preflight", str(tmp_path / "none"), "--target", "cpu"]
    environment = os.environ | {"VLLM_PORT": "tcp://x:1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "preflight: 2 things to put right"
    assert [line[:4] for line in lines[1:]] == ["  * ", "  * "]


def test_it_needs_neither_torch_nor_vllm(checkpoint: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from validate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "preflight", str(checkpoint), "--target", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "preflight: nothing stands in the way\n"), done.stderr
