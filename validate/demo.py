# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serves an EXL3 checkpoint with the fork's own server and asks it for a completion over HTTP.

MODEL is a folder with an EXL3 checkpoint; without it a small one is generated, whose random weights give nonsense.
PORT is the port on 127.0.0.1 (8000). DEMO_ONCE=1 stops after the answer; otherwise ^C does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
NAME = "demo"  # the model's name in requests
PROMPT = "The capital of France is"
START_LIMIT = 1800  # seconds; a large checkpoint on a CPU takes its time
STOP_LIMIT = 30  # seconds until a server that ignores SIGTERM is killed
LOG_LINES = 40  # of the server's log, shown when it fails


class DemoError(Exception):
    """Why there is no answer to show."""


def main(environment: Mapping[str, str] = os.environ) -> int:
    folder = Path("demo")
    folder.mkdir(exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        port = port_of(environment)
        require_free(port)
        model = Path(environment["MODEL"]) if environment.get("MODEL") else generated(folder / "checkpoint")
        with serving(model, port, folder / "server.log") as server:
            wait_until_ready(server, port, folder / "server.log")
            show(ask(port), generated=not environment.get("MODEL"))
            if environment.get("DEMO_ONCE") != "1":
                print(f"serving on http://{HOST}:{port}/v1 (model name: {NAME}) until ^C", flush=True)
                server.wait()
                raise DemoError(f"the server stopped with exit code {server.returncode}")
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped")
    return 0


def port_of(environment: Mapping[str, str]) -> int:
    text = environment.get("PORT") or "8000"
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise DemoError(f"PORT={text}: want a number from 1 to 65535")
    return int(text)


def require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is not busy
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise DemoError(f"port {port} on {HOST}: {error.strerror}; choose another with PORT=...") from None


def generated(folder: Path) -> Path:
    """A small synthetic checkpoint: random trellises are valid weights."""
    print(f"generating a small EXL3 checkpoint in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "validate", "make-checkpoint", "dense", str(folder), "--seed", "0"]
    if subprocess.run(command, check=False).returncode:
        raise DemoError(f"{' '.join(command[1:])} failed, see above")
    return folder


@contextmanager
def serving(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`vllm serve` in a process group of its own, stopped on the way out; what it prints goes to `log`."""
    if not (model / "config.json").is_file():
        raise DemoError(f"MODEL {model}: no config.json there, want a folder with an EXL3 checkpoint")
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(model), "--host", HOST, "--port", str(port), "--served-model-name", NAME]
    command += ["--max-model-len", "1024", "--enforce-eager"]
    print(" ".join(["starting vllm", *command[1:]]), flush=True)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}  # GiB
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield server
        finally:
            stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, which stops its engine; after a while, or at a second ^C, what is left is killed."""
    if server.poll() is None:
        server.terminate()
    try:
        server.wait(STOP_LIMIT)
    except subprocess.TimeoutExpired:
        print(f"the server did not stop in {STOP_LIMIT} s, killing it", flush=True)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    start, said = time.monotonic(), 0.0
    while True:
        elapsed = time.monotonic() - start
        if server.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise DemoError(f"the server stopped with exit code {server.returncode}; the end of {log}:\n{tail}")
        if elapsed > START_LIMIT:
            raise DemoError(f"the server was not ready after {START_LIMIT} s; see {log}")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
                print(f"ready after {elapsed:.0f} s", flush=True)
                return
        except (urllib.error.URLError, OSError):
            pass
        if elapsed - said >= 5:
            said = elapsed
            lines = log.read_text(errors="replace").splitlines() or [""]
            print(f"  {elapsed:3.0f} s  {lines[-1].strip()[:100]}", flush=True)
        time.sleep(0.5)


def ask(port: int) -> str:
    body = json.dumps({"model": NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(f"http://{HOST}:{port}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        raise DemoError(f"/v1/completions: {error.code} {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise DemoError(f"/v1/completions: {error}") from None


def show(text: str, *, generated: bool) -> None:
    print(f"prompt:     {PROMPT}\ncompletion: {text!r}", flush=True)
    if generated:
        print("(this checkpoint's weights are random, so its text is nonsense; MODEL=dir make demo serves a real one)")


if __name__ == "__main__":
    sys.exit(main())
