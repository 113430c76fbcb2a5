"""The worker's HTTP: health and Prometheus metrics. Nobody needs to reach it for the worker to work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from fastapi import APIRouter, Depends, FastAPI
from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

from services.rollout_worker.domain.notices import Notice
from services.rollout_worker.generator import Generator
from services.rollout_worker.link import Link
from shared.http import bearer, create_app
from shared.messages import WorkerState
from shared.waiting import Waits


class Metrics(Collector):
    """What a scrape sees: read off the worker at that moment, so nothing is counted twice."""

    def __init__(self, link: Link, generator: Generator) -> None:
        self._link = link
        self._generator = generator

    def describe(self) -> list[Metric]:
        """Return nothing: to register must not mean to scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        session, stats, flushes = self._link.me.session, self._generator.stats(), self._link.flushes
        yield CounterMetricFamily(
            "rlboost_worker_tokens", "Completion tokens made by the engine.", stats.tokens_made_total
        )
        yield _gauge("tokens_per_second", "Completion tokens a second, lately.", self._link.tokens_per_s)
        yield _gauge("running", "Samples that take part in each decode step.", stats.running)
        yield _gauge("pending", "Samples that wait for a slot or for their weights.", stats.pending + session.early)
        version = session.serving[1] if session.serving else -1
        yield _gauge("weight_version", "Version of the weights served; -1 before the first.", version)
        yield _gauge("unsent_bytes", "Tokens that the log does not have yet.", self._link.me.outbox.unsent_bytes)
        memory = self._link.memory
        yield _gauge("resident_bytes", "Memory of this process.", memory.resident_bytes)
        yield _gauge("device_used_bytes", "Memory in use on the engine's device.", memory.device_used_bytes)
        yield _gauge("device_total_bytes", "Memory of the engine's device.", memory.device_total_bytes)
        yield SummaryMetricFamily(
            "rlboost_worker_flush_seconds", "From the engine to Redis's answer.", flushes.count, flushes.sum_s
        )
        states = GaugeMetricFamily("rlboost_worker_state", "1 for the state the worker is in.", labels=["state"])
        for state in get_args(WorkerState):
            states.add_metric([state], float(state == session.state))
        yield states


class Prefetched(Collector):
    """The bytes of weights that were received before their version was committed."""

    def __init__(self, n_bytes: Callable[[], int]) -> None:
        self._n_bytes = n_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        yield CounterMetricFamily(
            "rlboost_worker_weights_prefetched_bytes", "Bytes of weights received before a commit.", self._n_bytes()
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rlboost_worker_{name}", text, value)


def create(link: Link, generator: Generator, *, token: str, waits: Waits) -> FastAPI:
    """Return the app; its metrics are in the process's registry.

    Ready means that it has joined, and has loaded and verified weights as soon as a job asks for any.
    """

    def missing() -> str | None:
        session = link.me.session
        idle = session.wanted is None
        return None if idle or session.serving else f"verified weights; the worker is {session.state}"

    REGISTRY.register(Metrics(link, generator))
    return create_app("RLBoost rollout worker", token=token, ready=missing, waits=waits)


class NoticeBody(BaseModel):
    """What whoever knows it says of this machine."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    lead_s: float | None = Field(None, ge=0, description="seconds until the machine is gone; null = not known")
    reason: str = Field("rest", min_length=1, max_length=200, description="shown in events and logs")


def notice_routes(take: Callable[[Notice], None], token: str) -> APIRouter:
    """Return `POST /v1/notice`, by which anybody with the token can say that the machine will be taken away."""
    router = APIRouter(dependencies=[Depends(bearer(token))], tags=["notices"])

    @router.post("/v1/notice", status_code=202)
    async def notice(body: NoticeBody) -> NoticeBody:
        """Have the worker hand off and leave. Repeating it changes nothing."""
        take(Notice(body.reason, body.lead_s))
        return body

    return router
