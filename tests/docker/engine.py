# SPDX-License-Identifier: Apache-2.0
"""A Docker engine of this test's own: Debian's dockerd under one folder, without a bridge, and a base image for it.

Needs root on Debian. Nothing outside the folder changes: no iptables rule, no network, no image of the machine's own
engine. Containers share the host's network, which is all that the test needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("docker.io", "mmdebstrap")
DAEMON = "/usr/sbin/dockerd"
CLIENT = "/usr/bin/docker"  # of the same version as the daemon, wherever else there is one
_OPTIONS = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
_EPOCH = "1767225600"  # seconds; the date of every file of the base, so that it is the same tar each time


def why_not() -> str:
    """Why there can be no engine here; empty where there can."""
    if os.getuid():
        return "only root can start a Docker engine"
    if shutil.which("apt-get") is None or not Path("/etc/debian_version").exists():
        return "its packages are Debian's"
    return ""


def install(cache: Path) -> Path:
    """Installs what is missing; returns the folder of compose and hadolint."""
    if not Path(DAEMON).exists() or shutil.which("mmdebstrap") is None:
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-qy", "--no-install-recommends", *PACKAGES, DEBIAN_FRONTEND="noninteractive")
    tools = cache / "image-tools"
    if not (tools / "bin" / "docker-compose").exists():
        run(sys.executable, "-m", "venv", "--clear", str(tools))
        listing = Path(__file__).with_name("tools.txt")  # by hash; Debian has neither
        run(str(tools / "bin/pip"), "install", "--quiet", "--no-deps", "--require-hashes", f"--requirement={listing}")
    return tools / "bin"


def run(*command: str, **environment: str) -> None:
    subprocess.run(command, env=os.environ | environment, check=True)


@contextmanager
def engine(folder: Path, *, keep: bool) -> Iterator[str]:
    """Starts dockerd below `folder`; yields its DOCKER_HOST; stops it and, unless it is kept, removes the folder."""
    folder.mkdir(parents=True, exist_ok=keep)
    host = f"unix://{folder}/socket"
    places = (f"--host={host}", f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid")
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen([DAEMON, *places, *_OPTIONS], stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait(host, daemon, folder / "log")
        yield host
    finally:
        daemon.terminate()
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        for name in sorted((folder / "exec" / "netns").glob("*")):
            subprocess.run(["umount", str(name)], check=False)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _wait(host: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    environment = os.environ | {"DOCKER_HOST": host}
    for _ in range(120):
        if subprocess.run([CLIENT, "info"], env=environment, capture_output=True, check=False).returncode == 0:
            return
        if daemon.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"dockerd does not answer:\n{log.read_text()[-3000:]}")


def base_image(cache: Path, docker: Sequence[str], environment: dict[str, str]) -> str:
    """A Debian 12 with its Python 3.11, made from packages: no registry is asked."""
    rootfs = cache / "image-base" / "rootfs.tar"
    if not rootfs.exists():
        rootfs.parent.mkdir(parents=True, exist_ok=True)
        partial = rootfs.with_suffix(".partial.tar")
        run(
            "mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,python3-venv,ca-certificates",
            "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*", "bookworm",
            str(partial), SOURCE_DATE_EPOCH=_EPOCH,
        )  # fmt: skip
        partial.replace(rootfs)
    (rootfs.parent / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n", encoding="utf-8")
    name = "exl3-test-base:bookworm"
    subprocess.run([*docker, "build", "--quiet", f"--tag={name}", str(rootfs.parent)], env=environment, check=True)
    return name
