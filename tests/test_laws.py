# SPDX-License-Identifier: Apache-2.0
"""The laws of the repository: what is true of every commit, whatever it is about."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from release import manifest, stack
from release.checkout import OVERLAY, files_of
from release.pins import TARGETS, read_pins
from release.upstream import obtain

ROOT = Path(__file__).resolve().parents[1]
TRELLIS = "vllm/model_executor/layers/quantization/exl3_trellis"
LISTING = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
FILES = subprocess.run(LISTING, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
FILES = sorted(file for file in FILES if (ROOT / file).is_file())
PYTHON = [file for file in FILES if file.endswith(".py")]

# ring -> what its modules must not import, at any depth
RINGS = {
    "checkpoint": ("torch", "vllm"),
    "codebook": ("torch", "vllm"),
    "layout": ("vllm",),
    "pools": ("vllm",),
    "reference": ("vllm",),
    "linear_check": ("vllm",),
    "ops": ("vllm",),
    "plan": ("vllm",),
    "moe_plan": ("torch", "vllm"),
    "moe_startup": ("vllm",),
    "moe_dispatch": ("vllm",),
    "backends": ("vllm",),
}
# Imports a module with `vllm` narrowed to the overlay, so that nothing of upstream can be found, and a ban on more.
_IMPORT_ALONE = """
import importlib, sys, types
module, overlay, *banned = sys.argv[1:]
vllm = types.ModuleType("vllm")
vllm.__path__ = [overlay]
sys.modules["vllm"] = vllm
sys.modules.update({name: None for name in banned if name != "vllm"})
importlib.import_module(module)
"""


def _ring_modules() -> Iterator[tuple[str, tuple[str, ...]]]:
    for ring, banned in RINGS.items():
        folder = ROOT / TRELLIS / ring
        for file in sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
            yield file.relative_to(ROOT).as_posix(), banned


RING_MODULES = list(_ring_modules())


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("target", TARGETS)
def test_the_overlay_only_adds(target: str) -> None:
    with zipfile.ZipFile(obtain(ROOT, read_pins(ROOT), target)) as wheel:
        assert sorted(set(files_of(ROOT, OVERLAY)) & set(wheel.namelist())) == []


def test_the_overlay_never_shadows_the_installed_package() -> None:
    """No __init__.py from the root down to our own package: a checkout on the path stays a namespace package."""
    inits = [file for file in files_of(ROOT, OVERLAY) if file.endswith("/__init__.py")]
    assert [file for file in inits if not file.startswith(f"{TRELLIS}/")] == []


@pytest.mark.parametrize(("file", "banned"), RING_MODULES)
def test_rings_name_nothing_outside(file: str, banned: tuple[str, ...]) -> None:
    """No import statement, early or late, nor a name handed to an importer."""
    package = tuple(Path(file).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(read(file))):
        for name in imported(node, package):
            inside = name.startswith(TRELLIS.replace("/", ".") + ".") or name == TRELLIS.replace("/", ".")
            assert inside or name.split(".", 1)[0] not in banned, f"{file}:{getattr(node, 'lineno', 0)}: imports {name}"


def imported(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """Absolute names that an import statement, or a call of import_module or __import__, brings in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else ()
        module = ".".join([*base, *([node.module] if node.module else [])])
        return [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


@pytest.mark.parametrize(("file", "banned"), RING_MODULES)
def test_rings_import_alone(file: str, banned: tuple[str, ...]) -> None:
    """Importing it runs nothing outside its ring, whatever the modules between do."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    command = [sys.executable, "-c", _IMPORT_ALONE, module, str(ROOT / OVERLAY), *banned]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_patches_obey_their_rules() -> None:
    """Series and files one to one, headers whole, named tests there: read_stack refuses anything else."""
    assert stack.read_stack(ROOT, read_pins(ROOT))


def test_the_lock_regenerates() -> None:
    """Byte for byte; on the way every patch is applied, without fuzz or offset, to both upstream wheels."""
    assert manifest.differences(ROOT, manifest.generate(ROOT)) == ""


_FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.$}])/(?:work|tmp|opt|root|home)/\w"),
    "a package registry's host": re.compile(
        r"pypi[.]org|pythonhosted[.]org|npmjs[.]org|debian[.]org|pytorch[.]org/whl"
    ),
}
_MAY_NAME_PATHS = ("docker/", "tests/docker/")  # paths inside the image are the image's own


@pytest.mark.parametrize("file", FILES)
def test_no_file_names_a_machine(file: str) -> None:
    try:
        text = read(file)
    except UnicodeDecodeError:
        return
    for what, pattern in _FORBIDDEN.items():
        found = pattern.search(text)
        if found and not (file.startswith(_MAY_NAME_PATHS) and what.startswith("a path")):
            line = text.count("\n", 0, found.start()) + 1
            pytest.fail(f"{file}:{line}: names {what}: {found[0]!r}")


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith((".py", ".cu", ".cuh", ".cpp", ".h"))])
def test_files_and_functions_stay_readable(file: str) -> None:
    text = read(file)
    limit = 300 if file.endswith(".py") else 500
    assert text.count("\n") <= limit, f"{file}: {text.count(chr(10))} lines, want at most {limit}"
    assert Path(file).stem not in ("utils", "util", "common", "impl", "helpers", "misc"), f"{file}: says nothing"
    for node in ast.walk(ast.parse(text)) if file.endswith(".py") else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= 60, f"{file}:{node.lineno}: {node.name} has {lines} lines, want at most 60"
