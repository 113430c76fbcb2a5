"""The diagrams of components and packages, generated from the imports.

    python -m tests.support.architecture_diagram --write

A *component* is a service, `shared` or `rlboost`; a *package* is a folder of it. Modules at the top of a component are
grouped by their role: `entry` (`__main__.py`, `api.py`, `cli.py`), `ports` (`ports*.py`, `settings.py`, `metrics.py`),
`fakes`, and the rest, which is `app` in a service and `base` elsewhere. An arrow means "imports".
`docs/architecture.md` has the arrows between components, `docs/notes/packages.md` one diagram of packages for each
component.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.generated_docs import ROOT, read_block, write_block

_TOPS = ("services", "shared", "rlboost")
_ROLES = {"__main__": "entry", "api": "entry", "cli": "entry", "settings": "ports", "metrics": "ports"}
_EDGE = re.compile(r"^\s*([\w.]+) --> ([\w.]+)$", re.MULTILINE)

Edge = tuple[str, str]


def import_edges() -> set[Edge]:
    """Return the pairs (importer, imported) of packages inside a component, and of components."""
    modules = _modules()
    edges: set[Edge] = set()
    for module, path in modules.items():
        for target in _imported(path, modules):
            source_component, target_component = _component(module), _component(target)
            if source_component != target_component:
                edges.add((source_component, target_component))
            else:
                edges.add((_package(module, path), _package(target, modules[target])))
    return {(source, target) for source, target in edges if source != target}


def drawn_edges() -> set[Edge]:
    """Return the edges of the diagrams on both pages."""
    pages = "\n".join(read_block(page, block) for page, block, _ in BLOCKS)
    return {(source, target) for source, target in _EDGE.findall(pages)}


def component_diagram() -> str:
    """Return the arrows between components as a fenced Mermaid block."""
    edges = sorted(edge for edge in import_edges() if not _is_package(edge[0]))
    names = sorted({node for edge in edges for node in edge}, key=_rank)
    lines = [f'    {name}["{_folder(name)}"]' for name in names]
    lines += [f"    {source} --> {target}" for source, target in edges]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def package_diagrams() -> str:
    """Return a section with a fenced Mermaid block for each component."""
    edges = import_edges()
    packages = {_package(module, path) for module, path in _modules().items()}
    parts = []
    for component in sorted({_owner(package) for package in packages}, key=_rank):
        inside = sorted(edge for edge in edges if _is_package(edge[0]) and _owner(edge[0]) == component)
        lines = [f'    {node}["{_label(node)}"]' for node in sorted(packages) if _owner(node) == component]
        lines += [f"    {source} --> {target}" for source, target in inside]
        parts.append("\n".join([f"## `{_folder(component)}`", "", "```mermaid", "flowchart TD", *lines, "```"]))
    return "\n\n".join(parts)


def _modules() -> dict[str, Path]:
    """Return the file of each module; the `__init__.py` of `services` and of a component is none."""
    roots = {ROOT / "services", *(ROOT / top for top in _TOPS), *(ROOT / "services").iterdir()}
    files = [path for top in _TOPS for path in (ROOT / top).rglob("*.py")]
    return {_module(path): path for path in files if path.name != "__init__.py" or path.parent not in roots}


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [_by_file(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = _by_file(str(node.module))
            members = [f"{package}.{alias.name}" for alias in node.names]
            names = [member if member in modules else package for member in members]
        else:
            continue
        yield from (name for name in names if name in modules)


def _by_file(name: str) -> str:
    """Return a module's name by the path of its file: `rlboost/services` and `rlboost/shared` are links."""
    below = name.removeprefix("rlboost.")
    return below if below.partition(".")[0] in ("services", "shared") else name


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _component(module: str) -> str:
    """Return the node of a component: `trainer`, `shared`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "services" and len(parts) > 1 else parts[0]


def _package(module: str, path: Path) -> str:
    """Return the node of a package: `trainer.domain`, `shared.weights`, `shared.base` for modules at the top."""
    component = _component(module)
    below = module.split(".")[2 if module.startswith("services.") else 1 :]
    if len(below) > 1 or path.name == "__init__.py":
        return f"{component}.{below[0]}"
    role = next((role for role in ("ports", "fakes") if below[0].startswith(role)), None)
    if module.startswith("services."):
        return f"{component}.{role or _ROLES.get(below[0], 'app')}"
    return f"{component}.{_ROLES.get(below[0], 'base') if component == 'rlboost' else 'base'}"


def _owner(node: str) -> str:
    return node.partition(".")[0]


def _is_package(node: str) -> bool:
    return "." in node


def _label(package: str) -> str:
    return package.partition(".")[2]


def _folder(component: str) -> str:
    return component if component in _TOPS else f"services/{component}"


def _rank(component: str) -> tuple[int, str]:
    return (("rlboost", "shared").index(component) * 2 if component in ("rlboost", "shared") else 1), component


BLOCKS: tuple[tuple[Path, str, Callable[[], str]], ...] = (
    (ROOT / "docs" / "architecture.md", "component diagram", component_diagram),
    (ROOT / "docs" / "notes" / "packages.md", "package diagrams", package_diagrams),
)


if __name__ == "__main__":
    for page, block, generate in BLOCKS:
        if sys.argv[1:] == ["--write"]:
            write_block(page, block, generate())
        else:
            print(generate(), end="\n\n")
