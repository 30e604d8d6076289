# SPDX-License-Identifier: Apache-2.0
"""docker/healthcheck against servers that listen here or there."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker/healthcheck"


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Ill(Health):
    status = 503


class Server6(http.server.HTTPServer):
    address_family = socket.AF_INET6


@contextmanager
def serving(address: str, handler: type[Health] = Health) -> Iterator[int]:
    """Yields the port."""
    kind = Server6 if ":" in address else http.server.HTTPServer
    try:
        server = kind((address, 0), handler)
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def healthy(**environment: str) -> bool:
    script = SCRIPT.read_text().replace("/opt/vllm/bin/python", sys.executable)
    given = os.environ | {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""} | environment
    done = subprocess.run(["sh", "-c", script], env=given, capture_output=True, check=False)
    assert done.stdout + done.stderr == b""
    return done.returncode == 0


# LISTEN_HOST -> where vLLM listens then
HOSTS = {
    "": "0.0.0.0", " ": "0.0.0.0", "0.0.0.0": "0.0.0.0", "::": "::", "127.0.0.2": "127.0.0.2", "::1": "::1",
    "localhost": "127.0.0.1",
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_the_server_is_asked_where_it_listens(host: str) -> None:
    with serving(HOSTS[host]) as port:
        assert healthy(LISTEN_HOST=host, LISTEN_PORT=str(port))
    assert not healthy(LISTEN_HOST=host, LISTEN_PORT=str(port))


def test_a_server_that_says_it_is_ill() -> None:
    with serving("127.0.0.1", Ill) as port:
        assert not healthy(LISTEN_PORT=str(port))
