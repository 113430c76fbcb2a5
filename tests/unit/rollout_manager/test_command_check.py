"""A worker whose commands were lost in Redis is detected, and its samples are generated all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.measurements import MIN_HEARTBEATS, CommandCheck
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_worker.domain.session import Session
from rlboost.shared.messages import (
    Assign,
    Assignment,
    Release,
    Resume,
    Revoke,
    SampleFinished,
    Sampling,
    Suspend,
    UseVersion,
)
from rlboost.shared.messages.command_digest import command_digest
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Trim, after
from rlboost.shared.wire import I32, U32, U64, ints, pack
from tests.support.builders import group_requested, job_created, job_running
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker, check_completion
from tests.support.stream_entries import read_all

LEASE_S = 2.0
SETTLE_S = 1.0


# --- the rule ---------------------------------------------------------------------------------------------------------


def observed(*differences: int, every_s: float = 0.5) -> bool:
    check = CommandCheck()
    for number, difference in enumerate(differences):
        check.observe(difference, 0, START, number * every_s)
    return check.is_mismatched(SETTLE_S)


@pytest.mark.parametrize(
    ("differences", "mismatched"),
    [
        ([7, 7, 7], True),
        ([7, 7], False),
        ([7, 8, 9, 10, 11], False),
        ([7, 8, 7, 9, 7], True),
        ([7, 7, 0, 7, 7], False),
        ([7, 7, 7, 0], False),
        ([7, 7, 7, 8], False),
    ],
)
def test_same_difference_counts_once_seen_for_a_while(differences: list[int], mismatched: bool) -> None:
    assert observed(*differences) is mismatched


def test_difference_of_a_moment_does_not_count() -> None:
    assert not observed(*[7] * MIN_HEARTBEATS, every_s=SETTLE_S / 10)


def test_difference_of_digests_is_of_what_only_one_contains() -> None:
    both = command_digest([1, 2, 3], [1, 1, 4], ("j", 0), suspended=False)
    one = command_digest([3, 1], [4, 1], ("j", 0), suspended=False)
    other = command_digest([2], [1], None, suspended=False)
    assert (both - one - other) % (1 << 64) == 0
    assert both != command_digest([1, 2, 3], [1, 2, 4], ("j", 0), suspended=False)


def assign(*samples: int, attempt: int = 1) -> Assign:
    sampling = Sampling(max_tokens=4)
    assignments = [
        Assignment(sample=i, attempt=attempt, prompt=b"", tokens=b"", sampling=sampling, seed=0) for i in samples
    ]
    return Assign(job_id="j", version=0, samples=assignments)


def test_session_digest_follows_its_commands() -> None:
    session = Session("w")
    columns = {"samples": pack([2], U64), "attempts": pack([1], U32)}
    steps = [
        (UseVersion(job_id="j", version=0), [], False),
        (assign(1, 2, 3), [1, 2, 3], False),
        (Revoke(**columns), [1, 3], False),
        (Suspend(step=0), [], True),
        (Resume(step=0), [], False),
        (assign(2, attempt=2), [2], False),
        (Release(**columns | {"attempts": pack([2], U32)}), [], False),
    ]
    for command, held, suspended in steps:
        session.on_command(command)
        attempts = [session.held[i] for i in held]
        assert session.command_digest() == command_digest(held, attempts, ("j", 0), suspended=suspended), command.tag


# --- manager and worker -----------------------------------------------------------------------------------------------


class Site:
    """A manager and a worker on one bus."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        clock: Callable[[], Now] = lambda: Now(self.clock, self.clock)  # noqa: E731 - it is one
        self.manager = Manager(self.bus, lease_s=LEASE_S, redis_limit_s=9.0, clock=clock)
        self.workers = [SimWorker(self.bus, "w1", lease_s=LEASE_S)]
        self.dismissals = 0

    async def start(self) -> None:
        _, running, committed = job_running()
        await self.bus.append(names.JOB_COMMANDS, job_created())
        await self.bus.append(names.JOB_REPORTS, running)
        await self.bus.append(names.WEIGHTS_COMMITTED, committed)
        assert await self.manager.try_lead()
        await self.workers[0].join()
        await self.manager.turn()

    async def request(self, number: int, n: int = 2) -> None:
        await self.bus.append(names.rollouts_requested("j"), group_requested(number, n=n, max_tokens=4))

    async def moment(self, *, reads: bool = True) -> None:
        """One heartbeat interval."""
        self.clock += LEASE_S / 4
        for worker in list(self.workers):
            if reads:
                await worker.execute_commands()
            if worker.dismissed:
                self.dismissals += 1
                self.workers = [SimWorker(self.bus, f"w{self.dismissals + 1}", lease_s=LEASE_S)]
                await self.workers[0].join()
                continue
            await worker.send_heartbeat()
            worker.generate()
            await worker.flush()
        await self.manager.turn()

    async def delivered(self) -> dict[int, SampleFinished]:
        """Return the finished samples: each once, and each token the continuation of the tokens before it."""
        messages = [entry.message for entry in await read_all(self.bus, names.rollouts_finished("j"))]
        finished = [message for message in messages if isinstance(message, SampleFinished)]
        by_id = {message.sample: message for message in finished}
        assert len(by_id) == len(finished)
        for message in finished:
            check_completion(ints(message.tokens, I32), message.spans)
        return by_id

    async def lose(self, *, whole_stream: bool) -> None:
        """Redis restarts without the worker's unread commands, or without all of them."""
        stream = names.worker_commands(self.workers[0].id)
        entries = await read_all(self.bus, stream)
        unread = [entry for entry in entries if entry.id not in (START, self.workers[0].cursor)]
        assert any(isinstance(entry.message, Assign) for entry in unread)
        await self.bus.transact([Trim(stream, after(entries[-1].id))])
        if whole_stream:
            cast("dict[str, Any]", self.bus._streams).pop(stream)
            self.workers[0].cursor = START  # ids of Redis are times: new ones are larger than lost ones


@pytest.mark.parametrize("whole_stream", [False, True])
async def test_samples_of_a_lost_assignment_are_generated_once(whole_stream: bool) -> None:
    site = Site()
    await site.start()
    await site.moment()
    await site.moment()
    await site.request(0)
    await site.manager.turn()
    await site.lose(whole_stream=whole_stream)
    await site.request(1)
    for _ in range(MIN_HEARTBEATS + 9):
        await site.moment()
    assert site.dismissals == 1
    assert len(await site.delivered()) == 4
    assert not site.manager.world.ledger.samples


async def test_lost_weight_command_is_repeated() -> None:
    site = Site()
    await site.start()
    commands = names.worker_commands("w1")
    await site.bus.transact([Trim(commands, after((await read_all(site.bus, commands))[-1].id))])
    await site.request(0)
    for _ in range(MIN_HEARTBEATS + 12):
        await site.moment()
    assert site.dismissals == 1
    assert len(await site.delivered()) == 2


async def test_loss_is_noticed_while_other_samples_come_and_go() -> None:
    site = Site()
    await site.start()
    await site.moment()
    await site.moment()
    await site.request(0, n=1)
    await site.manager.turn()
    await site.lose(whole_stream=False)
    for number in range(1, 9):  # every moment one begins, ends or generates
        await site.request(number, n=1)
        await site.moment()
        assert site.manager.world.ledger.samples
        await site.moment()
    assert site.dismissals == 1
    for _ in range(12):
        await site.moment()
    assert len(await site.delivered()) == 9


async def test_worker_that_reads_slowly_is_not_dismissed() -> None:
    site = Site()
    await site.start()
    await site.moment()
    await site.moment()
    await site.request(0)
    for _ in range(20):
        await site.moment(reads=False)
    for _ in range(8):
        await site.moment()
    assert site.dismissals == 0
    assert len(await site.delivered()) == 2
