# SPDX-License-Identifier: Apache-2.0
"""Compiles exllamav3's extension from its published wheel, which holds the source, and lays it out for the image.

    OUT/<site-packages>/exllamav3_ext.so    for the Python that runs this, whose torch it is linked with
    OUT/opt/exl3/licenses/exllamav3/        its licence

Sources and nvcc's options are those that the package itself chooses. The C++ options are not: it asks for -Ofast,
with which gcc makes a library that flushes denormals in the whole process that loads it. COMPILE_JOBS limits the
processes. Needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

FOLDER = Path("/tmp/exllamav3")  # its name is in the library, so it is always the same
DATE = 315532800  # seconds: 1980-01-01
NAME = "exllamav3_ext"
ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
LICENSES = "opt/exl3/licenses/exllamav3"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architectures", default=ARCHITECTURES, help="as torch names them (default: %(default)s)")
    given = parser.parse_args()
    os.environ["TORCH_CUDA_ARCH_LIST"] = given.architectures
    os.environ.setdefault("MAX_JOBS", os.environ.get("COMPILE_JOBS") or str(os.cpu_count()))
    shutil.rmtree(FOLDER, ignore_errors=True)
    with zipfile.ZipFile(given.wheel) as archive:
        archive.extractall(FOLDER)
    place(compile_extension(FOLDER), FOLDER, given.out)
    shutil.rmtree(FOLDER)
    return 0


def compile_extension(folder: Path) -> Path:
    """Compiles the sources of the unpacked wheel; returns the library, once it has been imported."""
    cuda = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    os.environ["CUDA_HOME"] = str(cuda)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja
    from torch.utils import cpp_extension

    chosen = own_choice(folder)
    sources = folder / "exllamav3" / NAME
    build = folder / "build"
    build.mkdir()
    cpp_extension.load(
        name=NAME, sources=chosen.extension_sources(str(sources)), extra_include_paths=[str(sources)],
        extra_cflags=["-O3"], extra_cuda_cflags=chosen.cuda_cflags(str(cuda)),
        extra_ldflags=["-s"], build_directory=str(build), verbose=True,
    )  # fmt: skip
    return build / f"{NAME}.so"


def own_choice(folder: Path) -> ModuleType:
    """The package's module that chooses sources and options, without the package, which would compile at once."""
    path = folder / "exllamav3" / "util" / "cuda_flags.py"
    spec = importlib.util.spec_from_file_location("cuda_flags", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: not there; want exllamav3 with this module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def place(library: Path, folder: Path, out: Path) -> None:
    packages = out / Path(sysconfig.get_path("purelib")).relative_to("/")
    licenses = out / LICENSES
    for made in (packages, licenses):
        made.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(library, packages / library.name)
    [source] = folder.glob("exllamav3-*.dist-info/licenses/LICENSE")
    shutil.copyfile(source, licenses / "LICENSE")
    for path in (out, *out.rglob("*")):
        os.utime(path, (DATE, DATE))


if __name__ == "__main__":
    sys.exit(main())
