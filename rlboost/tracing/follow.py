"""Follows a system's streams, and sends the trace of each sample. No service waits for it.

It writes nothing to Redis but a dead letter for an entry that it cannot decode, as every reader does.

Consumes: the token log, committed weights, and the events and scored samples of each job that has not ended.
Produces: traces.
Waits for: the next entries, the collector.
Ends when: the stop is set; then it sends what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import structlog

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.messages import Admitted
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.entries import START, Entry, position
from rlboost.shared.streams.read_size import ReadSize
from rlboost.tracing.samples import SampleTraces, Span

log = structlog.get_logger(__name__)

_BLOCK_S = 0.5
_RETRY_S = 1.0
_MAX_ENTRIES = 2048
"""Maximum number of entries that one read returns of all streams together."""


async def follow(bus: Bus, send: Callable[[Sequence[Span]], int], stop: asyncio.Event) -> None:
    """Follow until the stop.

    Args:
        bus: has the streams.
        send: sends traces, in a thread of its own, and returns how many spans were dropped.
        stop: ends it.

    """
    samples, streams = SampleTraces(), _Streams(bus)
    while not stop.is_set():
        try:
            entries = await streams.read()
        except BusUnavailable as error:
            log.warning("redis_unavailable", error=str(error), during="reading samples")
            await until_stop(stop, _RETRY_S)
            continue
        complete: list[Span] = []
        for entry in entries:
            try:
                complete += samples.take(entry.message, position(entry.id)[0] / 1e3, streams.job_of(entry.stream))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("entry_skipped", stream=entry.stream, entry=entry.id, error=repr(error))
        streams.keep(samples.jobs)
        await _send(send, complete)
    await _send(send, samples.remaining())


async def _send(send: Callable[[Sequence[Span]], int], complete: Sequence[Span]) -> None:
    if complete and (dropped := await asyncio.to_thread(send, complete)):
        log.warning("spans_dropped", spans=dropped, reason="the collector did not take them")


class _Streams:
    """The streams of the system and of its jobs, read as one in the order of their entries' times."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._size = ReadSize(_MAX_ENTRIES)
        self._cursors = {names.TOKEN_LOG: START, names.WEIGHTS_COMMITTED: START}
        self._jobs: dict[str, str] = {}
        """Stream of a job -> the job."""
        self._begun: set[str] = set()
        """Jobs whose first request `read` has returned."""

    def job_of(self, stream: str) -> str:
        """Return the job of a stream; empty for a stream of all jobs."""
        return self._jobs.get(stream, "")

    def keep(self, jobs: Collection[str]) -> None:
        """Read no more streams of jobs that have begun and are not one of these."""
        ended = self._begun.difference(jobs)
        for stream in [stream for stream, job_id in self._jobs.items() if job_id in ended]:
            del self._jobs[stream], self._cursors[stream]
        self._begun -= ended

    async def read(self) -> list[Entry]:
        """Return the next entries; none if none came in time, or if the streams of another job are to be read first."""
        count = max(1, self._size.count // len(self._cursors))
        found = await self._bus.read(self._cursors, count=count, block_s=_BLOCK_S)
        self._size.update(found)
        if unknown := _jobs_of(found).difference(self._jobs.values()):
            for job_id in unknown:
                self._jobs |= dict.fromkeys((names.job_events(job_id), names.job_samples(job_id)), job_id)
            self._cursors |= {stream: START for stream in self._jobs if stream not in self._cursors}
            return []
        by_stream: dict[str, list[Entry]] = {}
        for entry in found:
            by_stream.setdefault(entry.stream, []).append(entry)
        # A stream may have more entries than were read: those of other streams wait that are later than what was read.
        more = [position(entries[-1].id) for entries in by_stream.values() if len(entries) >= count]
        entries = sorted(found, key=lambda entry: position(entry.id))
        if more:
            entries = [entry for entry in entries if position(entry.id) <= min(more)]
        for entry in entries:
            self._cursors[entry.stream] = entry.id
        self._begun |= _jobs_of(entries)
        return entries


def _jobs_of(entries: Sequence[Entry]) -> set[str]:
    return {entry.message.request.job_id for entry in entries if isinstance(entry.message, Admitted)}
