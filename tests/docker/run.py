# SPDX-License-Identifier: Apache-2.0
"""`make test-image`: builds the CPU image with a real Docker engine and uses it as a user does.

Lint, compose in both modes, build, up, chat, recreate, stop, refusals, the installed files against the lock; then the
CUDA image up to its compiled extension. COMPILE=0 leaves that out. TWICE=1 builds it all a second time and compares;
WHOLE=1 builds the whole CUDA image, of which nothing can run without a GPU but its own import test. KEEP=1 keeps the
engine's layers in .cache, for the next run. Needs root on Debian: elsewhere it says so and passes, but fails under CI.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import engine
import refusals
import twice

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
TAG, TAG_CUDA = "exl3-vllm:test-cpu", "exl3-vllm:test-cuda"
STOP_SECONDS = 15


@dataclass
class Bench:
    """An engine, its tools, a checkpoint, and the variables that a user would set."""

    tools: Path
    host: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(engine.CLIENT).parent}:{self.tools}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.folder), "DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "1"}

    def docker(self, *arguments: str) -> str:
        return self.call([engine.CLIENT, *arguments]).stdout

    def compose(self, *arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        files = ["--file=docker/compose.yaml", "--file=tests/docker/host-network.yaml"]
        command = [str(self.tools / "docker-compose"), *files, *arguments]
        return self.call(command, check=check, **(self.variables | variables))

    def call(self, command: list[str], check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | {name: value for name, value in variables.items() if value != "(unset)"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done


def main() -> int:
    engine.heed_signals()
    if reason := engine.why_not():
        print(f"test-image: not run, for {reason}")
        return 1 if os.environ.get("CI") else 0
    tools = engine.install(CACHE)
    folder = Path(tempfile.mkdtemp(prefix="exl3-image-"))
    try:
        lint(tools)
        keep = os.environ.get("KEEP") == "1"
        with engine.engine(CACHE / "image-engine" if keep else folder / "docker", keep=keep) as host:
            bench = Bench(tools=tools, host=host, folder=folder)
            with step("base image"):
                base = engine.base_image(CACHE, [engine.CLIENT], bench.environment)
            build(bench, base, "--target=cpu", f"--tag={TAG}")
            prepare(bench)
            serve(bench)
            for name, check in refusals.REFUSALS.items():
                with step(f"refused: {name}"):
                    check(bench)
            with step("installed files against the lock"):
                installed(bench)
            if os.environ.get("TWICE") == "1":
                built_twice(bench, base, TAG, "--target=cpu")
            if os.environ.get("COMPILE") != "0":
                compiled(bench, base)
            if os.environ.get("WHOLE") == "1":
                build(bench, base, "--target=cuda", f"--tag={TAG_CUDA}")
                with step("CUDA: installed files against the lock"):
                    installed(bench, TAG_CUDA, "cuda")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


@contextmanager
def step(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"ok  {time.monotonic() - began:6.1f} s  {name}", flush=True)


def lint(tools: Path) -> None:
    with step("Dockerfile and compose files"):
        subprocess.run([tools / "hadolint", "docker/Dockerfile"], cwd=ROOT, check=True)
        given = {"PATH": os.environ["PATH"], "IMAGE": "x", "MODEL_DIR": "/x"}
        for files in (["--file=docker/compose.yaml"], []):  # without --file, .env names both
            subprocess.run([tools / "docker-compose", *files, "config", "--quiet"], cwd=ROOT, env=given, check=True)
        text = subprocess.run(
            [tools / "docker-compose", "config"], cwd=ROOT, env=given, check=True, capture_output=True, text=True
        ).stdout
        assert "driver: nvidia" in text, "the default composition has no GPU"


def build(bench: Bench, base: str, *options: str) -> None:
    with step(f"build {' '.join(options)}"):
        command = [sys.executable, "-m", "release", "build", f"--base={base}", "--python=3.11"]
        done = subprocess.run(
            [*command, *options, "--docker-option=--network=host", "--docker-option=--progress=plain"], cwd=ROOT,
            env=os.environ | bench.environment | {"HOME": os.environ.get("HOME", "/root")}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def prepare(bench: Bench) -> None:
    """A checkpoint, a port, a folder for caches that the image's user may write."""
    model, cache = bench.folder / "model", bench.folder / "cache"
    subprocess.run(
        [sys.executable, "-m", "validate", "make-checkpoint", "dense", model, "--seed", "0"], cwd=ROOT, check=True
    )
    bench.folder.chmod(0o755)
    cache.mkdir()
    os.chown(cache, 1000, 1000)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bench.variables = {
        "IMAGE": TAG, "MODEL_DIR": str(model), "CACHE_DIR": str(cache), "LISTEN_PORT": str(port),
        "LISTEN_HOST": "127.0.0.1", "SERVED_MODEL_NAME": "demo", "MAX_MODEL_LEN": "512", "API_KEY": "sesame",
        "VLLM_CPU_KVCACHE_SPACE": "1", "SHM_SIZE": "1g", "RESTART": "no",
    }  # fmt: skip


def serve(bench: Bench) -> None:
    with step("dry run"):
        said = bench.compose("run", "--rm", "server", "--seed", "7", DRY_RUN="1", MTP_TOKENS="2").stdout
        assert said.startswith("vllm serve /model --host 127.0.0.1 "), said
        assert said.splitlines()[0].endswith(" --seed 7"), said
        assert "VLLM_API_KEY=(set, not shown)" in said.splitlines(), said
        assert "sesame" not in said
    with step("up until healthy"):
        up(bench)
    with step("chat"):
        first = chat(bench)
    with step("user, weights and root are as they should be"):
        confined(bench)
    with step("recreated: the same answer, from the same caches"):
        before = cached(bench)
        bench.compose("up", "--detach", "--wait", "--wait-timeout=600", "--force-recreate")
        assert chat(bench) == first
        assert before, "nothing was cached"
        assert before <= cached(bench), "caches were made anew"
        assert "sesame" not in bench.compose("logs").stdout, "the key is in the log"
    with step("stopped in time"):
        began = time.monotonic()
        bench.compose("stop")
        took = time.monotonic() - began
        assert took < STOP_SECONDS, f"stop took {took:.0f} s"
    bench.compose("down", "--volumes")


def up(bench: Bench) -> None:
    done = bench.compose("up", "--detach", "--wait", "--wait-timeout=600", check=False)
    if done.returncode:
        raise AssertionError(f"up: {done.stderr}\n{bench.compose('logs', '--tail=80').stdout}")


def chat(bench: Bench) -> str:
    body = {"model": "demo", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{bench.variables['LISTEN_PORT']}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer sesame"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    assert text, "the answer is empty"
    return str(text)


def confined(bench: Bench) -> None:
    script = "id -u; touch /model/x 2>&1; touch /opt/x 2>&1; command -v gcc cc c++ make"
    script += "; cp /bin/echo /tmp; /tmp/echo ran"  # as what is compiled there at run time
    lines = bench.compose("exec", "-T", "server", "sh", "-c", script).stdout.splitlines()
    assert (lines[0], lines[-1]) == ("1000", "ran"), lines
    assert [line.rpartition(": ")[2] for line in lines[1:-1]] == ["Read-only file system"] * 2, lines


def cached(bench: Bench) -> set[str]:
    """Files that the server wrote, but for its logs and locks."""
    cache = Path(bench.variables["CACHE_DIR"])
    return {f"{path}:{path.stat().st_mtime_ns}" for path in cache.rglob("*.pyc")}


def compiled(bench: Bench, base: str) -> None:
    """The extension, once or twice, and the wheel with it: each time the same bytes."""
    times = 2 if os.environ.get("TWICE") == "1" else 1
    made: list[tuple[Path, bytes, bytes]] = []
    for number in range(times):
        folder = bench.folder / f"extension-{number}"
        again = ["--docker-option=--no-cache"] if number else []
        build(bench, base, "--target=cuda", "--stage=extension", f"--docker-option=--output={folder}", *again)
        [library] = folder.iterdir()
        command = [sys.executable, "-m", "release", "compose", "--target=cuda", f"--extension={library}"]
        subprocess.run([*command, f"--out={folder / 'wheel'}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        [wheel] = (folder / "wheel").iterdir()
        made.append((wheel, library.read_bytes(), wheel.read_bytes()))
    with step(f"CUDA: {made[0][0].name} built {times} times"):
        assert len({library for _, library, _ in made}) == 1, "two builds of the extension differ"
        assert len({wheel for _, _, wheel in made}) == 1, "two builds of the wheel differ"


def built_twice(bench: Bench, base: str, tag: str, *order: str) -> None:
    """Builds the image of `tag` again, from nothing but its base, and holds every file to the first's."""
    build(bench, base, *order, f"--tag={tag}-again", "--docker-option=--no-cache")
    with step(f"{tag}: two builds are the same"):
        first, second = (
            twice.read_image([engine.CLIENT], bench.environment, name, bench.folder) for name in (tag, f"{tag}-again")
        )
        print(f"    {twice.require_same(first, second)}")


def installed(bench: Bench, tag: str = TAG, target: str = "cpu") -> None:
    mount = f"{ROOT}:/src:ro"
    options = ["--rm", "--network=none", "--entrypoint=/opt/vllm/bin/python", f"--volume={mount}", "--workdir=/src"]
    said = bench.docker("run", *options, tag, "-m", "release", "verify", "--installed", target)
    assert "as locked" in said, said


if __name__ == "__main__":
    sys.exit(main())
