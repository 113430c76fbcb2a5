"""`rlboost samples`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlboost import client
from rlboost.cli import app
from rlboost.samples import lines
from rlboost.terminal import printable
from tests.support.fake_rest import FakeRest, job, ok, problem

WIDTH = 80


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> FakeRest:
    fake = FakeRest()
    monkeypatch.setattr(client, "Client", partial(client.Client, transport=fake))
    monkeypatch.setenv("RLBOOST_URL", "http://api.test")
    monkeypatch.setenv("RLBOOST_TOKEN", "secret")
    fake.on("GET /v1/jobs/j-1", ok(job("running", 2)))
    return fake


def sample(step: int, group: int, member: int, reward: float | None = 0.0, **fields: Any) -> dict[str, Any]:
    is_eval = fields.get("is_eval", False)
    return {
        "sample": f"1/{'e' if is_eval else ''}{step}/{group}/{member}",
        "step": step,
        "is_eval": is_eval,
        "prompt": "2+2=",
        "completion": f"{member}<eos>",
        "reward": reward,
        "reason": "" if reward is not None else "raised",
        "finish": "stop",
        "n_tokens": 2,
        **fields,
    }


def samples(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["samples", *arguments])


def ids(result: Result) -> list[str]:
    return [row["sample"] for row in json.loads(result.stdout)]


ROWS = [
    *[sample(0, 0, i) for i in range(2)],
    *[sample(1, group, i, reward) for group in range(2) for i, reward in enumerate((0.5, None, 1.0, -1.0))],
    sample(1, 0, 0, 0.25, is_eval=True),
]


def test_samples_of_the_newest_step_come_from_different_prompts(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1/samples", ok(ROWS))
    assert ids(samples("j-1", "--json", "-n", "3")) == ["1/1/0/0", "1/1/1/0", "1/1/0/1"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--best", "-n", "2"], ["1/1/0/2", "1/1/1/2"]),
        (["--worst", "-n", "3"], ["1/1/0/3", "1/1/1/3", "1/1/0/0"]),
        (["--step", "1"], ["1/0/0/0", "1/0/0/1"]),
        (["--eval"], ["1/e1/0/0"]),
    ],
)
def test_samples_are_chosen_by_options(rest: FakeRest, arguments: list[str], expected: list[str]) -> None:
    rest.on("GET /v1/jobs/j-1/samples", ok(ROWS))
    assert ids(samples("j-1", "--json", *arguments)) == expected


def test_an_evaluation_job_has_only_evaluation_samples(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1/samples", ok(ROWS[-1:]))
    assert ids(samples("j-1", "--json")) == ["1/e1/0/0"]


def test_a_name_is_the_newest_job_of_that_name(rest: FakeRest) -> None:
    older, newer, other = (job("completed", 3) | {"id": f"j-{n}", "name": name} for n, name in enumerate("jjk"))
    rest.on("GET /v1/jobs/j", problem(404, "No such job", "there is no job 'j'"))
    rest.on("GET /v1/jobs", ok([older, newer, other]))
    rest.on("GET /v1/jobs/j-1/samples", ok(ROWS))
    assert ids(samples("j", "--json", "-n", "1")) == ["1/1/0/0"]


def test_an_unknown_job_fails(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j", problem(404, "No such job", "there is no job 'j'"))
    rest.on("GET /v1/jobs", ok([]))
    result = samples("j")
    assert (result.exit_code, result.stderr) == (1, "rlboost: No such job: there is no job 'j'\n")


@pytest.mark.parametrize(
    ("rows", "state", "arguments", "words"),
    [
        ([], job("running", 0), [], ["no samples yet", "rlboost status j-1"]),
        ([], job("completed", 3, finished_at="2026"), [], ["sft"]),
        (
            [],
            job("running", 0, id="j-1.scores", kind="served"),
            [],
            ["j-1.scores is a model that j-1 asks", "samples j-1'"],
        ),
        (ROWS, job("running", 2), ["--step", "7"], ["step 7", "1-2"]),
        (ROWS[:2], job("running", 2), ["--eval"], ["no evaluation samples"]),
        (ROWS, job("running", 2), ["--eval", "--step", "1"], ["step 1", "steps 2"]),
    ],
)
def test_missing_samples_are_explained(
    rest: FakeRest, rows: list[Any], state: dict[str, Any], arguments: list[str], words: list[str]
) -> None:
    rest.on("GET /v1/jobs/j-1", ok(state))
    rest.on(f"GET /v1/jobs/{state['id']}/samples", ok(rows))
    result = samples("j-1", *arguments)
    assert result.exit_code == 1
    assert [word for word in words if word not in result.stderr] == [], result.stderr


def test_best_and_worst_exclude_each_other() -> None:
    assert samples("j-1", "--best", "--worst").exit_code == 2


def test_a_sample_is_shown_with_reward_parts_group_and_finish(rest: FakeRest) -> None:
    row = sample(1, 3, 2, 1.25, rewards={"right": 1.0, "short": 0.25, "tool": None}, turns=2, finish="length")
    rest.on("GET /v1/jobs/j-1/samples", ok([row]))
    assert samples("j-1").stdout.splitlines() == [
        "j-1 step 2: 1 of 1 samples",
        "",
        "--- group 3, sample 2: reward 1.25, 2 turns, 2 tokens, finish length",
        "rewards     right 1, short 0.25, tool -",
        "prompt      2+2=",
        "completion  2<eos>",
    ]
    rest.on("GET /v1/jobs/j-1/samples", ok([{**row, "is_eval": True, "set": "math500"}]))
    assert "--- math500, group 3, sample 2: reward 1.25, 2 turns, 2 tokens, finish length" in samples("j-1").stdout


def test_conversation_is_shown_turn_by_turn() -> None:
    messages = [
        {"role": "assistant", "content": "", "tool_calls": ['{"name": "add"}'], "spans": []},
        {"role": "environment", "content": "3", "reward": 0.0, "over": ""},
        {"role": "assistant", "content": "It is 3.", "tool_calls": [], "spans": []},
        {"role": "environment", "content": "", "reward": 0.5, "over": "done"},
    ]
    assert list(lines(sample(0, 0, 0, 0.5, turns=2, messages=messages), WIDTH))[2:] == [
        'tool call   {"name": "add"}',
        "environment 3",
        "model       It is 3.",
        "environment [reward 0.5] [the conversation is over]",
    ]


def test_long_texts_fit_the_width_and_show_both_ends() -> None:
    prompt = "x" * 5_000 + "the question"
    completion = "first\n" + "word " * 2_000 + "\nanswer"
    shown = list(lines(sample(0, 0, 0, None, prompt=prompt, completion=completion), WIDTH))
    assert max(map(len, shown)) <= WIDTH
    text = "\n".join(shown)
    assert all(word in text for word in ("the question", "first", "answer", "not scored (raised)"))
    assert len(text) < 3_000


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x9b✓") == "a\\x1b[2Jb    c\nd\\x9b✓"
