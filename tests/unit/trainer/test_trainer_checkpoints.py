"""What a job does about its checkpoints: beside its steps, one at a time, and what it begins with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.job import job as claimed_job
from rlboost.services.trainer.job.checkpoints import fingerprint
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.shared.errors import ConfigError, DiskFull, Fatal
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import SampleFinished
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Remove, Trim, position
from tests.support.eventually import eventually
from tests.support.trainer_fakes import MemoryCheckpoints
from tests.support.trainer_rig import JOB, Rig, spec


class SlowCheckpoints(MemoryCheckpoints):
    """Writes for as long as it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go_on = threading.Event()
        self.writing = 0
        self.most = 0
        self.delays_exit = False
        """True once a write has run in a thread that the process joins when it ends."""

    def save(self, state: TrainState, write: Snapshot) -> None:
        self.writing += 1
        self.most = max(self.most, self.writing)
        self.delays_exit |= not threading.current_thread().daemon
        assert self.go_on.wait(20.0)
        super().save(state, write)
        self.writing -= 1


class FullCheckpoints(MemoryCheckpoints):
    """Keeps none from some step on."""

    def __init__(self, folder: Path, first: int) -> None:
        super().__init__(folder)
        self._first = first

    def save(self, state: TrainState, write: Snapshot) -> None:
        if state.step >= self._first:
            raise Fatal(f"checkpoint step-{state.step:06d} cannot be written: No space left on device")
        super().save(state, write)


class SmallDisk(MemoryCheckpoints):
    """Has no space for one checkpoint, as often as it is told."""

    def __init__(self, folder: Path, step: int, times: int) -> None:
        super().__init__(folder)
        self._step, self._left = step, times
        self.freed = threading.Event()

    def save(self, state: TrainState, write: Snapshot) -> None:
        if state.step == self._step and self._left:
            self._left -= 1
            write(self._folder)  # a part of it fits
            if not self._left:
                assert self.freed.wait(20.0)
            raise DiskFull("no space for the checkpoint")
        super().save(state, write)


async def test_checkpoint_waits_for_a_full_disk_while_steps_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimed_job, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(claimed_job, "FIRST_PAUSE_S", 0.01)
    rig = Rig(tmp_path, spec(steps=7))
    store = rig.checkpoints = SmallDisk(tmp_path, step=2, times=3)
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("disk space for the checkpoint of step 2")
        await eventually(lambda: max(rig.weights.versions) == 4)
        store.freed.set()
        assert (await rig.ended()).state == "completed"
    events = await rig.events()
    assert [fields["step"] for kind, fields in events if kind == "checkpoint_saved"] == [2, 4, 6, 7]
    full = [fields for kind, fields in events if kind == "disk_full"]
    assert full == [{"what": "the checkpoint of step 2", "reason": "no space for the checkpoint"}]


async def test_job_fails_when_the_disk_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed_job, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(claimed_job, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(claimed_job, "SPACE_LIMIT_S", 0.1)
    rig = Rig(tmp_path, spec(steps=7))
    store = rig.checkpoints = SmallDisk(tmp_path, step=2, times=1_000)
    store.freed.set()
    report = await rig.run()
    assert report.state == "failed"
    assert "no space for the checkpoint; the disk was still full after" in report.error


async def test_steps_continue_during_a_checkpoint_and_the_next_one_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=7))
    store = rig.checkpoints = SlowCheckpoints(tmp_path)
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("the checkpoint of step 2")
        # Two steps were trained and published meanwhile, and nothing is forgotten that the checkpoint may be without.
        assert max(rig.weights.versions) == 4
        assert {report.checkpointed_step for report in await rig.steps()} == {0}
        left = await rig.bus.read({names.rollouts_finished(JOB): START}, count=10_000)
        assert {SampleId.unpack(e.message.sample).step for e in left if hasattr(e.message, "sample")} >= {0, 1, 2, 3}
        store.go_on.set()
        assert (await rig.ended()).state == "completed"
    assert store.most == 1
    assert not store.delays_exit
    assert [fields["step"] for kind, fields in await rig.events() if kind == "checkpoint_saved"] == [2, 4, 6, 7]


async def test_the_end_of_a_job_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spec(steps=3))
    store = rig.checkpoints = SlowCheckpoints(tmp_path)
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("the checkpoint of step 2")
        assert max(rig.weights.versions) == 3
        assert "completed" not in await rig.states()
        store.go_on.set()
        assert (await rig.ended()).state == "completed"


@pytest.mark.parametrize(("steps", "trained"), [(7, 4), (4, 4)])
async def test_failed_checkpoint_fails_the_job_at_the_next_one_or_at_the_end(
    tmp_path: Path, steps: int, trained: int
) -> None:
    rig = Rig(tmp_path, spec(steps=steps))
    rig.checkpoints = FullCheckpoints(tmp_path, 2)
    report = await rig.run()
    assert report.state == "failed"
    assert "step-000002 cannot be written: No space left on device" in report.error
    assert max(rig.weights.versions) == trained
    assert [fields["step"] for kind, fields in await rig.events() if kind == "checkpoint_failed"] == [2]


async def test_trainer_killed_during_a_checkpoint_resumes_from_the_one_before(tmp_path: Path) -> None:
    undisturbed = Rig(tmp_path / "a")
    await undisturbed.run()
    rig = Rig(tmp_path / "b")
    store = rig.checkpoints = SlowCheckpoints(tmp_path / "b")
    rig.manager.held = {3}
    async with rig.trainer(killed=True):
        await rig.command("create")
        await rig.waits_for("samples of step 4")
        await eventually(lambda: store.writing == 1)
    # The thread of the dead one may end whenever it likes.
    rig.checkpoints = MemoryCheckpoints(tmp_path / "c")
    store.go_on.set()
    rig.manager.held = set()
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    assert rig.folder.model == undisturbed.folder.model
    assert set(rig.manager.answered.values()) == {1}


async def test_job_resumes_from_the_older_checkpoint_without_generating_twice(tmp_path: Path) -> None:
    """The newest checkpoint is corrupt; the samples after the older one are still in the stream."""
    undisturbed = Rig(tmp_path / "a", spec(steps=7))
    await undisturbed.run()
    rig = Rig(tmp_path / "b", spec(steps=7))
    store = rig.checkpoints = MemoryCheckpoints(tmp_path / "b")
    rig.manager.held = {5}

    async def steps_in_stream() -> set[int]:
        entries = await rig.bus.read({names.rollouts_finished(JOB): START}, count=10_000)
        return {SampleId.unpack(e.message.sample).step for e in entries if isinstance(e.message, SampleFinished)}

    async def is_trimmed() -> bool:
        return 0 not in await steps_in_stream()

    async with rig.trainer(killed=True):
        await rig.command("create")
        await rig.waits_for("samples of step 6")
        await eventually(is_trimmed)
    assert await steps_in_stream() >= {2, 3, 4}
    newest = store._retained.pop()
    assert newest[0].step == 4
    rig.manager.held = set()
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    assert [fields["step"] for kind, fields in await rig.events() if kind == "job_resumed"] == [2]
    assert rig.folder.model == undisturbed.folder.model
    assert set(rig.manager.answered.values()) == {1}


async def killed_in_step_3(rig: Rig) -> None:
    """Leave a job that has a checkpoint of step 2."""
    await rig.killed_in(3)


async def test_resumed_job_has_the_rates_of_an_uninterrupted_cosine(tmp_path: Path) -> None:
    falling = spec(optimizer={"lr": 0.01, "warmup_steps": 1, "decay": 0.5, "schedule": "cosine"})
    found = []
    for name, is_killed in (("whole", False), ("killed", True)):
        (tmp_path / name).mkdir()
        rig = Rig(tmp_path / name, falling)
        if is_killed:
            await rig.killed_in(3)
        assert (await (rig.resume() if is_killed else rig.run())).state == "completed"
        found.append([rig.folder.rows[step]["lr"] for step in range(5)])
    assert found[0] == found[1]
    fallen = [(1 - cos(pi * step / 4)) / 2 for step in range(4)]
    assert found[0] == pytest.approx([0.0, *(0.01 * (1 - 0.5 * part) for part in fallen)])


async def test_resume_with_as_many_other_prompts_fails_the_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await killed_in_step_3(rig)
    rig.first_row = 1
    report = await rig.resume()
    assert report.state == "failed"
    assert "data.train has 10 prompts as when the job was interrupted, but" in report.error
    assert "trainer.resume" in report.error


@pytest.mark.parametrize("redis", ["older", "newer"])
async def test_checkpoint_and_redis_of_different_times_fail_the_job(tmp_path: Path, redis: str) -> None:
    """As after a restore from two backups: the job would wait for samples that are gone."""
    rig = Rig(tmp_path)
    await killed_in_step_3(rig)
    found = rig.checkpoints.newest()
    assert found is not None
    stream = names.rollouts_finished(JOB)
    if redis == "newer":
        last = (await rig.bus.read({stream: START}, count=10_000))[-1].id
        assert position(last) > position(found[0].finished_cursor)
        await rig.bus.transact([Trim(stream, last)])
    else:
        entries = await rig.bus.read({stream: START}, count=10_000)
        lost = [entry.id for entry in entries if position(entry.id) >= position(found[0].finished_cursor)]
        await rig.bus.transact([Remove(stream, tuple(lost))])
    report = await rig.resume()
    assert report.state == "failed"
    assert "checkpoint of step 2 continues after entry" in report.error
    assert "Restore Redis, weights and runs from one backup" in report.error


async def test_resumed_job_is_built_with_the_date_of_its_creation(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await killed_in_step_3(rig)
    [command] = [entry.id for entry in await rig.bus.read({names.JOB_COMMANDS: START})]
    await rig.resume()
    assert rig.created == [datetime.fromtimestamp(position(command)[0] / 1000, UTC)] * 2


async def test_checkpoint_without_a_data_digest_is_resumed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await killed_in_step_3(rig)
    found = rig.checkpoints.newest()
    assert found is not None
    state = TrainState(found[0].step, found[0].finished_cursor, found[0].train_rows, found[0].read_cursor)
    rig.checkpoints = MemoryCheckpoints(tmp_path / "old")
    held = engine_file(found[1])

    def write(directory: Path) -> None:
        (directory / "fake.json").write_bytes(held)

    rig.checkpoints.save(state, write)
    assert (await rig.resume()).state == "completed"


def engine_file(directory: Path) -> bytes:
    return (directory / "fake.json").read_bytes()


async def test_job_resumes_step_weights_and_optimizer_of_another_job(
    tmp_path: Path,
) -> None:
    whole = Rig(tmp_path / "whole")
    await whole.run()
    other = Rig(tmp_path / "other")
    await killed_in_step_3(other)
    found = other.checkpoints.newest()
    assert found is not None
    rig = Rig(tmp_path / "next")
    rig.predecessor = lambda: found
    assert (await rig.run()).state == "completed"
    # The scripted samples are the same, so it must come out where a whole job does.
    assert rig.folder.model == whole.folder.model
    assert sorted(rig.weights.versions) == [2, 3, 4, 5]
    assert [report.step for report in await rig.steps()] == [2, 3, 4]
    assert {SampleId.unpack(request.group).step for request in rig.manager.requests} == {2, 3, 4}
    saved = [fields["step"] for kind, fields in await rig.events() if kind == "checkpoint_saved"]
    assert saved == [2, 4, 5], "one of its own at once: the other may not stay where it is"


async def test_resumed_job_saves_its_own_checkpoint_before_any_request(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "next")
    store = rig.checkpoints = SlowCheckpoints(tmp_path / "kept")
    rig.predecessor = predecessor(tmp_path, TrainState(1, START, 10))
    async with rig.trainer(killed=True):
        await rig.command("create")
        await rig.waits_for("the checkpoint of step 1")
        assert rig.manager.requests == []
        assert not rig.weights.versions
    # Nothing is lost: the other job may have gone on, and this one begins where that is now.
    rig.checkpoints = MemoryCheckpoints(tmp_path / "again")
    store.go_on.set()
    rig.predecessor = predecessor(tmp_path, TrainState(3, START, 10))
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    assert [report.step for report in await rig.steps()] == [3, 4]


EVALUATED = {"data": {"train": "t", "eval": "e", "prompts_per_step": 4}, "eval": {"every": 3, "samples": 3}}


@pytest.mark.parametrize("changes", [{}, EVALUATED], ids=["trained", "evaluated"])
async def test_job_resumes_from_the_final_checkpoint_of_another(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = Rig(tmp_path / "whole", spec(steps=7, **changes))
    first = Rig(tmp_path / "first", spec(steps=5, **changes))
    rig = Rig(tmp_path / "next", spec(steps=7, **changes))
    for each in (whole, first):
        assert (await each.run()).state == "completed"
    found = first.checkpoints.newest()
    assert found is not None
    assert found[0].step == 5
    rig.predecessor = lambda: found
    assert (await rig.run()).state == "completed"
    assert [report.step for report in await rig.steps() if "grad_norm" in report.metrics] == [5, 6]
    assert rig.folder.model == whole.folder.model


@pytest.mark.parametrize("changes", [{}, EVALUATED], ids=["trained", "evaluated"])
async def test_successor_after_the_last_checkpoint_only_exports(tmp_path: Path, changes: dict[str, Any]) -> None:
    rig = Rig(tmp_path, spec(steps=3, **changes))
    exporting, go_on = threading.Event(), threading.Event()
    export = rig.folder.export

    def slowly(shards: Any) -> Path:
        exporting.set()
        go_on.wait(20.0)
        return export(shards)

    rig.folder.export = slowly  # type: ignore[method-assign]
    async with rig.trainer(killed=True):
        await rig.command("create")
        await eventually(exporting.is_set)
        go_on.set()
    published, asked = dict(rig.weights.versions), dict(rig.manager.answered)
    rig.folder.export = export  # type: ignore[method-assign]
    rig.folder.model = []
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    assert [fields["step"] for kind, fields in await rig.events() if kind == "job_resumed"] == [3]
    assert rig.folder.model == published[3]
    assert rig.weights.versions == published
    assert rig.manager.answered == asked


async def test_job_begun_from_another_jobs_checkpoint_resumes_from_its_own(tmp_path: Path) -> None:
    other = Rig(tmp_path / "other")
    await killed_in_step_3(other)
    found = other.checkpoints.newest()
    rig = Rig(tmp_path / "next")

    def once() -> tuple[TrainState, Path]:
        assert found is not None
        rig.predecessor = gone
        return found

    def gone() -> tuple[TrainState, Path]:
        raise ConfigError("it is not there any more")

    rig.predecessor = once
    await killed_in_step_3(rig)
    rig.predecessor = gone
    assert (await rig.resume()).state == "completed"
    assert sorted(rig.weights.versions) == [2, 3, 4, 5]
    assert set(rig.manager.answered.values()) == {1}


async def test_checkpoint_of_another_job_may_be_resumed_with_other_data(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "next")
    rig.predecessor = predecessor(tmp_path, TrainState(1, "7-0", 10_000, "8-0", "of other data"))
    assert (await rig.run()).state == "completed"
    assert [report.step for report in await rig.steps()] == [1, 2, 3, 4]
    assert all(report.metrics["samples/duplicates"] == 0 for report in await rig.steps())


@pytest.mark.parametrize("changes", [{}, EVALUATED], ids=["trained", "evaluated"])
async def test_a_checkpoint_with_nothing_left_to_train_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    rig = Rig(tmp_path / "next", spec(**changes))
    rig.predecessor = predecessor(tmp_path, TrainState(5, START, 10))
    assert "raise steps" in (await rig.run()).error


def predecessor(folder: Path, state: TrainState) -> Callable[[], tuple[TrainState, Path]]:
    (folder / "fake.json").write_text('{"weights": [1, 2, 3, 4], "moment": [0, 0, 0, 0]}')
    return lambda: (state, folder)


def test_a_fingerprint_sees_every_change_of_a_row_and_of_the_order() -> None:
    rows = [(b"\1\0\0\0", b"", {"answer": "4", "n": 1}), (b"\2\0\0\0", b"", {"answer": "5", "n": 2})]
    same = [(b"\1\0\0\0", b"", {"n": 1, "answer": "4"}), rows[1]]
    others = [
        rows[::-1],
        rows[:1],
        [(b"\1\0\0\0", b"", {"answer": "4", "n": 2}), rows[1]],
        [(b"\1\0\0\0\2\0\0\0", b"", rows[0][2]), rows[1]],
        [(b"", b"\1\0\0\0", rows[0][2]), rows[1]],
    ]
    assert fingerprint(rows) == fingerprint(same)
    assert fingerprint(rows) not in [fingerprint(other) for other in others]
