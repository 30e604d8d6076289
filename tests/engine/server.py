"""`vllm serve` as a user starts it: a process of its own, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VLLM = Path(sys.executable).with_name("vllm")
START_SECONDS = 240
STOP_SECONDS = 30


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what tests set for engines of their own."""
    env = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return env | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"} | extra


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Server:
    """A running server."""

    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())


@contextmanager
def serve(model: Path | str, folder: Path, *options: str, **env: str) -> Iterator[Server]:
    """Serve `model` until the block ends; the log goes to `folder`."""
    port = free_port()
    log = folder / f"serve-{port}.log"
    with log.open("w") as out:
        process = _start(model, port, options, env, out)
        try:
            server = Server(url=f"http://127.0.0.1:{port}", log=log)
            _wait(process, server)
            yield server
        finally:
            _stop(process)


def serve_and_fail(model: Path | str, folder: Path, *options: str, **env: str) -> tuple[int, str, float]:
    """Serve what must be refused.  Returns exit code, log and seconds until it ended."""
    log = folder / "refused.log"
    began = time.monotonic()
    with log.open("w") as out:
        process = _start(model, free_port(), options, env, out)
        try:
            code = process.wait(timeout=START_SECONDS)
        finally:
            _stop(process)
    return code, log.read_text(), time.monotonic() - began


def _start(model: Path | str, port: int, options: tuple[str, ...], env: dict[str, str], out: Any) -> subprocess.Popen:
    defaults = ["--enforce-eager", "--max-model-len", "256", "--host", "127.0.0.1", "--port", str(port)]
    command = [str(VLLM), "serve", str(model), *defaults, *options]
    return subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, env=environment(**env), start_new_session=True
    )


def _wait(process: subprocess.Popen, server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{server.log.read_text()[-4000:]}")
        try:
            server.get("/health")
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
        else:
            return
    raise AssertionError(f"the server was not ready in {START_SECONDS} s:\n{server.log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen) -> None:
    """End the server as a service manager does, and whatever is left of its process group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
