"""Where notices of preemption come from: a file, or the metadata service of a cloud, which also names the region."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import httpx

from rlboost.services.rollout_worker.domain.preemption import (
    Notice,
    RebalanceRecommendation,
    aws_notice,
    aws_rebalance_recommendation,
    aws_region,
    aws_token,
    azure_machine,
    azure_notice,
    azure_region,
    file_notice,
    gcp_notice,
    gcp_region,
)
from rlboost.shared.errors import ConfigError, Retryable
from rlboost.shared.http.clients import async_http_client
from rlboost.shared.process.waiting import retry_while
from rlboost.shared.proxies import direct

# --- Preemption notices by a local file, for schedulers that can write a file and nothing else ------------------------


_MAX_CHARS = 64
"""Characters: enough for a number."""


class NoticeFile:
    """`NoticeSource` of a local file. Checking it takes microseconds, so it happens in the event loop."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path

    async def is_available(self) -> bool:
        """Return True: the file is polled wherever it is configured."""
        return True

    async def poll(self) -> Notice | RebalanceRecommendation | None:
        try:
            content = _read(self._path)
        except OSError as error:
            raise Retryable(f"cannot check {self._path}: {error.strerror}") from error
        return None if content is None else file_notice(str(self._path), content)

    async def acknowledge(self, notice: Notice) -> None:
        """Do nothing: a file needs no acknowledgment."""


def _read(path: Path) -> str | None:
    """Return the start of the file, empty if it cannot be read; None if it does not exist."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        return ""
    try:
        with path.open(errors="replace") as file:
            return file.read(_MAX_CHARS)
    except OSError:
        return ""


# --- Preemption notices from the metadata services of three clouds ----------------------------------------------------
# All use the same link-local address. A call takes at most `LIMIT_S` and never goes through a proxy, whose answer would
# be about the proxy's machine.


LIMIT_S = 2.0
_HIGHEST_PORT = 65535
_UNAUTHORIZED, _NOT_FOUND = 401, 404
_GOOGLE = {"Metadata-Flavor": "Google"}
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_ZONE = "/computeMetadata/v1/instance/zone"
_AZURE = {"Metadata": "true"}
_EVENTS = "/metadata/scheduledevents"
_EVENTS_VERSION = {"api-version": "2020-07-01"}


class Metadata:
    """HTTP to this machine's metadata service.

    Args:
        base_url: address of the metadata server, without a path.
        limit_s: time limit of a call.

    Raises:
        ConfigError: the URL is invalid.

    """

    def __init__(self, base_url: str, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._client = async_http_client(direct, base_url=_address(base_url), timeout=limit_s)

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
            # httpx limits each phase of a call: a slow body would have no limit.
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
        raise ConfigError(f"metadata_url {base_url!r} has no host or an invalid port; give http://host:port")
    return url


class Aws:
    """`NoticeSource` of Amazon's metadata service, version 2: requests carry a session token, which expires."""

    name = "aws"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    async def is_available(self) -> bool:
        try:
            await self._renew()
        except Retryable:
            return False
        return True

    async def poll(self) -> Notice | RebalanceRecommendation | None:
        action = await self._get("spot/instance-action")
        if action is not None:
            return aws_notice(action, time.time())
        advice = await self._get("events/recommendations/rebalance")
        return None if advice is None else aws_rebalance_recommendation(advice)

    async def acknowledge(self, notice: Notice) -> None:
        """Do nothing: Amazon expects no acknowledgment."""

    async def region(self) -> str:
        """Return this machine's region."""
        return aws_region(await self._get("placement/region") or "")

    async def _get(self, item: str) -> str | None:
        """Return an item; None if it does not exist."""
        if not self._token:
            await self._renew()
        answer = await self._get_with_token(item, also=(_NOT_FOUND, _UNAUTHORIZED))
        if answer.status_code == _UNAUTHORIZED:
            await self._renew()
            answer = await self._get_with_token(item, also=(_NOT_FOUND,))
        return None if answer.status_code == _NOT_FOUND else answer.text

    async def _get_with_token(self, item: str, also: Collection[int]) -> httpx.Response:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return await self._metadata.call("GET", f"/latest/meta-data/{item}", headers, also=also)

    async def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        answer = await self._metadata.call("PUT", "/latest/api/token", headers)
        self._token = aws_token(answer.text)


class Google:
    """`NoticeSource` of Google's metadata service: answers when the value changes, or after a second."""

    name = "gcp"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._etag = ""
        """ETag of the last value. Without it, a request that waits for a change would miss an earlier one."""

    async def is_available(self) -> bool:
        try:
            answer = await self._metadata.call("GET", _PREEMPTED, _GOOGLE)
        except Retryable:
            return False
        return bool(answer.headers.get("Metadata-Flavor") == "Google")

    async def poll(self) -> Notice | RebalanceRecommendation | None:
        waiting = {"wait_for_change": "true", "timeout_sec": "1", "last_etag": self._etag} if self._etag else None
        answer = await self._metadata.call("GET", _PREEMPTED, _GOOGLE, params=waiting)
        notice = gcp_notice(answer.text)
        self._etag = answer.headers.get("ETag", "")
        return notice

    async def acknowledge(self, notice: Notice) -> None:
        """Do nothing: Google expects no acknowledgment."""

    async def region(self) -> str:
        """Return this machine's region."""
        return gcp_region((await self._metadata.call("GET", _ZONE, _GOOGLE)).text)


class Azure:
    """`NoticeSource` of Azure's scheduled events. The first request of a machine may take minutes to be answered."""

    name = "azure"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._machine = ""

    async def is_available(self) -> bool:
        try:
            await self._find_machine()
        except Retryable:
            return False
        return True

    async def poll(self) -> Notice | RebalanceRecommendation | None:
        if not self._machine:
            await self._find_machine()
        answer = await self._metadata.call("GET", _EVENTS, _AZURE, params=_EVENTS_VERSION)
        return azure_notice(answer.text, self._machine, time.time())

    async def acknowledge(self, notice: Notice) -> None:
        """See `NoticeSource`: Azure then reclaims the machine at once, before the lead time has passed."""
        body = {"StartRequests": [{"EventId": notice.event_id}]}
        await self._metadata.call("POST", _EVENTS, _AZURE, params=_EVENTS_VERSION, body=body)

    async def region(self) -> str:
        """Return this machine's region."""
        return azure_region(await self._compute())

    async def _find_machine(self) -> None:
        self._machine = azure_machine(await self._compute())

    async def _compute(self) -> str:
        params = {"api-version": "2021-02-01"}
        return (await self._metadata.call("GET", "/metadata/instance/compute", _AZURE, params=params)).text


# --- The site of a worker ---------------------------------------------------------------------------------------------


_SITE_LIMIT_S = 10.0


async def site_of(setting: str, metadata: Metadata, limit_s: float = _SITE_LIMIT_S) -> str:
    """Return the site that a setting names: for `auto` the region of the cloud that this machine is in.

    Raises:
        ConfigError: no metadata service says which.

    """
    if setting != "auto":
        return setting

    async def first() -> str:
        asked = [cloud.region() for cloud in (Aws(metadata), Google(metadata), Azure(metadata))]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if found := [answer for answer in answers if isinstance(answer, str)]:
            return found[0]
        raise Retryable("; ".join(map(str, answers)))

    try:
        return await retry_while(Retryable, first, limit_s=limit_s)
    except Retryable as error:
        raise ConfigError(
            "RLBOOST_WORKER_SITE is auto, and no cloud's metadata service names a region: set it to a name for "
            f"this machine's place, or leave it empty if the weight store is there too ({error})"
        ) from error
