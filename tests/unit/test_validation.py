"""What is wrong with a job file is said in a line a field."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import ConfigError
from shared.jobspec import parse

JOB = {"model": "m", "data": {"train": "t.jsonl"}, "reward": {"function": "m:f"}, "steps": 2}


def complaint(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse({**JOB, **changes})
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "field", "value", "text"),
    [
        ("elastic", "seeding", "atuo", "a valid number, or 'auto' or 'off'"),
        ("elastic", "seeding", -1, "greater than or equal to 0, or 'auto' or 'off'"),
        ("elastic", "seeding", [1], "a valid number, or 'auto' or 'off'"),
        ("algorithm", "tis_cap", "none", "a valid number, or 'off'"),
        ("algorithm", "tis_cap", 0, "greater than 0, or 'off'"),
    ],
)
def test_a_field_that_takes_a_number_or_a_word_says_both_in_one_line(
    section: str, field: str, value: object, text: str
) -> None:
    assert complaint(**{section: {field: value}}) == f"{section}.{field}: Input should be {text}"


def test_a_field_that_takes_certain_words_only_says_that_nothing_else_is_supported() -> None:
    text = complaint(trainer={"backend": "x"})
    assert text == "trainer.backend: Input should be 'torch' or 'megatron'; nothing else is supported"


def test_several_wrong_fields_are_named_each() -> None:
    text = complaint(elastic={"seeding": "x", "seading": 1}, steps=0)
    assert text.split("; ") == [
        "elastic.seeding: Input should be a valid number, or 'auto' or 'off'",
        "elastic.seading: unknown key: remove it or mend its spelling",
        "steps: a job of kind rl needs at least one",
    ]


def test_what_is_wrong_with_the_job_as_a_whole_names_the_job() -> None:
    assert complaint(eval={"every": 1}).startswith("job: eval is set but data.eval is not")
