"""The load of a vLLM server, from its Prometheus metrics."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rlboost.services.rollout_worker.domain.borrowing import ServingLoad
from rlboost.shared.errors import ConfigError, Retryable
from rlboost.shared.http.clients import async_http_client
from rlboost.shared.proxies import direct

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_FIRST_TOKENS = "vllm:time_to_first_token_seconds_bucket"
_NAMES = (_RUNNING, _WAITING, _FIRST_TOKENS)


class ServingMetrics:
    """`GET /metrics` of one server, never through a proxy.

    Args:
        url: the server's URL, without a path of its API.

    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        self._client = async_http_client(direct)
        self._paths = ["/metrics/", "/metrics"]
        """Where its metrics may be. vLLM 0.32 prints all of them at the second path, which took 20 ms on a CPU, and
        those that are asked for at the first."""

    async def read(self, limit_s: float) -> ServingLoad:
        """Return the present load.

        Raises:
            Retryable: no answer within the limit, or one without the load from a server that has given it before.
            ConfigError: the server answers, and does not have the metrics.

        """
        status = 0
        try:
            async with asyncio.timeout(limit_s):
                for path in self._paths:
                    answer = await self._client.get(self.url + path, params={"name[]": _NAMES}, timeout=limit_s)
                    if answer.is_success and (load := _parse(answer.text)):
                        self._paths = [path]
                        return load
                    status = answer.status_code
        except TimeoutError as error:
            raise Retryable(f"{self.url}/metrics: no answer within {limit_s:g} s") from error
        except httpx.HTTPError as error:
            raise Retryable(f"{self.url}/metrics: {str(error) or type(error).__name__}") from error
        if len(self._paths) == 1 or httpx.codes.is_server_error(status):
            raise Retryable(f"{self.url}/metrics: status {status}, without the server's load")
        raise ConfigError(
            f"RLBOOST_WORKER_BESIDE_URL: {self.url}/metrics answers with status {status} and without "
            f"{', '.join(_NAMES)}: give the URL of a vLLM server that runs without --disable-log-stats"
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _parse(text: str) -> ServingLoad | None:
    """Return the load on a page of metrics, None if it is not there; replicas are added up."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_NAMES))
    sums: dict[str, float] = defaultdict(float)
    first_tokens: dict[float, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(lines + "\n"):
            for sample in family.samples:
                if sample.name == _FIRST_TOKENS:
                    first_tokens[float(sample.labels["le"])] += sample.value
                else:
                    sums[sample.name] += sample.value
    except (ValueError, KeyError):
        return None
    if not first_tokens or _RUNNING not in sums or _WAITING not in sums:
        return None
    return ServingLoad(sums[_RUNNING], sums[_WAITING], dict(first_tokens))
