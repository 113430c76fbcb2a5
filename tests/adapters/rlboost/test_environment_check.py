"""What `rlboost config check` finds by starting a conversation with the environment of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.jobs import check as jobcheck
from rlboost.jobs.check import Found
from tests.support.model_folder import with_chat_template, write_model, write_tokenizer

TEMPLATE = (
    "{% if tools %}{% if tools[0].function.name == 'refused' %}{{ raise_exception('no such tool') }}{% endif %}"
    "t80 {{ tools | tojson }} {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}t90 {% endif %}"
)
GAMES = """
from pathlib import Path
from rlboost.environments import Step

class Game:
    def __init__(self, name="", tools=1, prompt=None):
        with Path("created").open("a") as file:
            file.write("x")
        if name:
            tool = {"type": "function", "function": {"name": name, "description": "t7", "parameters": {}}}
            self.tools = [tool] * tools
        self.prompt = prompt

    def reset(self, row, seed):
        if "t95" in row["prompt"][-1]["content"]:
            raise ValueError("no game for it")
        return self.prompt

    def step(self, text):
        return Step(done=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = write_tokenizer(write_model(tmp_path / "base"))
    with_chat_template(model, TEMPLATE)
    (tmp_path / "games.py").write_text(GAMES)
    rows(row("t5"), row("t6"))
    return tmp_path


def rows(*given: dict[str, Any]) -> None:
    Path("train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in given))


def row(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def check(**arguments: Any) -> Found:
    job = {"model": "base", "data": {"train": "train.jsonl", "prompts_per_step": 1}, "steps": 1}
    environment = {"function": "games:Game", "arguments": arguments}
    return jobcheck.check_job({**job, "environment": environment, "sampling": {"max_tokens": 8}})


def test_first_prompt_is_that_of_the_environment() -> None:
    assert "| t5 t90" in check().example
    found = check(name="t7")
    assert not found.problems
    assert "| t80" in found.example
    assert "t5 t90" in found.example
    found = check(prompt=[{"role": "user", "content": "t8 t9"}])
    assert "| t8 t9 t90" in found.example
    assert "t5" not in found.example


def test_environment_is_imported_once(folder: Path) -> None:
    assert not check().problems
    assert (folder / "created").read_text() == "xx", "one to check it, and one that is reset"


@pytest.mark.parametrize(
    ("given", "arguments", "problem"),
    [
        (
            [row("t5"), row("t6 " * 150)],
            {"name": "t7"},
            "tools, prompt 2 of data.train .* tokens, which",
        ),
        ([row("t5")], {"name": "refused"}, "prompt 1 of data.train .* cannot be formatted: .*no such tool"),
        ([row("t5", tools=[{"function": {"name": "t6"}}])], {"name": "t7"}, "column 'tools' differs from the environ"),
        ([row("t5")], {"prompt": [{"role": "user", "content": "t5 " * 200}]}, "the prompt that reset returns .* 201"),
        ([row("t5")], {"prompt": [{"role": "user", "content": "t5 <eos> "}]}, "cannot be formatted: .* special token"),
        ([row("t95")], {}, r"games:Game: reset of the first row raised ValueError: no game for it \(games.py:"),
    ],
)
def test_fault_that_only_the_environment_shows_is_found(
    given: list[dict[str, Any]], arguments: dict[str, Any], problem: str
) -> None:
    rows(*given)
    [found] = check(**arguments).problems
    assert found.startswith("environment.function: ")
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found)
