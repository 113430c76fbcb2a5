"""What a job file may say where YAML and people mean different things."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from pydantic import ValidationError

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.file import load, set_by_override
from rlboost.shared.job.spec import InvalidJob, parse, parse_stored, policy_jobs, to_json
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.validation import Section, read_yaml


def spec(elastic: str, more: str = "") -> dict[str, object]:
    text = "{model: m, data: {train: t}, reward: {function: 'a:b'}, steps: 1, elastic: " + elastic + more + "}"
    raw: dict[str, object] = yaml.safe_load(text)
    return raw


@pytest.mark.parametrize(
    ("text", "means"), [("off", "off"), ("'off'", "off"), ("auto", "auto"), ("2.5", 2.5), ("0", 0)]
)
def test_a_window_is_a_number_or_a_word(text: str, means: object) -> None:
    assert parse(spec("{seeding: " + text + "}")).elastic.seeding == means


def test_on_is_not_a_seeding_window() -> None:
    with pytest.raises(ConfigError, match=r"elastic\.seeding"):
        parse(spec("{seeding: on}"))


@pytest.mark.parametrize("wrong", ["{max_staleness: 17}", "{max_staleness: -1}", "{share: 0}", "{in_flight: drop}"])
def test_invalid_elastic_values_are_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"elastic\."):
        parse(spec(wrong))


def _sections(section: type[Section]) -> Iterator[type[Section]]:
    for one in section.__subclasses__():
        yield from (one, *_sections(one))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_no_key_takes_a_number_that_is_not_finite(number: float) -> None:
    """A limit of infinitely many seconds would be none."""
    asked = [
        (section, name)
        for section in _sections(Section)
        for name, field in section.model_fields.items()
        if "float" in str(field.annotation)
    ]
    assert len(asked) > 40
    for section, name in asked:
        with pytest.raises(ValidationError):
            section.__pydantic_validator__.validate_assignment(section.model_construct(), name, number)


@pytest.mark.parametrize("seeding", ["off", "30"])
def test_deadline_of_a_job_whose_steps_are_not_measured_is_refused(seeding: str) -> None:
    deadline = "{finish_by: 2100-01-01T00:00:00Z, seeding: %s}"
    with pytest.raises(ConfigError, match=r"elastic\.finish_by needs elastic\.seeding: auto"):
        parse(spec(deadline % seeding))
    assert parse(spec(deadline % "auto")).elastic.seeding == "auto"


def test_an_adapter_needs_no_section() -> None:
    assert parse(spec("{}")).adapter is None
    assert parse(spec("{weights: lora}")).adapter == LoraSpec(base_model_name_or_path="m")


def test_a_section_of_an_adapter_survives_the_resolved_job_file() -> None:
    job = parse(spec("{weights: lora}", ", lora: {rank: 4, alpha: 16, targets: [q_proj, v_proj]}"))
    assert job.adapter == LoraSpec(rank=4, alpha=16.0, targets=("q_proj", "v_proj"), base_model_name_or_path="m")
    assert parse(json.loads(to_json(job))) == job


@pytest.mark.parametrize("weights", ["full", "delta"])
def test_lora_section_without_lora_weights_is_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match=r"set elastic\.weights to lora to train an adapter, or remove the section"):
        parse(spec("{weights: " + weights + "}", ", lora: {rank: 4}"))


@pytest.mark.parametrize(
    "wrong", ["rank: 0", "alpha: 0", "alpha: .inf", "dropout: 1", "targets: []", "targets: q_proj"]
)
def test_an_adapter_that_makes_no_sense_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"lora\." + wrong.partition(":")[0]):
        parse(spec("{weights: lora}", ", lora: {" + wrong + "}"))


def test_a_job_file_of_json_has_the_numbers_of_json(tmp_path: Path) -> None:
    job = {**spec("{}"), "reward": {"function": "a:b", "arguments": {"tolerance": 1e-6}}}
    (tmp_path / "job.json").write_text(to_json(parse(job)))
    assert parse(load(str(tmp_path / "job.json"))) == parse(job)


def test_dates_are_read_whatever_a_library_has_done_to_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    constructors = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(constructors, "tag:yaml.org,2002:timestamp", constructors["tag:yaml.org,2002:str"])
    assert read_yaml("2024-01-31") == date(2024, 1, 31)


_BOMB = b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1) if i else b"x"] * 9)) for i in range(9))
_MERGE_BOMB = b"m0: &m0 {a: 1}\n" + b"".join(
    b"m%d: &m%d {<<: [%s]}\n" % (i, i, b", ".join([b"*m%d" % (i - 1)] * 9)) for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("job.yaml", b"name: \xff", "is not UTF-8"),
        ("job.yaml", b"name: 2024-13-45", "does not parse: month must be in"),
        ("job.yaml", b"name: [", "does not parse"),
        ("job.yaml", b"steps: 4\ndata: {train: a}\nsteps: 400", "does not parse: 'steps' is given twice: remove one"),
        ("job.yaml", b"data: {train: a, train: b}", "does not parse: 'train' is given twice: remove one"),
        ("job.toml", b"name: a", "does not parse"),
        ("job.json", b"{'name': 1}", "does not parse"),
        ("job.json", b'{"steps": 4, "steps": 400}', "does not parse: the key 'steps' is there twice: remove one"),
        ("job.JSON", b"name: a", "does not parse"),
        ("job.yaml", b"steps: 012", "does not parse: 012 is a number to the base 8 or 60 in YAML: write it in decimal"),
        ("job.yaml", b"sampling: {temperature: 0:0.5}", "does not parse: 0:0.5 is a number to the base 8 or 60"),
        ("job.yaml", b"name: 12:30", "does not parse: 12:30 is a number to the base 8 or 60"),
        ("job.yaml", b"a: " + b"[" * 2000, "does not parse: its lists and sections are nested too deep"),
        ("job.json", b"[" * 100_000, "does not parse"),
        ("job.toml", b"a = " + b"[" * 100_000, "does not parse"),
        ("job.yaml", _BOMB, "does not parse: with its aliases replaced it has more than"),
        ("job.yaml", _MERGE_BOMB, "does not parse: with its aliases replaced it has more than"),
        ("job.yaml", b"a: &a [*a]", "does not parse: with its aliases replaced it has more than"),
        ("job.yaml", b"#" * (1 << 20) + b"\n", "has more than 1048576 bytes"),
        ("job.yaml", b"", "a job file is a mapping"),
        ("job.json", b"[]", "a job file is a mapping"),
    ],
)
def test_a_job_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: bytes, told: str) -> None:
    file = tmp_path / name
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"^job file .*{name}:? {told}"):
        load(str(file))


def test_a_job_file_may_begin_with_a_byte_order_mark_and_use_aliases(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(b'\xef\xbb\xbf{"steps": 0, "lr": 1e-06}')
    (tmp_path / "job.yaml").write_bytes(b"\xef\xbb\xbfa: &a {x: 0, y: 0.5}\r\nb: {<<: *a, x: -10}\r\n")
    assert load(str(tmp_path / "job.json")) == {"steps": 0, "lr": 1e-6}
    assert load(str(tmp_path / "job.yaml")) == {"a": {"x": 0, "y": 0.5}, "b": {"x": -10, "y": 0.5}}


@pytest.mark.parametrize("wrong", ["steps: yes", "sampling: {temperature: on}", "optimizer: {betas: [true, 0.9]}"])
def test_a_truth_is_no_number(wrong: str) -> None:
    key = wrong.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"{key}.*: should be a number, not true"):
        parse({**spec("{}"), **cast("dict[str, Any]", read_yaml(wrong))})


@pytest.mark.parametrize("wrong", ["steps", "=1", ".steps=1", "data..train=t", "data.=t"])
def test_an_override_without_a_name_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form a\.b=value"):
        set_by_override(spec("{}"), wrong)


def test_an_override_that_yaml_cannot_read_is_text() -> None:
    raw: dict[str, Any] = {}
    set_by_override(raw, "name=2024-13-45")
    assert raw == {"name": "2024-13-45"}


@pytest.mark.parametrize("pattern", ["*.jsonl", "[0-9]*.jsonl", "[!a]*.jsonl", "part-[0-9].jsonl"])
def test_an_override_that_is_a_pattern_is_text(pattern: str) -> None:
    raw: dict[str, Any] = {}
    set_by_override(raw, f"data.train={pattern}")
    assert raw == {"data": {"train": pattern}}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{lr: 1", " does not parse: expected ',' or '}', but got '<stream end>': close every bracket"),
        ("{", " does not parse: expected the node content, but found '<stream end>': close every bracket"),
        ("[0.9, 0.95", " does not parse: expected ',' or ']', but got '<stream end>': close every bracket"),
        ("{lr: 1, lr: 2}", ": 'lr' is given twice: remove one"),
        ("[{a: 1, a: 1}]", ": 'a' is given twice: remove one"),
    ],
)
def test_unparsable_override_is_named(value: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        set_by_override({}, f"optimizer={value}")
    assert str(caught.value).startswith(f"override 'optimizer={value}'{told}")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stepz=1", "stepz: unknown key: did you mean steps?"),
        ("optimizer.l=1", "optimizer.l: unknown key: did you mean lr?"),
        ("reward={functions: [{functon: 'a:b'}]}", "reward.functions.0.functon: unknown key: did you mean function?"),
        ("data.curriculum.windw=2", "data.curriculum.windw: unknown key: did you mean window?"),
        ("log.wandb={project: p, entty: e}", "log.wandb.entty: unknown key: did you mean entity?"),
        ("sampling.quux=1", "sampling.quux: unknown key: remove it or fix its spelling"),
        ("'off'=1", "'off': unknown key: remove it or fix its spelling"),
    ],
)
def test_unknown_key_error_suggests_a_key_of_its_section(override: str, told: str) -> None:
    raw = spec("{}")
    set_by_override(raw, override)
    with pytest.raises(InvalidJob) as caught:
        parse(raw)
    assert told in caught.value.problems


def agent_job(agent: object) -> dict[str, object]:
    return {"model": "m", "data": {"train": "t"}, "steps": 1, "agent": agent}


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ({"functon": "a:b"}, "agent.functon: unknown key: did you mean function?"),
        ({"function": "a:b", "max_turns": 0}, "agent.max_turns: "),
        ({}, "agent: give either function, or remote: true if hosts elsewhere run the agents"),
        ({"function": "a:b", "remote": True}, "agent: give either function, or remote: true"),
        ({"remote": True, "workers": 2}, "agent: workers: a host of agents has its own: remove it"),
    ],
)
def test_invalid_agent_has_no_error_about_a_missing_reward(agent: object, told: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        parse(agent_job(agent))
    assert any(problem.startswith(told) for problem in caught.value.problems)
    assert not any(problem.startswith("reward") for problem in caught.value.problems)


def test_job_with_a_remote_agent_survives_the_resolved_job_file() -> None:
    job = parse(agent_job({"remote": True, "max_tokens": 100}))
    assert job.agent is not None
    assert parse(json.loads(to_json(job))) == job


def team_job(**changes: object) -> dict[str, Any]:
    job = agent_job({"function": "a:b"}) | {"name": "solver", "policies": {"verifier": {"model": "v"}}}
    return job | {"optimizer": {"lr": 1e-4}, "sampling": {"max_tokens": 9}} | changes


def test_other_policy_has_the_sections_of_the_job_that_it_does_not_have() -> None:
    job = parse(team_job(policies={"verifier": {"model": "v", "optimizer": {"lr": 1e-3}}}))
    (job_id, policy), *more = policy_jobs("solver-1", job).items()
    assert not more
    assert (job_id, policy.name, policy.model) == ("solver-1.verifier", "solver.verifier", "v")
    assert (policy.optimizer.lr, policy.sampling.max_tokens) == (1e-3, 9)
    assert policy.agent is not None
    assert (policy.agent.leader, policy.agent.runs_here) == ("solver-1", False)
    stored = parse_stored(json.loads(to_json(job)))
    assert policy_jobs("solver-1", stored) == {job_id: policy}
    assert parse_stored(json.loads(to_json(policy))) == policy


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"policies": {"verifier": {}}}, "policies.verifier.model: missing: give it"),
        ({"policies": {"verifier": {"model": "v", "steps": 2}}}, "policies.verifier.steps: unknown key"),
        ({"policies": {"verifier": {"model": "v", "lora": {"rank": 2}}}}, "policies.verifier: elastic.weights: full"),
        ({"policies": {"v" * 32: {"model": "v"}}, "name": "s" * 60}, f"policies.{'v' * 32}: name: "),
        ({"agent": {"remote": True}}, "policies: the job's agent calls them: give agent.function"),
        ({"agent": None, "reward": {"function": "a:b"}}, "policies: the job's agent calls them: give agent.function"),
        ({"agent": {"function": "a:b", "leader": "x"}}, "agent.leader: the manager sets it"),
        ({"models": {"verifier": {"model": "m"}}}, "policies: verifier is also among models"),
        ({"algorithm": {"resample": 1}}, "algorithm.resample: not supported with policies"),
        ({"trainer": {"resume": "/other"}}, "trainer.resume: each policy begins with a checkpoint of its own"),
        (
            {"policies": {"verifier": {"model": "v", "trainer": {"resume": "/other"}}}},
            "trainer.resume: each policy begins with a checkpoint of its own",
        ),
    ],
)
def test_invalid_team_is_refused_by_name(changes: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        parse(team_job(**changes))
    assert any(problem.startswith(told) for problem in caught.value.problems), caught.value.problems


def test_policies_may_begin_with_checkpoints_of_their_own() -> None:
    policies = {"verifier": {"model": "v", "trainer": {"resume": "/verifier"}}}
    job = parse(team_job(trainer={"resume": "/solver"}, policies=policies))
    assert policy_jobs("s", job)["s.verifier"].trainer.resume == "/verifier"
