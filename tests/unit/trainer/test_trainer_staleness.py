"""A job that trains on tokens of older weights: steps are asked for ahead, and what is too old is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.domain.loss.function import LossFn
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import Event, GroupRequested
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from tests.support.eventually import eventually
from tests.support.scripted_manager import Answer, scripted
from tests.support.trainer_fakes import FakeEngine
from tests.support.trainer_rig import JOB, Rig, spec


def stale(versions_late: int) -> Callable[[GroupRequested, int], Answer]:
    """Answer training samples with a first token that is so many versions older than what is to be trained."""

    def script(request: GroupRequested, sample: int) -> Answer:
        answer = scripted(request, sample)
        [(worker, version, n)] = answer.spans
        if SampleId.unpack(sample).is_eval or version < versions_late:
            return answer
        return answer.model_copy(update={"spans": [(worker, version - versions_late, 1), (worker, version, n - 1)]})

    return script


@pytest.mark.parametrize("allowed", [0, 1, 16])
def test_a_job_file_may_allow_up_to_16_versions(allowed: int) -> None:
    assert spec(elastic={"max_staleness": allowed}).elastic.max_staleness == allowed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"elastic": {"max_staleness": 17}}, "elastic.max_staleness"),
        ({"elastic": {"max_staleness": -1}}, "elastic.max_staleness"),
        ({"algorithm": {"tis_cap": 0}}, "algorithm.tis_cap"),
        ({"algorithm": {"tis_cap": "none"}}, "algorithm.tis_cap"),
    ],
)
def test_a_job_file_that_cannot_be_held_to_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        spec(**changes)


@pytest.mark.parametrize(("written", "meant"), [(1.5, 1.5), ("off", "off"), (False, "off")])
def test_importance_weights_are_cut_somewhere_or_off(written: object, meant: object) -> None:
    """YAML reads a bare off as false."""
    assert spec(algorithm={"tis_cap": written}).algorithm.tis_cap == meant


async def test_training_groups_are_requested_ahead_and_evaluation_with_its_step(tmp_path: Path) -> None:
    job = spec(
        data={"train": "t", "eval": "e", "prompts_per_step": 4},
        eval={"every": 2, "samples": 4},
        elastic={"max_staleness": 2},
    )
    rig = Rig(tmp_path, job)
    heads: dict[int, int] = {}

    def script(request: GroupRequested, sample: int) -> Answer:
        heads.setdefault(request.group, max(rig.weights.versions))
        return scripted(request, sample)

    rig.manager.script = script
    assert (await rig.run()).state == "completed"
    for request in rig.manager.requests:
        group = SampleId.unpack(request.group)
        assert request.version == group.step
        if group.is_eval:
            assert (heads[request.group], request.max_staleness) == (group.step, 0)
        else:
            assert heads[request.group] >= max(0, group.step - 2), "not before its oldest version is there"
            assert request.max_staleness == 2
    first = [SampleId.unpack(request.group) for request in rig.manager.requests]
    assert [(g.step, g.is_eval) for g in first[: 4 + 3 + 4 + 4]] == (
        [(0, False)] * 4 + [(0, True)] * 3 + [(1, False)] * 4 + [(2, False)] * 4
    )
    assert [report.step for report in await rig.steps()] == [0, 1, 2, 3, 4, 5]


async def test_groups_of_later_steps_are_scored_while_this_one_trains(tmp_path: Path) -> None:
    class Blocking(FakeEngine):
        may_go_on = threading.Event()

        def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
            self.may_go_on.wait(20)
            return super().accumulate(batches, loss)

    rig = Rig(tmp_path, spec(elastic={"max_staleness": 1}))
    engine = Blocking()
    rig.make_engine = lambda: engine
    async with rig.trainer():
        await rig.command("create")
        await eventually(lambda: _scored_steps(rig, {0, 1}))
        assert sorted(rig.weights.versions) == [0]
        assert {SampleId.unpack(request.group).step for request in rig.manager.requests} == {0, 1}
        engine.may_go_on.set()
        assert (await rig.ended()).state == "completed"
    assert set(rig.manager.answered.values()) == {1}


async def _scored_steps(rig: Rig, steps: set[int]) -> bool:
    entries = await rig.bus.read({names.job_samples(JOB): START}, count=1000)
    return {e.message.fields["step"] for e in entries if isinstance(e.message, Event)} == steps


async def test_tokens_within_the_staleness_limit_are_trained_and_reported(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(elastic={"max_staleness": 1}))
    rig.manager.script = stale(1)
    assert (await rig.run()).state == "completed"
    for report in await rig.steps():
        late = report.metrics["off_policy/staleness"] * report.metrics["tokens/completion"]
        assert late == pytest.approx(0 if report.step == 0 else 8), "one token of each sample"
        assert report.metrics["groups/dropped"] == 0


async def test_stale_group_is_dropped_counted_and_reported(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(elastic={"max_staleness": 1}))
    too_old = SampleId(1, False, 3, 2, 1).pack()
    script = stale(2)
    rig.manager.script = lambda request, sample: (script if sample == too_old else scripted)(request, sample)
    assert (await rig.run()).state == "completed"
    dropped = {report.step: report.metrics.get("groups/dropped/stale", 0.0) for report in await rig.steps()}
    assert dropped == {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0}
    [(_, fields)] = [event for event in await rig.events() if event[0] == "group_dropped"]
    assert (fields["group"], fields["reason"]) == ("1/3/2/0", "stale")
    assert "weight versions [1, 3]; only 2 to 3 are allowed" in fields["detail"]


async def test_step_of_stale_groups_only_fails_the_job_with_the_remedy(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(elastic={"max_staleness": 1}))
    rig.manager.script = stale(2)
    report = await rig.run()
    assert report.state == "failed"
    assert "raise elastic.max_staleness" in report.error


async def test_without_staleness_a_token_of_another_version_is_fatal(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.script = stale(1)
    report = await rig.run()
    assert report.state == "failed"
    assert "only 1 is allowed" in report.error


class Proximal(FakeEngine):
    """Notes what was asked of it, and with which columns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def logprobs(self, batches: Any) -> list[bytes]:
        self.calls.append("logprobs")
        return super().logprobs(batches)

    def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
        rows = [row for batch in batches for row in batch]
        lengths = {len(row.proximal) - len(row.sampled) for row in rows if row.proximal}
        assert lengths <= {0}
        self.calls.append("with" if all(row.proximal for row in rows) else "without")
        return super().accumulate(batches, loss)

    def step(self, learning_rate: float) -> float:
        self.calls.append("step")
        return super().step(learning_rate)


@pytest.mark.parametrize(
    ("updates", "max_staleness", "order"),
    [
        (1, 0, ["without", "step"]),
        (2, 0, ["without", "step"] * 2),
        (1, 1, ["without", "step"]),
        (2, 1, ["logprobs", "with", "step", "with", "step"]),
    ],
)
async def test_first_weights_score_the_step_before_they_change(
    tmp_path: Path, updates: int, max_staleness: int, order: list[str]
) -> None:
    algorithm = {"group_size": 2, "updates_per_step": updates}
    rig = Rig(tmp_path, spec(steps=2, algorithm=algorithm, elastic={"max_staleness": max_staleness}))
    engine = Proximal()
    rig.make_engine = lambda: engine
    assert (await rig.run()).state == "completed"
    assert [call for call, _ in itertools.groupby(engine.calls)] == order * 2
