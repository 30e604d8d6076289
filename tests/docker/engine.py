# SPDX-License-Identifier: Apache-2.0
"""A Docker engine of this test's own: Debian's dockerd under one folder, without a bridge, and a base image for it.

Needs root on Debian. Nothing outside the folder changes: no iptables rule, no network, no image of the machine's own
engine. Containers share the host's network, which is all that the test needs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
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
_BASE = (
    "--variant=minbase", "--include=python3,python3-venv,libpython3-dev,ca-certificates",
    "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*", "bookworm",
)  # fmt: skip
_EPOCH = "1767225600"  # seconds; the date of every file of the base, so that it is the same tar each time


def why_not() -> str:
    """Why there can be no engine here; empty where there can."""
    if os.getuid():
        return "only root can start a Docker engine"
    if shutil.which("apt-get") is None or not Path("/etc/debian_version").exists():
        return "its packages are Debian's"
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode:
        return "this machine lets nobody mount, as a container without CAP_SYS_ADMIN"
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


def heed_signals() -> None:
    """Lets ^C and kill end the program through its `finally` clauses."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(f"stopped by {signal.Signals(number).name}")

    for each in (signal.SIGINT, signal.SIGTERM):  # a shell starts what it puts in the background deaf to ^C
        signal.signal(each, stop)


@contextmanager
def engine(folder: Path, *, keep: bool) -> Iterator[str]:
    """Starts dockerd below `folder`; yields its DOCKER_HOST; stops it and, unless it is kept, removes the folder."""
    folder.mkdir(parents=True, exist_ok=keep)
    host = f"unix://{folder}/socket"
    places = (f"--host={host}", f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid")
    with (folder / "log").open("wb") as log:
        # In a session of its own: ^C comes to this process, which stops the daemon, which stops its containers.
        daemon = subprocess.Popen(
            [DAEMON, *places, *_OPTIONS], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(host, daemon, folder / "log")
        yield host
    finally:
        impatient = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
        _stop(daemon)
        _unmount(folder)
        if not keep:
            shutil.rmtree(folder)
        for each, handler in impatient.items():
            signal.signal(each, handler)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    """Ends the daemon, which ends its containers; kills one that does not."""
    daemon.terminate()
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _unmount(folder: Path) -> None:
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((place for place in places if place.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=True)


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
    """A Debian 12 with its Python 3.11 and the headers of it, made from packages: no registry is asked."""
    name = hashlib.sha256(" ".join(_BASE).encode()).hexdigest()[:12]
    folder = cache / "image-base" / name
    rootfs = folder / "rootfs.tar"
    if not rootfs.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "partial.tar"
        run("mmdebstrap", "--quiet", *_BASE, str(partial), SOURCE_DATE_EPOCH=_EPOCH)
        partial.replace(rootfs)
    (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n", encoding="utf-8")
    tag = f"exl3-test-base:{name}"
    subprocess.run([*docker, "build", "--quiet", f"--tag={tag}", str(folder)], env=environment, check=True)
    return tag
