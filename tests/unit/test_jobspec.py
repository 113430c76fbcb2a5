"""What a job file may say where YAML and people mean different things."""

from __future__ import annotations

import json

import pytest
import yaml

from shared.errors import ConfigError
from shared.jobspec import parse, to_json
from shared.training import LoraSpec


def spec(elastic: str, more: str = "") -> dict[str, object]:
    text = "{model: m, data: {train: t}, reward: {function: 'a:b'}, steps: 1, elastic: " + elastic + more + "}"
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


@pytest.mark.parametrize("wrong", ["{max_staleness: 17}", "{max_staleness: -1}", "{share: 0}", "{in_flight: drop}"])
def test_what_makes_no_sense_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"elastic\."):
        parse(spec(wrong))


def test_an_adapter_needs_no_section() -> None:
    assert parse(spec("{}")).adapter is None
    assert parse(spec("{weights: lora}")).adapter == LoraSpec()


def test_a_section_of_an_adapter_survives_the_resolved_job_file() -> None:
    job = parse(spec("{weights: lora}", ", lora: {rank: 4, alpha: 16, targets: [q_proj, v_proj]}"))
    assert job.adapter == LoraSpec(rank=4, alpha=16.0, targets=("q_proj", "v_proj"))
    assert parse(json.loads(to_json(job))) == job


@pytest.mark.parametrize("weights", ["full", "delta"])
def test_a_section_of_an_adapter_beside_whole_models_is_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match=r"set elastic\.weights to lora to train an adapter, or remove the section"):
        parse(spec("{weights: " + weights + "}", ", lora: {rank: 4}"))


@pytest.mark.parametrize(
    "wrong", ["rank: 0", "alpha: 0", "alpha: .inf", "dropout: 1", "targets: []", "targets: q_proj"]
)
def test_an_adapter_that_makes_no_sense_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"lora\." + wrong.partition(":")[0]):
        parse(spec("{weights: lora}", ", lora: {" + wrong + "}"))
