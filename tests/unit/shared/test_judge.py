"""What a judge is asked, how its verdict is read, and the models that a job may name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.base import ServedJob, served_jobs
from rlboost.shared.job.reward import JudgeSpec, column_problem, question
from rlboost.shared.job.spec import parse, parse_stored, to_json

JOB: dict[str, Any] = {
    "name": "sums",
    "model": "m",
    "data": {"train": "t.jsonl"},
    "steps": 2,
    "models": {"judge": {"model": "j", "share": 0.25, "max_dollars": 3}},
    "reward": {"judge": {"model": "judge", "prompt": "{prompt} {completion}"}},
}


def judge(**changes: Any) -> JudgeSpec:
    return JudgeSpec(**{"model": "judge", "prompt": "{completion}", **changes})


@pytest.mark.parametrize(
    ("changes", "answer", "reward"),
    [
        ({}, "Of 10 points I give 7.5", 7.5),
        ({}, "-2", -2.0),
        ({}, "none", None),
        ({}, "9" * 400, None),
        ({"parse": r"Score: (\d+)"}, "Score: 3, no: Score: 4. 5", 4.0),
        ({"parse": r"Score:( x)?"}, "Score:", None),
        ({"parse": "(?i)yes|no", "values": {"Yes": 1, "no": 0}}, "No, rather yes", 1.0),
        ({"parse": r"\w+", "values": {"yes": 1}}, "maybe", None),
        ({"parse": r"(a|a)+$"}, "a" * 60 + "!", None),  # would take years
    ],
)
def test_last_verdict_of_an_answer_counts(changes: dict[str, Any], answer: str, reward: float | None) -> None:
    assert judge(**changes).reward_in(answer) == reward


def test_question_has_the_texts_and_columns_of_the_row() -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    template = "{prompt}|{completion}|{answer}|{{x}}"
    assert question(template, messages, [{"role": "assistant", "content": "{y}"}], {"answer": 2}) == (
        "system: Add.\nuser: 1+1|{y}|2|{x}"
    )
    assert not column_problem(template, ["answer"], "row 1")
    assert column_problem(template, ["solution"], "row 1").startswith(
        "reward.judge.prompt: names answer, and row 1 has solution: correct the name"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"models": {}}, "reward.judge.model: 'judge' is not among models, and it has none: define"),
        ({"models": {"other": {"model": "m"}}}, "'judge' is not among models, and it has other: define"),
        ({"models": {"a.b": {"model": "m"}}}, "ASCII letters, digits, '_' and '-' only"),
        (
            {"reward": {"functions": [JOB["reward"], {"model": "judge"}]}},
            "reward.judge.model: 'judge' is also reward.model, and a reward model writes no verdict",
        ),
        ({"kind": "sft"}, "a job of kind sft generates nothing: remove "),
        ({"kind": "served", "job": "j-1"}, "kind: 'served' is unknown"),
        ({"reward": {"judge": {"model": "judge", "prompt": "x"}}}, "shows the judge no completion"),
        ({"reward": {"judge": {"model": "judge", "prompt": "{completion} {a.b}"}}}, "{a.b} is no name of a column"),
        ({"reward": {"judge": {"model": "judge", "prompt": "{completion"}}}, "write a brace that is meant as text"),
        ({"reward": {"judge": {"model": "judge", "prompt": "{completion}", "parse": "("}}}, "no regular expression"),
        ({"reward": {"judge": {"model": "judge", "prompt": "{completion}", "parse": "a{99999999999}"}}}, "too large"),
        ({"reward": {"judge": {"model": "judge", "prompt": "{completion}", "temperature": 0}}}, "judge.retries to 0"),
        ({"reward": {**JOB["reward"], "function": "m:f"}}, "give either function"),
    ],
)
def test_wrong_judge_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({**JOB, **changes})
    assert problem in str(refused.value)


def test_jobs_that_serve_models_follow_from_the_file() -> None:
    job = parse(JOB)
    assert parse(json.loads(to_json(job))) == job
    ((served_id, served),) = served_jobs("sums-1", job).items()
    assert served_id == "sums-1.judge"
    assert (served.name, served.model, served.job) == ("sums.judge", "j", "sums-1")
    assert (served.elastic.share, served.elastic.max_dollars) == (0.25, 3.0)
    assert parse_stored(json.loads(to_json(served))) == served
    assert isinstance(served, ServedJob)
    assert not served_jobs("sums-1.judge", served)
