"""What README and docs name must be there: files, tests, commands, targets, settings, streams, routes, examples."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
import yaml

from rlboost.cli import app
from services.rollout_manager.api import build
from services.rollout_manager.app import Manager
from services.rollout_manager.settings import Settings as ManagerSettings
from shared import jobspec, messages, names
from shared.fakes import MemoryBus
from shared.settings import ServiceSettings

ROOT = Path(__file__).parents[2]
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "deploy/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
_SERVICES = ("rollout_manager", "rollout_worker", "trainer", "weight_store")
_TOPS = r"services|shared|rlboost|tests|deploy|docs|examples|benchmarks|\.ci"
_FILE = re.compile(rf"(?<![\w/.-])((?:{_TOPS})/[\w./*-]*[\w*])(?:::(\w+))?")
_ROOT_FILE = re.compile(r"^[\w.-]+\.(?:toml|yml|md|txt)$|^Makefile$|^\.env\.example$")
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


class Place(NamedTuple):
    """Something that a document names."""

    doc: Path
    text: str

    def __str__(self) -> str:
        return f"{self.doc.relative_to(ROOT)}: {self.text}"


def code_in(doc: Path) -> list[str]:
    """Return what is set as code: the lines of fenced blocks, and inline spans."""
    text = doc.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*(line for block in blocks for line in block.splitlines()), *re.findall(r"`([^`]+)`", prose)]


def blocks_in(doc: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", doc.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def everywhere(pattern: str) -> list[Place]:
    """Return the first group of every match in code."""
    return sorted(
        {Place(doc, found[1]) for doc in DOCS for code in code_in(doc) for found in re.finditer(pattern, code)}
    )


def links() -> list[Place]:
    """Return every link to a file of ours; pictures last."""
    found = {
        Place(doc, f"{target}#{anchor}")
        for doc in DOCS
        for target, anchor in _LINK.findall(doc.read_text(encoding="utf-8"))
        if "://" not in target
    }
    return sorted(found, key=lambda place: (".png" in place.text, place))


@pytest.mark.parametrize("link", links(), ids=str)
def test_a_link_leads_somewhere(link: Place) -> None:
    target, _, anchor = link.text.partition("#")
    file = (link.doc.parent / target).resolve() if target else link.doc
    assert file.exists()
    if anchor:
        titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_every_file_and_test_that_is_named_is_there(doc: Path) -> None:
    for code in code_in(doc):
        if _ROOT_FILE.match(code):
            assert (ROOT / code).exists(), code
        for path, test in _FILE.findall(code):
            files = list(ROOT.glob(path))
            assert files, path
            if test:
                source = files[0].read_text(encoding="utf-8")
                assert re.search(rf"^(?:async )?def {test}\(|^{test} = ", source, re.MULTILINE), f"{path}::{test}"


@pytest.mark.parametrize("place", everywhere(r"(?:^|[\s/('])rlboost ([a-z][^|;)`'#]*)"), ids=str)
def test_a_command_is_one_and_has_these_options(place: Place) -> None:
    command: Any = typer.main.get_command(app)
    words = place.text.split()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options, word


@pytest.mark.parametrize("place", everywhere(r"\bmake ([a-z]+)"), ids=str)
def test_a_make_target_is_one(place: Place) -> None:
    assert re.search(rf"^{place.text}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("place", everywhere(r"python -m ((?:services|benchmarks|examples|rlboost)[\w.]*)"), ids=str)
def test_a_module_that_is_run_is_there(place: Place) -> None:
    assert find_spec(place.text) is not None


def test_every_route_of_the_manager_that_is_named_is_there() -> None:
    manager = Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0)
    paths = {getattr(route, "path", "") for route in build(manager, MemoryBus(), ManagerSettings(token="t")).routes}
    served = {re.sub(r"\{\w+\}", "{}", path) for path in paths}
    named = everywhere(r"(?:^|GET |POST )(/(?:v1/(?:jobs|join|workers|fleet)[\w/{}]*|healthz|readyz|metrics))(?![\w/])")
    assert named
    for place in named:
        assert re.sub(r"\{\w+\}", "{}", place.text) in served, str(place)


@pytest.mark.parametrize("service", _SERVICES)
def test_every_setting_is_in_the_operations_guide(service: str) -> None:
    cls: type[ServiceSettings] = importlib.import_module(f"services.{service}.settings").Settings
    guide = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    lacking = [row for row in setting_rows(cls) if row not in guide]
    assert not lacking, "put these rows into docs/operations.md:\n" + "\n".join(lacking)


def setting_rows(cls: type[ServiceSettings]) -> list[str]:
    """Return the guide's rows of one service: its own settings; those of all services have their short names."""
    rows = []
    for name, field in cls.model_fields.items():
        common = name in ServiceSettings.model_fields
        variable = f"{'RLBOOST_' if common else cls.prefix}{name.upper()}"
        default = field.default.get_secret_value() if name == "token" else field.default
        shown = f"`{default}`" if default != "" else "empty"
        rows.append(f"| `{variable}` | {shown} |" + (f" {field.description} |" if field.description else ""))
    return rows


def test_every_stream_key_and_message_is_in_the_guide_to_the_streams() -> None:
    guide = (ROOT / "docs/streams.md").read_text(encoding="utf-8")
    keys = [value for name, value in vars(names).items() if name.isupper() and name not in {"PREFIX", "TRAINER_GROUP"}]
    for _, function in inspect.getmembers(names, inspect.isfunction):
        (parameter,) = inspect.signature(function).parameters
        keys.append(function(f"{{{parameter.removesuffix('_id')}}}"))
    for key in keys:
        assert f"`{key}`" in guide, key
    for tag in messages.registered():
        assert f"`{tag}`" in guide, tag


def test_every_invariant_has_a_test() -> None:
    sections = re.split(r"^## (?=\d)", (ROOT / "docs/invariants.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[
        1:
    ]
    assert [int(section.split(".")[0]) for section in sections] == list(range(1, 10))
    for section in sections:
        assert re.search(r"tests/\S+::\w+", section), section.splitlines()[0]


def test_every_job_file_that_is_shown_is_valid() -> None:
    shown = [yaml.safe_load(block) for doc in DOCS for block in blocks_in(doc, "yaml")]
    assert shown
    for raw in shown:
        rest = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 1}
        jobspec.parse(raw if "model" in raw else {**rest, **raw})


def test_every_job_file_of_the_examples_is_valid() -> None:
    files = sorted((ROOT / "examples").glob("*/*.yaml"))
    assert files
    for file in files:
        jobspec.parse(jobspec.load(str(file)))


def test_every_reward_function_that_is_shown_gives_a_reward_for_each_completion() -> None:
    shown = [
        block for doc in DOCS for block in blocks_in(doc, "python") if re.search("^def score", block, re.MULTILINE)
    ]
    assert shown
    for block in shown:
        module: dict[str, Any] = {}
        exec(block, module)
        rewards = module["score"](["2+2="] * 2, [" 4", "5"], [[1], [2]], answer=["4", "4"])
        assert rewards == [1.0, 0.0]


def test_every_environment_that_is_shown_is_done_with_what_is_right() -> None:
    shown = [block for doc in DOCS for block in blocks_in(doc, "python") if "rlboost.environments" in block]
    assert len(shown) > 1
    for block in shown:
        module: dict[str, Any] = {"__name__": "shown"}
        exec(block, module)
        made = [cls() for cls in module.values() if isinstance(cls, type) and cls.__module__ == "shown"]
        for environment in made:
            assert environment.reset({"prompt": "?", "target": 5, "answer": 5}, 0) is None
            step = environment.step("5")
            step = asyncio.run(step) if inspect.isawaitable(step) else step
            assert (step.done, step.reward) == (True, 1.0)


def test_no_figure_is_left_to_fill_in() -> None:
    for doc in DOCS:
        assert "FILL_IN" not in doc.read_text(encoding="utf-8"), doc
