"""The load of a serving engine, read over HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator

import pytest

from rlboost.services.rollout_worker.adapters.serving_metrics import ServingMetrics
from rlboost.services.rollout_worker.domain.borrowing import ServingLoad
from rlboost.shared.errors import ConfigError, Retryable
from tests.support.ports import reserved_port
from tests.support.serving_engine import ServingEngine, serving_engine

LIMIT_S = 30.0


@pytest.fixture
def served() -> Iterator[tuple[ServingEngine, str]]:
    with serving_engine() as served:
        yield served


@pytest.fixture
async def metrics(served: tuple[ServingEngine, str]) -> AsyncIterator[ServingMetrics]:
    metrics = ServingMetrics(served[1])
    yield metrics
    await metrics.close()


async def test_load_is_the_sum_over_replicas(served: tuple[ServingEngine, str], metrics: ServingMetrics) -> None:
    engine = served[0]
    engine.set(running=3, waiting=2)
    for seconds in (0.005, 0.05, 5.0):
        engine.first_token.observe(seconds)
    load = await metrics.read(LIMIT_S)
    assert load == ServingLoad(3, 2, {0.01: 1, 0.1: 2, 1.0: 2, math.inf: 3})
    assert load.n_first_tokens == 3


async def test_server_prints_only_what_is_read(served: tuple[ServingEngine, str], metrics: ServingMetrics) -> None:
    await metrics.read(LIMIT_S)
    page = served[0].page(served[0].asked[-1]).decode()
    assert "vllm:num_requests_running" in page
    assert "by_reason" not in page
    assert "_sum" not in page


async def test_server_that_prints_everything_is_understood(
    served: tuple[ServingEngine, str], metrics: ServingMetrics
) -> None:
    served[0].paths = {"/metrics"}
    assert b"by_reason" in served[0].page([])
    assert await metrics.read(LIMIT_S) == ServingLoad(0, 0, {0.01: 0, 0.1: 0, 1.0: 0, math.inf: 0})


@pytest.mark.parametrize("suffix", ["/", "/metrics", "/v1", "/v1/"])
async def test_url_of_the_api_or_of_the_metrics_will_do(served: tuple[ServingEngine, str], suffix: str) -> None:
    metrics = ServingMetrics(served[1] + suffix)
    assert (await metrics.read(LIMIT_S)).running == 0
    await metrics.close()


@pytest.mark.parametrize("page", [b"<html>hello</html>", b"", b"vllm:num_requests_running{ 1\n", b"up 1\n"])
async def test_server_without_the_metrics_is_refused_by_name(
    served: tuple[ServingEngine, str], metrics: ServingMetrics, monkeypatch: pytest.MonkeyPatch, page: bytes
) -> None:
    monkeypatch.setattr(served[0], "page", lambda _: page)
    with pytest.raises(ConfigError, match=r"RLBOOST_WORKER_BESIDE_URL.*give the URL of a vLLM server"):
        await metrics.read(LIMIT_S)


async def test_server_without_a_metrics_route_is_refused(
    served: tuple[ServingEngine, str], metrics: ServingMetrics
) -> None:
    served[0].status = 404
    with pytest.raises(ConfigError, match="status 404"):
        await metrics.read(LIMIT_S)


@pytest.mark.parametrize("status", [404, 503])
async def test_server_that_was_understood_before_is_unavailable(
    served: tuple[ServingEngine, str], metrics: ServingMetrics, status: int
) -> None:
    await metrics.read(LIMIT_S)
    served[0].status = status
    with pytest.raises(Retryable, match=f"status {status}"):
        await metrics.read(LIMIT_S)


async def test_late_answer_is_none(served: tuple[ServingEngine, str], metrics: ServingMetrics) -> None:
    served[0].may_answer.clear()
    with pytest.raises(Retryable, match=r"no answer within 0\.1 s|timed out|Timeout"):
        await metrics.read(0.1)
    served[0].may_answer.set()
    assert (await metrics.read(LIMIT_S)).running == 0


async def test_absent_server_is_unavailable() -> None:
    with reserved_port() as port:
        metrics = ServingMetrics(f"http://127.0.0.1:{port}")
        with pytest.raises(Retryable):
            await metrics.read(LIMIT_S)
        await metrics.close()
