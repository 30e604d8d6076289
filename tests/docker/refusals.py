# SPDX-License-Identifier: Apache-2.0
"""What compose, Docker and the image's preflight refuse, as a user meets it: `run.py` calls these with its image."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from run import Bench

DRIVER_MESSAGE = "could not select device driver"  # what Docker says of a GPU reservation without a GPU
END_SECONDS = 60  # for four tries, each as long as a preflight


def refused(bench: Bench, message: str, **variables: str) -> None:
    """`up` fails, and what it and the container say holds the message."""
    done = bench.compose("up", "--detach", "--wait", "--wait-timeout=120", check=False, **variables)
    said = done.stderr + bench.compose("logs", "--no-log-prefix", check=False, **variables).stdout
    bench.compose("down", check=False, **variables)
    assert done.returncode != 0, f"accepted: {variables}"
    assert message in said, f"{variables}: want {message!r} in:\n{said}"


def ends(bench: Bench) -> None:
    """With RESTART=on-failure:3, as docs/deployment.md says: a refusal ends, and so does what a dry run prints."""
    refusal, dry = {"RESTART": "on-failure:3", "TP": "3"}, {"RESTART": "on-failure:3", "DRY_RUN": "1"}
    for variables, code, most in ((refusal, "1", 3), (dry, "0", 0)):
        bench.compose("up", "--detach", **variables)
        name = bench.compose("ps", "--all", "--quiet", **variables).stdout.strip()
        state, seen = "{{.State.Status}} {{.State.ExitCode}} {{.RestartCount}}", ""
        began = time.monotonic()
        while not seen.startswith("exited") and time.monotonic() - began < END_SECONDS:
            time.sleep(0.5)
            seen = bench.docker("inspect", f"--format={state}", name).strip()
        time.sleep(1)  # the pause before a try is shorter
        again = bench.docker("inspect", f"--format={state}", name).strip()
        bench.compose("down", **variables)
        assert seen == again == f"exited {code} {most}", f"{variables}: {seen}, then {again}"


def busy_port(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server's own connections may linger
        taken.bind(("127.0.0.1", int(bench.variables["LISTEN_PORT"])))
        taken.listen()
        refused(bench, f"port {bench.variables['LISTEN_PORT']}: Address already in use")


def not_a_checkpoint(bench: Bench) -> None:
    empty = bench.folder / "empty"
    empty.mkdir(exist_ok=True)
    refused(bench, "model /model: no config.json, found nothing", MODEL_DIR=str(empty))


def closed_cache(bench: Bench) -> None:
    closed = bench.folder / "closed"
    closed.mkdir(mode=0o700, exist_ok=True)
    refused(bench, "Permission denied for user 1000:1000; want a folder it may write", CACHE_DIR=str(closed))


def no_gpu(bench: Bench) -> None:
    files = ["--file=docker/compose.yaml", "--file=docker/compose.gpu.yaml", "--file=tests/docker/host-network.yaml"]
    done = bench.call([str(bench.tools / "docker-compose"), *files, "up", "--detach"], check=False, **bench.variables)
    bench.compose("down", check=False)
    assert done.returncode != 0
    assert DRIVER_MESSAGE in done.stderr, done.stderr


REFUSALS: dict[str, Callable[[Bench], None]] = {
    "no IMAGE": lambda bench: refused(bench, "set IMAGE to the image to run", IMAGE="(unset)"),
    "no MODEL_DIR": lambda bench: refused(bench, "set MODEL_DIR to the folder of an EXL3", MODEL_DIR="(unset)"),
    "MODEL_DIR is not there": lambda bench: refused(bench, "does not exist", MODEL_DIR=str(bench.folder / "none")),
    "MODEL_DIR has no checkpoint": not_a_checkpoint,
    "once and for all, where asked": ends,
    "port busy": busy_port,
    "small /dev/shm": lambda bench: refused(bench, "/dev/shm: 64 MiB, want 512 MiB", SHM_SIZE="64m", TP="2"),
    "ranks that the model does not split into": lambda bench: refused(bench, "tensor parallel size 3: ", TP="3"),
    "no such preset": lambda bench: refused(bench, "PRESET=best: want one of generic, glm-5.2-exl3", PRESET="best"),
    "a knob's value": lambda bench: refused(bench, "VLLM_EXL3_FUSED='maybe': want ", VLLM_EXL3_FUSED="maybe"),
    "cache that is another's": closed_cache,
    "GPUs where there are none": no_gpu,
}
