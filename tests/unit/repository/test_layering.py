"""Who may import whom, how long a file may be, and what may not be imported early."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVICES = sorted(path.parent.name for path in (ROOT / "services").glob("*/__main__.py"))
SOURCES = sorted(
    path for top in ("services", "shared", "rlboost", "examples", "recipes") for path in (ROOT / top).rglob("*.py")
)
LINKED = re.compile(r"rlboost\.(services|shared|examples|recipes)\b")
HEAVY = ("torch", "transformers", "vllm", "megatron", "fastapi")
PURE_SHARED = {
    "shared.errors",
    "shared.ids",
    "shared.job.algorithm",
    "shared.job.base",
    "shared.job.training",
    "shared.job.fleet",
    "shared.job.reward",
    "shared.job.run_profile",
    "shared.job.spec",
    "shared.messages",
    "shared.messages.codec",
    "shared.messages.command_digest",
    "shared.model.tool_calls",
    "shared.streams",  # names
    "shared.streams.bus",
    "shared.streams.job_logs",
    "shared.weights.delta_graph",
    "shared.weights.manifest",
    "shared.wire",
}
"""What a domain may see of `shared`: values, names, and functions that build operations; nothing that acts."""
PURE_LIBRARIES = {"pydantic", "numpy"}
IMPURE = {"asyncio", "time", "random", "os", "socket", "subprocess", "pathlib", "secrets", "threading"}


@cache
def imports(path: Path, *, members: bool = False) -> set[str]:
    """Return the modules that a file imports, those of ours by the path of their file: `shared.ids`.

    With `members`, the names that it imports from them are among these: one may be a module.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module or "")
            if members or node.module == "rlboost":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("rlboost.") if LINKED.match(name) else name for name in found}


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_imports_another(service: str) -> None:
    for path in (ROOT / "services" / service).rglob("*.py"):
        for name in imports(path):
            if name.startswith("services."):
                assert name.split(".")[1] == service, f"{path} imports {name}"
            assert not name.startswith("rlboost"), f"{path} imports {name}"


def test_modules_are_imported_from_rlboost() -> None:
    """A user's folder may have packages of these names, and it comes first on the path."""
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        named = r"^ *(?:from|import) (?:services|shared|examples|recipes)\b"
        found = re.findall(named, path.read_text("utf-8"), re.MULTILINE)
        assert not found, f"{path}: {found}"


def test_shared_imports_no_service() -> None:
    for path in (ROOT / "shared").rglob("*.py"):
        assert not tops(imports(path)) & {"services", "rlboost", "examples", "recipes"}, path


PUBLIC = {"loss.py": {"services.trainer.domain.loss.function"}}
"""Module of rlboost that users import -> what it exports from services."""


def test_rlboost_imports_services_only_in_the_model_check_and_domains_in_simulation() -> None:
    for path in (ROOT / "rlboost").rglob("*.py"):
        services = {name for name in imports(path) if name.startswith("services.")}
        if path.is_relative_to(ROOT / "rlboost" / "simulation"):
            assert all(name.split(".")[2] == "domain" for name in services), f"{path} imports {services}"
            continue
        if path != ROOT / "rlboost" / "jobs" / "model_check.py":
            exported = PUBLIC.get(str(path.relative_to(ROOT / "rlboost")), set())
            assert services == exported, f"{path} imports {services}"
        assert all(name.startswith("services.trainer.") for name in services), f"{path} imports {services}"


def test_what_a_domain_may_see_of_shared_exists() -> None:
    paths = [ROOT / name.replace(".", "/") for name in PURE_SHARED]
    missing = {str(path) for path in paths if not (path.with_suffix(".py").exists() or path.is_dir())}
    assert not missing


@pytest.mark.parametrize("service", SERVICES)
def test_a_domain_is_pure(service: str) -> None:
    for path in (ROOT / "services" / service / "domain").rglob("*.py"):
        for name in imports(path):
            top = name.partition(".")[0]
            if top == "services":
                assert ".domain" in name, f"{path} imports {name}"
            elif top == "shared":
                assert name in PURE_SHARED, f"{path} imports {name}"
            elif top == "torch":
                assert service == "trainer", f"{path} imports torch"
            else:
                assert top in PURE_LIBRARIES or (top in sys.stdlib_module_names and top not in IMPURE), (
                    f"{path} imports {name}"
                )


def test_libraries_of_the_manager_are_imported_only_in_adapters_and_the_api() -> None:
    manager = ROOT / "services" / "rollout_manager"
    anywhere = {"services", "shared", "structlog", "pydantic", "pydantic_settings", *PURE_LIBRARIES}
    routes = ("fleet", "history", "jobs", "leader", "tokens")
    allowed = {manager / "api" / f"{name}.py": {"fastapi"} for name in routes}
    allowed |= {
        manager / "serving/routes.py": {"fastapi"},
        manager / "api/external.py": {"fastapi", "msgpack", "pydantic_core"},
    }
    for path in manager.rglob("*.py"):
        if path.parent != manager / "adapters":
            libraries = tops(imports(path)) - anywhere - sys.stdlib_module_names
            assert libraries <= allowed.get(path, set()), f"{path} imports {libraries}"


def test_only_the_managers_main_module_imports_the_openai_endpoint() -> None:
    package = "services.rollout_manager.serving"
    for path in (ROOT / "services" / "rollout_manager").rglob("*.py"):
        if path.parent.name != "serving" and path.name != "__main__.py":
            assert not {name for name in imports(path) if name.startswith(package)}, f"{path} imports {package}"


@pytest.mark.parametrize("service", SERVICES)
def test_adapters_see_ports_and_shared_only(service: str) -> None:
    for path in (ROOT / "services" / service / "adapters").rglob("*.py"):
        for name in imports(path):
            if name.startswith(f"services.{service}"):
                allowed = (f"services.{service}.ports", f"services.{service}.adapters", f"services.{service}.domain")
                assert name.startswith(allowed), f"{path} imports {name}"


@pytest.mark.parametrize("service", SERVICES)
def test_only_composition_roots_import_adapters(service: str) -> None:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "services" / service).rglob("*.py"):
        inside = path.relative_to(ROOT / "services" / service)
        if "adapters" not in inside.parts and str(inside) not in {"__main__.py", "build.py"}:
            adapters = {name for name in imports(path) if name.startswith(f"services.{service}.adapters")}
            if adapters:
                found[f"{service}/{inside}"] = adapters
    assert not found


ROLES = {"__main__": "entry", "api": "entry", "cli": "entry", "settings": "ports", "metrics": "ports"}


def package(module: str) -> str:
    """Return the package of a module; those at the top of a service, of `shared` and of `rlboost` are by their role."""
    parts = module.split(".")
    top, below = (2, parts[2:]) if parts[0] == "services" else (1, parts[1:])
    if len(below) > 1 or (ROOT / Path(*parts, "__init__.py")).is_file():  # an old folder may have caches only
        return ".".join(parts[: top + 1])
    role = "ports" if below[0].startswith("ports") else ROLES.get(below[0], "app")
    return ".".join([*parts[:top], "app" if parts[0] == "shared" else role])


def test_packages_do_not_import_in_a_circle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] not in {"examples", "recipes"}
    }
    imported: dict[str, set[str]] = {}
    for path in SOURCES:
        importer = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if importer in modules and importer.count(".") > importer.startswith("services"):
            found = {package(name) for name in imports(path, members=True) & modules if name.count(".")}
            imported[package(importer)] = imported.get(package(importer), set()) | found - {package(importer)}
    list(TopologicalSorter(imported).static_order())  # raises CycleError, which names the circle


MOST_FILES = {"A token, from an engine to a training row": 18, "One training step": 12, "One weight version": 16}


def test_files_to_read_meet_each_other_and_are_few() -> None:
    """In `docs/architecture.md` each file of a part imports one before it, is imported by it, or implements a port."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## Files to read\n")[1].split("\n## ")[0]
    walks = {walk.partition("\n")[0]: walk for walk in text.split("\n### ")[1:]}
    assert {title: walk.count("`") // 2 for title, walk in walks.items()} == MOST_FILES
    for walk in walks.values():
        for part in walk.split("\n- ")[1:]:
            files = [ROOT / name for name in re.findall(r"`([^`]+)`", part)]
            for place, file in enumerate(files[1:], 1):
                through_port = any({"adapters", "redis"} & set(one.parts) for one in (file, files[place - 1]))
                through_port = through_port or any(
                    f"`{port}`" in file.read_text("utf-8") for port in _ports(files[:place])
                )
                assert through_port or any(_meet(file, one) for one in files[:place]), f"nothing before leads to {file}"


def _ports(files: list[Path]) -> set[str]:
    """Return the names of the ports that these files import."""
    found = {name for file in files for name in imports(file, members=True) if ".ports." in name}
    return {name.rpartition(".")[2] for name in found}


def _meet(one: Path, other: Path) -> bool:
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (one, other)]
    found = zip(names, (imports(other), imports(one)), strict=True)
    return any({name, name.rpartition(".")[0]} & imported for name, imported in found)  # a package exports names


def test_a_public_method_has_a_docstring_unless_its_port_says_what_it_does() -> None:
    documented: set[str] = {"connection_made", "connection_lost", "data_received"}  # asyncio's protocols
    missing: list[tuple[str, str]] = []
    for path in SOURCES:
        for group in ast.parse(path.read_text(encoding="utf-8")).body:
            for method in group.body if isinstance(group, ast.ClassDef) and group.name[0] != "_" else ():
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name[0] != "_":
                    if ast.get_docstring(method):
                        documented.add(method.name)
                    else:
                        missing.append((f"{path}:{method.lineno}", method.name))
    assert not [place for place, name in missing if name not in documented]


def test_files_are_short_enough_to_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > 600} == {}


@pytest.mark.parametrize("service", SERVICES)
def test_help_and_settings_need_no_heavy_library(service: str) -> None:
    ports = sorted((ROOT / "services" / service).glob("ports*")) + sorted(
        (ROOT / "services" / service).glob("ports/*.py")
    )
    files = [ROOT / "services" / service / "settings.py", *ports]
    modules = [".".join(("rlboost", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]
    code = f"import sys, {', '.join(modules)}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_a_job_is_checked_without_heavy_libraries() -> None:
    """Where a job is submitted from, torch may be missing, and importing it takes seconds."""
    code = f"import sys, rlboost.jobs.check\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_only_one_file_spells_the_names_of_streams() -> None:
    for path in SOURCES:
        if path != ROOT / "shared" / "streams" / "names.py":
            assert not re.search(r'"rlboost:\w', path.read_text(encoding="utf-8")), f"{path} spells a Redis name"


def test_nothing_is_pickled() -> None:
    for path in SOURCES:
        assert not tops(imports(path)) & {"pickle", "cloudpickle", "dill", "shelve"}, path
        assert "torch.load(" not in path.read_text(encoding="utf-8"), path


def test_no_test_imports_another() -> None:
    """What tests share is in tests/support. On a GPU the contract of engines is collected from its own module."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        found = {name for name in imports(path) if re.match(r"tests\.(?!support\b)", name)}
        assert found <= {"tests.contract.rollout_worker"}, f"{path} imports {found}"
