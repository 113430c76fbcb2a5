"""Sends this process's log lines to the logs of jobs. Workers send theirs through the manager (`WorkerLog`).

Consumes: the lines in `logs.BUFFER`; those that concern no job are dropped.
Produces: entries of `names.job_logs`.
Waits for: a second between two transactions.
Ends when: the service stops. Best effort: lines of a transaction that Redis did not answer are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.messages import ENDED_JOB_RETENTION_S, Event
from rlboost.shared.process.lifecycle import Loop, until_stop
from rlboost.shared.process.logs import BUFFER, LogBuffer
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Bus, Expire, Op

SEND_EVERY_S = 1.0
MAX_LINES = 10_000
"""The newest lines of a job that are retained, for `ENDED_JOB_RETENTION_S` after the last one."""


def log_ops(job_id: str, source: str, lines: Iterable[tuple[float, str]]) -> list[Op]:
    """Return the operations that append lines, each a time and a text, to the log of a job."""
    stream = names.job_logs(job_id)
    ops: list[Op] = [
        Append(stream, Event(kind="log", at=at, source=source, fields={"text": text}), MAX_LINES) for at, text in lines
    ]
    return [*ops, Expire(stream, ENDED_JOB_RETENTION_S)]


def log_sender(bus: Bus, source: str, jobs: Callable[[], Collection[str]], buffer: LogBuffer = BUFFER) -> Loop:
    """Return a loop that sends lines until the stop.

    Args:
        bus: the broker.
        source: shown in front of each line.
        jobs: returns the jobs that a line which names none concerns.
        buffer: holds lines until they are sent.

    """

    async def send() -> None:
        lines: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for line in buffer.take():
            for job_id in [line.job] if line.job else jobs():
                lines[job_id].append((line.at, line.text))
        ops = [op for job_id, of_job in lines.items() for op in log_ops(job_id, source, of_job)]
        with contextlib.suppress(BusUnavailable):  # logging it here would be a line to send
            await bus.transact(ops)

    async def loop(stop: asyncio.Event) -> None:
        while not await until_stop(stop, SEND_EVERY_S):
            await send()
        await send()

    return loop
