"""The metadata services of three clouds, by which a machine hears that it will be taken away.

All of them are on one link-local address. A call takes at most `LIMIT_S` and never goes through a proxy, which would
ask about its own machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import Any

import httpx

from services.rollout_worker.domain.notices import (
    Advice,
    Notice,
    aws_advice,
    aws_notice,
    aws_token,
    azure_machine,
    azure_notice,
    gcp_notice,
)
from shared.errors import ConfigError, Retryable

LIMIT_S = 2.0
_HIGHEST_PORT = 65535
_UNAUTHORIZED, _NOT_FOUND = 401, 404
_GOOGLE = {"Metadata-Flavor": "Google"}
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_AZURE = {"Metadata": "true"}
_EVENTS = "/metadata/scheduledevents"
_EVENTS_VERSION = {"api-version": "2020-07-01"}


class Metadata:
    """HTTP to this machine's metadata service.

    Args:
        base_url: its address, without a path.
        limit_s: how long a call may take.

    Raises:
        ConfigError: the address is none.

    """

    def __init__(self, base_url: str, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._client = httpx.AsyncClient(base_url=_address(base_url), timeout=limit_s, trust_env=False)

    async def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        also: Collection[int] = (),
    ) -> httpx.Response:
        """Return the answer, whose status is 200 or one of `also`; `body` is sent as JSON.

        Raises:
            Retryable: another status, or no answer within the limit.

        """
        try:
            # httpx limits each part of a call: a body that drips in would take for ever.
            async with asyncio.timeout(self._limit_s):
                answer = await self._client.request(method, path, headers=dict(headers), params=params, json=body)
        except TimeoutError as error:
            raise Retryable(f"{method} {path}: no answer within {self._limit_s:g} s") from error
        except httpx.HTTPError as error:
            raise Retryable(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if answer.status_code != httpx.codes.OK and answer.status_code not in also:
            raise Retryable(f"{method} {path}: status {answer.status_code}")
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _address(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
        host, port = url.host, url.port or 0
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"metadata_url {base_url!r}: {error}; give http://host:port") from error
    if not host or port > _HIGHEST_PORT:
        raise ConfigError(f"metadata_url {base_url!r} names no host, or no possible port; give http://host:port")
    return url


class Aws:
    """Amazon's, version 2: a request shows a session token, which is asked for first and expires."""

    name = "aws"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    async def found(self) -> bool:
        """See `NoticeSource`."""
        try:
            await self._renew()
        except Retryable:
            return False
        return True

    async def ask(self) -> Notice | Advice | None:
        """See `NoticeSource`."""
        action = await self._get("spot/instance-action")
        if action is not None:
            return aws_notice(action, time.time())
        advice = await self._get("events/recommendations/rebalance")
        return None if advice is None else aws_advice(advice)

    async def acknowledge(self, notice: Notice) -> None:
        """See `NoticeSource`: Amazon wants none."""

    async def _get(self, item: str) -> str | None:
        """Return an item; None while there is no such item."""
        if not self._token:
            await self._renew()
        answer = await self._show_token(item, also=(_NOT_FOUND, _UNAUTHORIZED))
        if answer.status_code == _UNAUTHORIZED:
            await self._renew()
            answer = await self._show_token(item, also=(_NOT_FOUND,))
        return None if answer.status_code == _NOT_FOUND else answer.text

    async def _show_token(self, item: str, also: Collection[int]) -> httpx.Response:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return await self._metadata.call("GET", f"/latest/meta-data/{item}", headers, also=also)

    async def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        answer = await self._metadata.call("PUT", "/latest/api/token", headers)
        self._token = aws_token(answer.text)


class Google:
    """Google's, which answers as soon as the value changes, or else after a second."""

    name = "gcp"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._etag = ""
        """Of the value last seen. Without it a request that waits for a change would not see one that came before."""

    async def found(self) -> bool:
        """See `NoticeSource`."""
        try:
            answer = await self._metadata.call("GET", _PREEMPTED, _GOOGLE)
        except Retryable:
            return False
        return bool(answer.headers.get("Metadata-Flavor") == "Google")

    async def ask(self) -> Notice | Advice | None:
        """See `NoticeSource`."""
        waiting = {"wait_for_change": "true", "timeout_sec": "1", "last_etag": self._etag} if self._etag else None
        answer = await self._metadata.call("GET", _PREEMPTED, _GOOGLE, params=waiting)
        notice = gcp_notice(answer.text)
        self._etag = answer.headers.get("ETag", "")
        return notice

    async def acknowledge(self, notice: Notice) -> None:
        """See `NoticeSource`: Google wants none."""


class Azure:
    """Azure's scheduled events. The first request ever of a machine may be answered after minutes only."""

    name = "azure"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._machine = ""

    async def found(self) -> bool:
        """See `NoticeSource`."""
        try:
            await self._who()
        except Retryable:
            return False
        return True

    async def ask(self) -> Notice | Advice | None:
        """See `NoticeSource`."""
        if not self._machine:
            await self._who()
        answer = await self._metadata.call("GET", _EVENTS, _AZURE, params=_EVENTS_VERSION)
        return azure_notice(answer.text, self._machine, time.time())

    async def acknowledge(self, notice: Notice) -> None:
        """See `NoticeSource`: Azure then takes the machine at once, which spares what is left of the lead."""
        body = {"StartRequests": [{"EventId": notice.event_id}]}
        await self._metadata.call("POST", _EVENTS, _AZURE, params=_EVENTS_VERSION, body=body)

    async def _who(self) -> None:
        params = {"api-version": "2021-02-01"}
        answer = await self._metadata.call("GET", "/metadata/instance/compute", _AZURE, params=params)
        self._machine = azure_machine(answer.text)
