# SPDX-License-Identifier: Apache-2.0
"""What the overlay takes from upstream by name, held against a tree: the half of a rebase that no patch shows.

Reads source only: a module counts as there if its file is, a name if the file binds it anywhere at its top level
(also inside `if` and `try`). Names reached through an object's attributes are not seen; the tests see those.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from release.checkout import OVERLAY, files_of
from release.fit import Tree


@dataclass(frozen=True, kw_only=True)
class Gap:
    file: str  # of the overlay
    line: int
    module: str
    name: str  # empty where the module itself is missing
    tree: str

    def __str__(self) -> str:
        what = f"{self.name} from {self.module}" if self.name else self.module
        return f"{self.file}:{self.line}: imports {what}, which {self.tree} lacks"


def overlay_gaps(root: Path, tree: Tree) -> Iterator[Gap]:
    """Every `vllm` import of the overlay that neither it nor the tree can answer."""
    ours = {path for path in files_of(root, OVERLAY) if path.endswith(".py")}
    for path in sorted(ours):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            for module, name in _imports(node):
                found = _file_of(module, ours | tree.paths)
                gap = Gap(file=path, line=getattr(node, "lineno", 0), module=module, name="", tree=tree.name)
                if found is None and not _is_folder(module, ours | tree.paths):
                    yield gap
                elif found in ours or found is None or not name:
                    continue
                elif name not in _bound(tree.read(found)) and _file_of(f"{module}.{name}", ours | tree.paths) is None:
                    yield replace(gap, name=name)


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name or empty) for absolute imports of vllm; relative ones stay inside the overlay."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")
    elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
        yield from ((str(node.module), alias.name) for alias in node.names)


def _file_of(module: str, paths: frozenset[str] | set[str]) -> str | None:
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in paths), None)


def _is_folder(module: str, paths: frozenset[str] | set[str]) -> bool:
    prefix = module.replace(".", "/") + "/"
    return any(path.startswith(prefix) for path in paths)


def _bound(source: bytes) -> set[str]:
    """Names that a module binds at its top level; `*` imports and a module `__getattr__` may bind any, so all pass."""
    names: set[str] = set()
    pending: list[ast.AST] = [*ast.parse(source).body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        else:
            names |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
            pending += [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.stmt | ast.ExceptHandler)]
    return _Everything() if names & {"*", "__getattr__"} else names


class _Everything(set[str]):
    def __contains__(self, name: object) -> bool:
        return True
