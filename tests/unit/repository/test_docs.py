"""Check that everything the documentation names exists: files, tests, commands, settings, streams, routes, examples."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
import yaml

from benchmarks import gpu_fit
from rlboost.cli import app
from rlboost.services.rollout_manager.api.fleet import fleet_overview
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.domain.jobs import Audit, Job
from rlboost.services.rollout_manager.domain.money import cost_report
from rlboost.services.rollout_manager.domain.windows import StepMeter, WindowTuner
from rlboost.services.rollout_manager.fleet_loops import FleetScaler
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings as ManagerSettings
from rlboost.shared import messages
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.file import load
from rlboost.shared.job.other_trainers import NAMES
from rlboost.shared.streams import names
from rlboost.shared.streams.fakes import MemoryBus
from tests.support import interface_reference, job_reference, settings_reference
from tests.support.doc_snippets import DOCS, blocks_in
from tests.support.generated_docs import read_block
from tests.support.jobs import job_file

ROOT = Path(__file__).parents[3]
_TOPS = r"services|shared|rlboost|tests|deploy|docs|examples|recipes|benchmarks|\.ci"
_FILE = re.compile(rf"(?<![\w/.-])((?:{_TOPS})/[\w./*-]*[\w*])(?:::(\w+))?")
_ROOT_FILE = re.compile(r"^[\w.-]+\.(?:toml|yml|md|txt)$|^Makefile$|^\.env\.example$")
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")

GENERATED = [
    (job_reference.PAGE, job_reference.BLOCK, job_reference.tables, "tests.support.job_reference"),
    (job_reference.OTHERS_PAGE, job_reference.OTHERS_BLOCK, job_reference.names, "tests.support.job_reference"),
    (gpu_fit.PAGE, gpu_fit.BLOCK, gpu_fit.tables, "benchmarks.gpu_fit"),
    *((*block, "tests.support.interface_reference") for block in interface_reference.BLOCKS),
]


class Mention(NamedTuple):
    """A name that a page mentions."""

    doc: Path
    text: str

    def __str__(self) -> str:
        return f"{self.doc.relative_to(ROOT)}: {self.text}"


def code_in(doc: Path) -> list[str]:
    """Return the code of a page: lines of fenced blocks, and inline spans."""
    text = doc.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*(line for block in blocks for line in block.splitlines()), *re.findall(r"`([^`]+)`", prose)]


def named_in_code(pattern: str) -> list[Mention]:
    """Return the first group of each match in the code of all pages."""
    return sorted(
        {Mention(doc, found[1]) for doc in DOCS for code in code_in(doc) for found in re.finditer(pattern, code)}
    )


def links() -> list[Mention]:
    """Return every link to a file of this repository; images last."""
    found = {
        Mention(doc, f"{target}#{anchor}")
        for doc in DOCS
        for target, anchor in _LINK.findall(doc.read_text(encoding="utf-8"))
        if "://" not in target
    }
    return sorted(found, key=lambda place: (".png" in place.text, place))


@pytest.mark.parametrize("link", links(), ids=str)
def test_link_target_exists(link: Mention) -> None:
    target, _, anchor = link.text.partition("#")
    file = (link.doc.parent / target).resolve() if target else link.doc
    assert file.exists()
    if anchor:
        titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_named_files_and_tests_exist(doc: Path) -> None:
    for code in code_in(doc):
        if _ROOT_FILE.match(code):
            assert (ROOT / code).exists(), code
        for path, test in _FILE.findall(code):
            files = list(ROOT.glob(path))
            assert files, path
            if test:
                source = files[0].read_text(encoding="utf-8")
                assert re.search(rf"^(?:async )?def {test}\(|^{test} = ", source, re.MULTILINE), f"{path}::{test}"


ROOT_COMMAND = typer.main.get_command(app)


@pytest.mark.parametrize("place", named_in_code(r"(?:^|[\s/('])rlboost ([a-z][^|;)`'#]*)"), ids=str)
def test_command_and_its_options_exist(place: Mention) -> None:
    command: Any = ROOT_COMMAND
    words = place.text.split()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, f"unknown command {name!r}"
        command = command.commands[name]
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options, word


def test_named_job_keys_exist() -> None:
    known = {key.path for key in job_reference.job_keys()}
    sections = "|".join(sorted(path for path in known if any(key.startswith(f"{path}.") for key in known)))
    foreign = {"packages.md", "coming-from.md", "job-keys.md", "CHANGELOG.md"}
    named = named_in_code(rf"(?:^|\s)((?:{sections})\.[a-z_.]+)(?=[:=`\s]|$)")
    assert len(named) > 50
    unknown = [str(place) for place in named if place.doc.name not in foreign and place.text not in known]
    assert [place for place in unknown if not place.endswith((".log", ".jsonl", ".py"))] == []


@pytest.mark.parametrize("place", named_in_code(r"\bmake ([a-z-]+)"), ids=str)
def test_make_target_exists(place: Mention) -> None:
    assert re.search(rf"^{place.text}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    "place", named_in_code(r"python -m ((?:services|benchmarks|examples|recipes|rlboost|tests)[\w.]*)"), ids=str
)
def test_module_to_run_exists(place: Mention) -> None:
    assert find_spec(place.text) is not None


def test_named_manager_routes_exist() -> None:
    manager = Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0)
    paths = {getattr(route, "path", "") for route in build(manager, MemoryBus(), ManagerSettings(token="t")).routes}
    served = {re.sub(r"\{\w+\}", "{}", path) for path in paths}
    named = named_in_code(
        r"(?:^|GET |POST )(/(?:v1/(?:jobs|join|workers|fleet)[\w/{}]*|healthz|readyz|metrics))(?![\w/])"
    )
    assert named
    for place in named:
        assert re.sub(r"\{\w+\}", "{}", place.text) in served, str(place)


def test_settings_reference_matches_the_settings_classes() -> None:
    shown = read_block(settings_reference.PAGE, settings_reference.BLOCK)
    assert shown == settings_reference.tables(), "run python -m tests.support.settings_reference --write"


@pytest.mark.parametrize(("page", "block", "generate", "command"), GENERATED, ids=[block[1] for block in GENERATED])
def test_generated_block_matches_the_code(page: Path, block: str, generate: Callable[[], str], command: str) -> None:
    assert read_block(page, block) == generate(), f"run python -m {command} --write"


def test_fields_of_answers_are_documented() -> None:
    page = (ROOT / "docs/rest.md").read_text(encoding="utf-8")
    shown = {
        title: set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE))))
        for title, _, section in (part.partition("\n") for part in re.split(r"^### ", page, flags=re.MULTILINE)[1:])
    }
    job = Job("j", 1, job_spec.parse(job_file(steps=1)), created_at=0.0)
    assert shown["A job"] == {*job.public(), "phase", "waiting"}
    assert shown["An audit"] == {*Audit.model_fields, "in_flight"} - {"cost"}
    assert shown["A cost"] == set(cost_report(Audit(), steps=0, max_dollars=None))
    manager, settings = Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0), ManagerSettings(token="t")
    scaler = FleetScaler(manager, MemoryBus(), settings)
    assert shown["The fleet"] == set(fleet_overview(manager.world, scaler, have_users=False))


def test_computed_fields_of_events_are_those_of_the_code() -> None:
    measured = StepMeter(began_at=0.0, updated_at=1.0).measure(window_s=0.5, train_wait_s=0.1, train_s=0.4, tokens=8)
    fields = interface_reference.COMPUTED_FIELDS["seeding_window_updated"]
    assert set(fields) == set(WindowTuner().learn(measured))


def test_each_interface_has_a_meaning() -> None:
    rows = "\n".join(generate() for _, _, generate in interface_reference.BLOCKS)
    assert re.findall(r"^.*\|  \|$", rows, re.MULTILINE) == [], "add a docstring, help text, or entry of EVENTS"


def test_each_job_key_has_a_meaning() -> None:
    assert [key.path for key in job_reference.job_keys() if not key.meaning] == [], "add a docstring below the field"


def test_names_of_other_trainers_belong_to_job_keys() -> None:
    assert set(NAMES) <= {key.path for key in job_reference.job_keys()}


class Placeholder(str):
    """Stands for a value, also where a number is formatted."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return str(self)


def test_streams_page_lists_every_key_and_message() -> None:
    guide = (ROOT / "docs/streams.md").read_text(encoding="utf-8")
    constants = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    keys = [value for name, value in constants.items() if name not in {"PREFIX", "TRAINER_GROUP"}]
    for _, function in inspect.getmembers(names, inspect.isfunction):
        if function is names.worker_key_type:  # the only one that returns no name
            continue
        parameters = inspect.signature(function).parameters
        keys.append(function(*(Placeholder(f"{{{parameter.removesuffix('_id')}}}") for parameter in parameters)))
    for key in keys:
        assert f"`{key}`" in guide, key
    for tag in messages.registered():
        assert f"`{tag}`" in guide, tag


def test_each_invariant_cites_a_test() -> None:
    sections = re.split(r"^## (?=\d)", (ROOT / "docs/invariants.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[
        1:
    ]
    assert [int(section.split(".")[0]) for section in sections] == list(range(1, 10))
    for section in sections:
        assert re.search(r"tests/\S+::\w+", section), section.splitlines()[0]


def test_statements_on_security_cite_tests_or_name_the_gap() -> None:
    page, tests = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("security", "invariants"))
    for role in ("Operator", "Job author", "Worker machine", "Generated text and programs", "Network", "Redis"):
        section = page.partition(f"\n## {role}\n")[2].partition("\n## ")[0]
        cited = tests.partition(f"\n### {role}\n")[2].partition("\n### ")[0]
        assert f"](invariants.md#{role.lower().replace(' ', '-')})" in section, role
        assert re.search(r"tests/\S+::\w+", cited), role
        assert role == "Operator" or "**Not prevented**" in section, role


def test_only_the_page_of_guarantees_cites_single_tests() -> None:
    citing = [doc.name for doc in DOCS if "::test_" in doc.read_text(encoding="utf-8")]
    assert citing == ["invariants.md"]


def test_shown_job_files_are_valid() -> None:
    shown = [yaml.safe_load(block) for doc in DOCS for block in blocks_in(doc, "yaml")]
    assert shown
    for raw in shown:
        required = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 1}
        job_spec.parse(raw if "model" in raw else {**required, **raw})


def test_example_job_files_are_valid() -> None:
    files = sorted((ROOT / "examples").glob("*/*.yaml"))
    assert files
    for file in files:
        job_spec.parse(load(str(file)))


def test_shown_reward_functions_score_each_completion() -> None:
    shown = [
        block for doc in DOCS for block in blocks_in(doc, "python") if re.search("^def score", block, re.MULTILINE)
    ]
    assert shown
    for block in shown:
        module: dict[str, Any] = {}
        exec(block, module)
        rewards = module["score"](["2+2="] * 2, [" 4", "5"], [[1], [2]], answer=["4", "4"])
        assert rewards == [1.0, 0.0]


def test_shown_environments_end_at_the_right_answer() -> None:
    here = f'{sys.executable!r}, "-m", "tests.support.mcp_server"'
    shown = [
        block.replace('"uvx", "mcp-server-time"', here).replace("convert_time", "add")
        for doc in DOCS
        for block in blocks_in(doc, "python")
        if "rlboost.environments" in block
    ]
    assert len(shown) > 2
    for block in shown:
        module: dict[str, Any] = {"__name__": "shown"}
        exec(block, module)
        made = [cls() for cls in module.values() if isinstance(cls, type) and cls.__module__ == "shown"]
        for environment in made:
            assert environment.reset({"prompt": "?", "target": 5, "answer": 5}, 0) is None
            step = environment.step("5")
            step = asyncio.run(step) if inspect.iscoroutine(step) else step
            assert (step.done, step.reward) == (True, 1.0)


def test_shown_environment_can_be_tried_without_a_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, trial, *_ = blocks_in(ROOT / "docs" / "environments.md", "python")
    (tmp_path / "games.py").write_text(environment)
    monkeypatch.syspath_prepend(tmp_path)
    exec(trial, {})


def test_no_placeholder_is_left() -> None:
    for doc in DOCS:
        assert "FILL_IN" not in doc.read_text(encoding="utf-8"), doc
