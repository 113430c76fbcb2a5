"""Follows a system's streams, and sends the trace of each sample. It only reads; no service waits for it.

Consumes: the token log, committed weights, and scored samples of each job.
Produces: traces.
Waits for: the next entries, the collector.
Ends when: the stop is set; then it sends what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from rlboost.shared import names
from rlboost.shared.bus import START, Bus, position
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.lifecycle import until_stop
from rlboost.tracing.otlp import OtlpTraces
from rlboost.tracing.samples import SampleTraces, Span

log = structlog.get_logger(__name__)

_BLOCK_S = 0.5
_RETRY_S = 1.0


async def follow(bus: Bus, traces: OtlpTraces, stop: asyncio.Event) -> None:
    """Follow until the stop."""
    samples = SampleTraces()
    cursors = {names.TOKEN_LOG: START, names.WEIGHTS_COMMITTED: START}
    while not stop.is_set():
        for job_id in samples.jobs:
            cursors.setdefault(names.job_samples(job_id), START)
        try:
            entries = await bus.read(cursors, block_s=_BLOCK_S)
        except BusUnavailable as error:
            log.warning("redis_unavailable", error=str(error), during="reading samples")
            await until_stop(stop, _RETRY_S)
            continue
        complete: list[Span] = []
        for entry in sorted(entries, key=lambda entry: position(entry.id)):
            cursors[entry.stream] = entry.id
            complete += samples.take(entry.message, position(entry.id)[0] / 1e3)
        await _send(traces, complete)
    await _send(traces, samples.remaining())


async def _send(traces: OtlpTraces, complete: Sequence[Span]) -> None:
    if complete and (dropped := await asyncio.to_thread(traces.send, complete)):
        log.warning("spans_dropped", spans=dropped, reason="the collector did not take them")
