# SPDX-License-Identifier: Apache-2.0
"""The format's own modules, codebook and layout, loaded without importing vLLM around them.

Importing `vllm.model_executor...` the ordinary way takes seconds and needs torch; commands that only look at headers or
write files need neither. The package is found in this checkout, else in the installed fork, and loaded under a name of
its own: relative imports inside it work as usual.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

PACKAGE = "exl3_trellis"
PLACE = Path("model_executor", "layers", "quantization", PACKAGE)


def folder() -> Path:
    """The package's folder; ImportError says where it was looked for."""
    places = [Path(__file__).resolve().parents[1] / "vllm"]
    spec = importlib.util.find_spec("vllm")
    places += [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if (place / PLACE / "__init__.py").is_file():
            return place / PLACE
    raise ImportError(f"no {PLACE} in {', '.join(map(str, places))}: neither a checkout nor an installed fork")


def load(module: str) -> ModuleType:
    """The module `module` of the format's package."""
    if PACKAGE not in sys.modules:
        package_folder = folder()
        spec = importlib.util.spec_from_file_location(
            PACKAGE, package_folder / "__init__.py", submodule_search_locations=[str(package_folder)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{package_folder}: not loadable as a package")
        sys.modules[PACKAGE] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{module}")


if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.exl3_trellis import codebook, layout
else:
    codebook = load("codebook")
    layout = load("layout")
