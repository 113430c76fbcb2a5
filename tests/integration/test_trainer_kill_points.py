"""A trainer killed by SIGKILL at every point of its protocol ends where an undisturbed one does, to the last bit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pytest

from rlboost.shared.ids import SampleId
from rlboost.shared.messages import StepReport
from rlboost.shared.variables import KILLED_ON_REQUEST, LAST_EXIT
from rlboost.verify import check, compare
from tests.support.fork_server import popen_module
from tests.support.model_folder import write_model, write_tokenizer
from tests.support.mortal_trainer import POINTS
from tests.support.s3_server import S3Server
from tests.support.trainer_site import Machine, Site

pytestmark = pytest.mark.timeout(300)

LIVES = (
    ("requested", 0),
    ("stepped", 0),
    ("uploading", 0),
    ("uploaded", 0),
    ("committed", 0),
    ("resampled", 1),
    ("logged", 1),
    ("reported", 1),
    ("captured", 2),
    ("written", 2),
    ("half-written", 2),
    ("kept", 2),
    ("trimmed", -1),
    ("exporting", -1),
)
"""Each life begins where the one before has left off, and so goes on from there to its own end."""
LIFE_LIMIT_S = 40.0
T = TypeVar("T")
STEPS = 7
JOB: dict[str, Any] = {
    "steps": STEPS,
    "trainer": {"checkpoint_every": 2, "micro_batch_tokens": 128},
    "eval": {"every": 3, "samples": 5},
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Redis and a weight store; the trainers are forked elsewhere."""
    try:
        machine = Machine(tmp_path_factory.mktemp("machine"))
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    machine.redis.start()
    try:
        machine.store.start()
        yield machine
    finally:
        machine.store.kill()
        machine.redis.stop()


@pytest.fixture
async def site(machine: Machine, tmp_path: Path) -> AsyncIterator[Site]:
    write_tokenizer(write_model(tmp_path / "model"))
    for name, n in (("train", 10), ("eval", 3)):
        rows = [{"prompt": f"t{5 + i} t{20 + i}", "row": i} for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    site = Site(machine, tmp_path)
    yield site
    await site.bus.close()


class Lives:
    """Trainers, one after the other."""

    def __init__(self, lines: BinaryIO, answers: asyncio.StreamReader) -> None:
        self._lines = lines
        self._answers = answers
        self._pid = 0
        self._life = "no life"

    async def begin(self, point: str = "", step: int = -1) -> None:
        self._life = f"the life until {point} of step {step}" if point else "the life to the end"
        self._lines.write(f"{point} {step}\n".encode())
        self._pid = await self._number("begin")

    async def end(self) -> int:
        return await self._number("end")

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGTERM)

    async def _number(self, to: str) -> int:
        return int(await self.within_limit(self._answers.readline(), to))

    async def within_limit(self, wait: Awaitable[T], to: str) -> T:
        try:
            async with asyncio.timeout(LIFE_LIMIT_S):
                return await wait
        except TimeoutError:
            raise AssertionError(f"{self._life} did not {to} within {LIFE_LIMIT_S:g} s") from None


@pytest.fixture
async def lives(machine: Machine, s3_server: S3Server) -> AsyncIterator[Lives]:
    env = machine.trainer.env | s3_server.env | {"RLBOOST_TRAINER_PORT": "0", LAST_EXIT: KILLED_ON_REQUEST}
    (its_lines, lines), (answers, its_answers) = os.pipe(), os.pipe()
    with (
        (machine.folder / "trainers.log").open("ab") as log,
        os.fdopen(its_lines, "rb") as stdin,
        os.fdopen(its_answers, "wb") as stdout,
    ):
        fds = {"stdin": stdin.fileno(), "stdout": stdout.fileno(), "stderr": log.fileno()}
        process = popen_module("tests.support.mortal_trainer", env, **fds)
    answered = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(answered), os.fdopen(answers, "rb")
    )
    with os.fdopen(lines, "wb", buffering=0) as writing:
        try:
            yield Lives(writing, answered)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            transport.close()


async def live_to_the_end(site: Site, lives: Lives, job_id: str) -> None:
    await lives.begin()
    report = await lives.within_limit(site.ended(job_id), f"complete {job_id}")
    assert report.state == "completed", report.error
    lives.stop()
    assert await lives.end() == 0


def rows(site: Site, job_id: str) -> list[dict[str, Any]]:
    """Return the run log without what a clock has measured."""
    lines = (site.folder / "runs" / job_id / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if not timed(name)} for line in lines]


def timed(metric: str) -> bool:
    return metric.startswith(("time/", "perf/"))


async def test_trainer_killed_at_every_point_reaches_the_same_bits(site: Site, lives: Lives) -> None:
    # No step has two groups that are followed: which follower came first would hang on the clock, and so the order in
    # which two undisturbed trainers train on them, too.
    job = JOB | {
        "algorithm": {"group_size": 3, "updates_per_step": 2, "resample": 2},
        "reward": {"function": "tests.support.reward_functions:lengths_but_in_row_8"},
    }
    async with site.manager("undisturbed") as steady:
        await site.create("undisturbed", **job)
        await live_to_the_end(site, lives, "undisturbed")
    async with site.manager("killed") as manager:
        await site.create("killed", **job)
        for point, step in LIVES:
            await lives.begin(point, step)
            assert await lives.end() == -signal.SIGKILL, f"it did not come to {point} of step {step}"
            await site.expire_lease("killed")
        await live_to_the_end(site, lives, "killed")
    assert site.model("killed") == site.model("undisturbed")
    assert rows(site, "killed") == rows(site, "undisturbed")
    killed, undisturbed = (check(site.folder / "runs" / name) for name in ("killed", "undisturbed"))
    assert killed.problems == undisturbed.problems == []
    assert len(killed.starts) == len(LIVES) + 1
    assert killed.n_repeated
    assert not killed.changed
    assert not compare(killed, undisturbed).differences
    assert [row.get("groups/resampled") for row in rows(site, "killed")] == [0, 1, 0, 1, 0, 0, 1, None]
    assert manager.answered == steady.answered, "not one sample was generated twice"
    assert {r.group: r.seed for r in manager.requests} == {r.group: r.seed for r in steady.requests}
    assert "weights_restored" not in [kind for kind, _ in await site.events("killed")], "trained again to the same bits"
    reported = {report.step for report in await site.reports("killed") if isinstance(report, StepReport)}
    assert reported == set(range(STEPS + 1))
    kept = sorted(path.name for path in (site.folder / "runs/killed/checkpoints").iterdir())
    assert kept == ["step-000006", "step-000007"]


async def test_dropout_draws_are_the_same_after_a_kill(site: Site, lives: Lives) -> None:
    """An adapter's dropout draws in each step."""
    job = JOB | {"steps": 4, "eval": None, "elastic": {"weights": "lora"}, "lora": {"dropout": 0.5}}
    async with site.manager("adapter"):
        await site.create("adapter", **job)
        await live_to_the_end(site, lives, "adapter")
    async with site.manager("adapter-killed"):
        await site.create("adapter-killed", **job)
        await lives.begin("captured", 4)  # the checkpoint of step 2 is durable by then
        assert await lives.end() == -signal.SIGKILL
        await site.expire_lease("adapter-killed")
        await live_to_the_end(site, lives, "adapter-killed")
    assert site.model("adapter-killed") == site.model("adapter")
    assert [fields["step"] for kind, fields in await site.events("adapter-killed") if kind == "job_resumed"] == [2]


async def test_job_resumes_from_the_object_store_elsewhere_and_in_another_job(
    site: Site, lives: Lives, s3_url: str
) -> None:
    rates = {"optimizer": {"lr": 1e-3}, "eval": None, "steps": 6}
    trainer = {**JOB["trainer"], "checkpoints": s3_url}
    async with site.manager("whole"):
        await site.create("whole", **(JOB | rates))
        await live_to_the_end(site, lives, "whole")
    async with site.manager("moved"):
        await site.create("moved", **(JOB | rates | {"trainer": trainer}))
        await lives.begin("captured", 4)  # the checkpoint of step 2 is durable by then
        assert await lives.end() == -signal.SIGKILL
        await site.expire_lease("moved")
        shutil.rmtree(site.folder / "runs/moved")  # another machine has an empty disk
        await live_to_the_end(site, lives, "moved")
    assert site.model("moved") == site.model("whole")
    assert [fields["step"] for kind, fields in await site.events("moved") if kind == "job_resumed"] == [2]
    async with site.manager("continued") as manager:
        await site.create(
            "continued", **(JOB | rates | {"trainer": trainer | {"resume": f"{s3_url}/moved/step-000004"}})
        )
        await live_to_the_end(site, lives, "continued")
    assert {SampleId.unpack(request.group).step for request in manager.requests} == {4, 5}
    assert site.model("continued") == site.model("whole")


def test_no_point_is_left_out() -> None:
    assert {point for point, _ in LIVES} == set(POINTS)
