"""The trainer's warnings about learning, in its events and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import Job, from_json, to_json
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.trainer.domain import warnings as health
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.shared.messages import Event, StepReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, HashSet
from tests.support.trainer_rig import JOB, Rig, spec


def zero(batch: RewardBatch) -> Scores:
    return Scores((0.0,) * len(batch.completions))


async def warnings(rig: Rig) -> list[dict[str, Any]]:
    return [fields for kind, fields in await rig.events() if kind == "warning" and "name" in fields]


async def test_a_reward_that_is_always_zero_is_warned_of_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.reward = zero
    assert (await rig.run()).state == "completed"
    [warning] = await warnings(rig)
    assert (warning["name"], warning["step"]) == ("no_learning_signal", 2)
    assert "reward 0" in warning["text"]
    assert 'prompt "1 ' in warning["text"], "a sampled completion"
    held = [len(report.warnings) for report in await rig.steps()]
    assert held == [0, 0, 1, 1, 1]


async def test_a_successor_does_not_repeat_a_warning(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.reward = zero
    await rig.killed_in(4)
    for report in await rig.steps():  # as the manager does
        saved = HashSet(names.job_metrics(JOB), {str(report.step): json.dumps(report.metrics)})
        await rig.bus.transact([saved])
    assert (await rig.resume()).state == "completed"
    assert len(await warnings(rig)) == 1
    assert (await rig.steps())[-1].warnings


async def test_dropped_groups_are_warned_of_with_the_first_reason(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=1, data={"train": "t", "prompts_per_step": 10}))
    rig.reward = lambda batch: (
        Scores(None, reason="raised", detail="ValueError:\n boom") if batch.columns["row"][0] % 2 else zero(batch)
    )
    assert (await rig.run()).state == "completed"
    [warning] = await warnings(rig)
    assert warning["name"] == "many_groups_dropped"
    assert "50%" in warning["text"]
    assert "ValueError: boom" in warning["text"]


async def test_a_long_completion_is_shown_by_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.services.trainer.step.texts._TEXT_CHARS", 100)
    rig = Rig(tmp_path, spec(steps=3, sampling={"max_tokens": 4_000}))
    rig.reward = zero
    await rig.run()
    [warning] = await warnings(rig)
    assert 600 < len(warning["text"]) < 1_300
    samples = await rig.bus.read({names.job_samples(JOB): START}, count=1_000)
    texts = [entry.message.fields["completion"] for entry in samples if isinstance(entry.message, Event)]
    cut = [text for text in texts if "characters cut]" in text]
    assert cut
    assert all(len(text) < 150 and text.endswith(" 2") for text in cut), "the end of the answer is there"


async def test_a_fault_of_the_watch_does_not_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(health, "RULES", (fails,))
    rig = Rig(tmp_path)
    await rig.bus.transact([HashSet(names.job_metrics(JOB), {"0": "not JSON"})])
    assert (await rig.run()).state == "completed"
    assert all(report.warnings == [] for report in await rig.steps())


def test_the_manager_shows_the_warnings_of_the_last_step() -> None:
    world, job = World(2.0), Job("j", 1, spec(), created_at=0.0)
    world.jobs.add(job)
    for step, warnings in enumerate((["all rewards are 0"], [])):
        report = StepReport(job_id="j", step=step, metrics={}, warnings=warnings)
        apply_message(world, report, f"{step + 1}-0", Now(mono=100.0, wall=1e9))
        assert from_json(to_json(job)).public()["warnings"] == warnings
