"""What a job file may say where YAML and people mean different things."""

from __future__ import annotations

import pytest
import yaml

from shared.errors import ConfigError
from shared.jobspec import parse


def spec(elastic: str) -> dict[str, object]:
    text = "{model: m, data: {train: t}, reward: {function: 'a:b'}, steps: 1, elastic: " + elastic + "}"
    raw: dict[str, object] = yaml.safe_load(text)
    return raw


@pytest.mark.parametrize(
    ("text", "means"), [("off", "off"), ("'off'", "off"), ("auto", "auto"), ("2.5", 2.5), ("0", 0)]
)
def test_a_window_is_a_number_or_a_word(text: str, means: object) -> None:
    assert parse(spec("{seeding: " + text + "}")).elastic.seeding == means


def test_on_is_no_window() -> None:
    with pytest.raises(ConfigError, match=r"elastic\.seeding"):
        parse(spec("{seeding: on}"))


@pytest.mark.parametrize("wrong", ["{max_staleness: 17}", "{max_staleness: -1}", "{share: 0}"])
def test_what_makes_no_sense_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"elastic\."):
        parse(spec(wrong))
