"""The weight store as its users see it: one method a route, one attempt a call, aiohttp's errors as ours."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import stamina

from shared.errors import ConfigError, Conflict, Corrupt, Fatal, NotFound, StoreUnavailable, Undecodable
from shared.weights.drafts import DraftNews, DraftPart
from shared.weights.edges import Route, VersionEdges
from shared.weights.manifest import ChunkRef, Manifest, Part, digest_of
from shared.weights.wire import ChunkList, CommitRequest, MissingChunks, ModelInfo, ModelList, VersionInfo

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=30.0)
_JSON = {"Content-Type": "application/json"}
_SLICE_BYTES = 1 << 20


class _Answer(NamedTuple):
    body: bytes
    etag: str


class StoreClient:
    """HTTP client of one weight store.

    Every request is idempotent, so every method may be called again after `StoreUnavailable`. Besides it they raise
    `NotFound`, `Conflict`, `ConfigError` (URL or token) and `Fatal` (what the store refuses for good, such as bytes
    that do not fit on its disk).
    """

    def __init__(self, url: str, token: str) -> None:
        """Prepare connections; nothing is dialled yet.

        Raises:
            ConfigError: the URL or the token cannot be one.

        """
        self.url = url.rstrip("/")
        if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", token):
            raise ConfigError("the token is empty or not plain text: set RLBOOST_TOKEN to the weight store's token")
        _check_url(self.url)
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def head(self, job_id: str) -> VersionInfo | None:
        """Return the newest committed version, None before the first."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}/head")
        except NotFound:
            return None
        return VersionInfo.model_validate_json(answer.body)

    async def models(self) -> ModelList:
        """Return all jobs' versions."""
        return ModelList.model_validate_json((await self._request("GET", "/v1/models")).body)

    async def model(self, job_id: str) -> ModelInfo | None:
        """Return the versions that are kept, None before the first."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}")
        except NotFound:
            return None
        return ModelInfo.model_validate_json(answer.body)

    async def manifest(self, job_id: str, version: int) -> Manifest:
        """Return the manifest of a committed version.

        Raises:
            Corrupt: it is not the one that was committed.

        """
        answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}")
        if answer.etag != f'"{digest_of(answer.body)}"':
            raise Corrupt(f"{self.url}: the manifest of version {version} of job {job_id} does not have its digest")
        return await asyncio.to_thread(Manifest.decode, answer.body)

    async def edges(self, job_id: str, version: int) -> VersionEdges | None:
        """Return the deltas that lead to a version's chunks; None where there are none, or none that can be read."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}/edges")
            return await asyncio.to_thread(VersionEdges.decode, answer.body)
        except (NotFound, Undecodable):
            return None

    async def route(self, job_id: str, version: int, have: int) -> tuple[VersionEdges, ...]:
        """Return the edges that lead from version `have` to `version`; nothing where there are none."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}/route?have={have}")
            return (await asyncio.to_thread(Route.decode, answer.body)).documents
        except (NotFound, Undecodable):
            return ()

    async def missing(self, chunks: Iterable[ChunkRef]) -> frozenset[str]:
        """Return the digests of those chunks that the store lacks; it keeps the others for an hour at least."""
        body = ChunkList(chunks=tuple(chunks)).model_dump_json()
        answer = await self._request("POST", "/v1/chunks/missing", body.encode(), _JSON)
        return frozenset(MissingChunks.model_validate_json(answer.body).missing)

    async def put_chunk(self, chunk: ChunkRef, data: memoryview) -> None:
        """Upload a chunk's bytes, without a copy of the whole."""

        async def slices() -> AsyncIterator[memoryview]:
            for start in range(0, len(data), _SLICE_BYTES):
                yield data[start : start + _SLICE_BYTES]

        await self._request("PUT", f"/v1/chunks/{chunk.digest}", slices(), {"Content-Length": str(len(data))})

    @asynccontextmanager
    async def chunk(self, digest: str, start: int) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Download a chunk's bytes from `start` on: the position of the first byte that comes, and the blocks.

        The store may send us on to its object store; the token stays here.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        with _translated(self.url):
            async with self._http.get(f"{self.url}/v1/chunks/{digest}", headers=headers) as response:
                if not response.ok:
                    _refuse(response, await response.read(), self.url)
                yield (start if response.status == 206 else 0), response.content.iter_any()

    async def put_draft(self, job_id: str, version: int, part: DraftPart) -> None:
        """Say which chunks of a version are there before it is whole: a hint, which the store may forget."""
        path = f"/v1/models/{job_id}/versions/{version}/draft"
        await self._request("PUT", path, part.encode(), _JSON)

    async def draft(self, job_id: str, *, after: int, wait_s: float) -> DraftNews:
        """Return what the store has been told of a job's draft since the cursor `after`; wait for it up to `wait_s`."""
        answer = await self._request("GET", f"/v1/models/{job_id}/draft?after={after}&wait_s={wait_s}")
        return await asyncio.to_thread(DraftNews.decode, answer.body)

    async def put_part(self, job_id: str, version: int, part: Part) -> None:
        """Say what one rank has published."""
        await self._request("PUT", f"/v1/models/{job_id}/versions/{version}/parts/{part.rank}", part.encode())

    async def commit(self, job_id: str, version: int, request: CommitRequest) -> VersionInfo:
        """Make the version visible.

        Raises:
            Conflict: the head is another than expected, or the parts are not whole.

        """
        path = f"/v1/models/{job_id}/versions/{version}/commit"
        answer = await self._request("POST", path, request.model_dump_json().encode(), _JSON)
        return VersionInfo.model_validate_json(answer.body)

    async def pin(self, job_id: str, version: int) -> None:
        """Keep a version until it is unpinned."""
        await self._request("POST", f"/v1/models/{job_id}/versions/{version}/pin")

    async def unpin(self, job_id: str, version: int) -> None:
        """Let a version go when it is no longer among the newest."""
        await self._request("DELETE", f"/v1/models/{job_id}/versions/{version}/pin")

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._token}"},
                timeout=_TIMEOUT,
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=1 << 20,
                trust_env=True,
                # A signature covers the URL letter by letter.
                requote_redirect_url=False,
            )
        return self._session

    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | AsyncIterator[memoryview] | None = None,
        headers: dict[str, str] | None = None,
    ) -> _Answer:
        with _translated(self.url):
            async with self._http.request(method, f"{self.url}{path}", data=content, headers=headers) as response:
                body = await response.read()
                if not response.ok:
                    _refuse(response, body, self.url)
                return _Answer(body, response.headers.get("ETag", ""))


async def persistently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call for as long as the store is away; the caller's wait has the limit."""
    async for attempt in stamina.retry_context(on=StoreUnavailable, attempts=None, timeout=None, wait_max=2.0):
        with attempt:
            return await call()
    raise AssertionError("a retry context ends with a result or an error")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"weight store URL {url!r}: {error}; give http://host:port") from error
    if not usable:
        raise ConfigError(f"weight store URL {url!r} has no scheme or no host; give http://host:port")


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"weight store URL {url!r}: {error}; give http://host:port") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StoreUnavailable(f"weight store at {url}: {str(error) or type(error).__name__}") from error


def _refuse(response: aiohttp.ClientResponse, body: bytes, url: str) -> None:
    what = f"weight store at {url}: {_detail(response, body)}"
    match response.status:
        case 401 | 403 if not response.history:
            raise ConfigError(f"{what}; set RLBOOST_TOKEN to the store's token")
        case 404:
            raise NotFound(what)
        case 409:
            raise Conflict(what)
        case 416:
            raise Corrupt(f"{what}; its copy of a chunk is shorter than the chunk")
        case 400 | 401 | 403 if response.history:
            raise StoreUnavailable(f"{what}; the signed URL may have run out")
        case 408 | 429 | 500 | 502 | 503 | 504:
            raise StoreUnavailable(what)
        case _:
            raise Fatal(what)


def _detail(response: aiohttp.ClientResponse, body: bytes) -> str:
    try:
        problem = json.loads(body)
        fields = "; ".join(f"{item['field']}: {item['error']}" for item in problem.get("errors", ()))
        return f"{problem['detail']} {fields}".rstrip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{response.method} {response.url.path}: status {response.status}"
