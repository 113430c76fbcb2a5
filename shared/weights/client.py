"""HTTP client of the weight store: one method per route, one attempt per call, aiohttp's errors translated."""

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

from rlboost.shared.errors import ConfigError, Conflict, Corrupt, Fatal, NotFound, StoreUnavailable, Undecodable
from rlboost.shared.weights.delta_graph import Route, VersionEdges
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, digest_of
from rlboost.shared.weights.wire import (
    ChunkList,
    ChunkState,
    CommitRequest,
    MissingChunks,
    ModelInfo,
    ModelList,
    VersionInfo,
)

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=30.0)
_JSON = {"Content-Type": "application/json"}
_SLICE_BYTES = 1 << 20


class _Answer(NamedTuple):
    body: bytes
    etag: str


class StoreClient:
    """HTTP client of one weight store.

    Every request is idempotent, so every method may be repeated after `StoreUnavailable`. The methods also raise
    `NotFound`, `Conflict`, `ConfigError` (URL or token) and `Fatal` (other refusals). A store with a full disk is
    unavailable.
    """

    def __init__(self, url: str, token: str) -> None:
        """Connect lazily.

        Raises:
            ConfigError: the URL or the token is malformed.

        """
        self.url = url.rstrip("/")
        if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", token):
            raise ConfigError(
                "the token is empty or not printable ASCII: set RLBOOST_TOKEN to the weight store's token"
            )
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
        """Return the retained versions, None before the first."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}")
        except NotFound:
            return None
        return ModelInfo.model_validate_json(answer.body)

    async def manifest(self, job_id: str, version: int) -> Manifest:
        """Return the manifest of a committed version.

        Raises:
            Corrupt: it does not have the digest that the store declares.

        """
        answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}")
        if answer.etag != f'"{digest_of(answer.body)}"':
            raise Corrupt(f"{self.url}: the manifest of version {version} of job {job_id} does not match its digest")
        return await asyncio.to_thread(Manifest.decode, answer.body)

    async def edges(self, job_id: str, version: int) -> VersionEdges | None:
        """Return the deltas that lead to a version's chunks; None if there are none or they are corrupt."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}/edges")
            return await asyncio.to_thread(VersionEdges.decode, answer.body)
        except (NotFound, Undecodable):
            return None

    async def route(self, job_id: str, version: int, have: int) -> tuple[VersionEdges, ...]:
        """Return the deltas that lead from version `have` to `version`; empty if there are none or they are corrupt."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}/route?have={have}")
            return (await asyncio.to_thread(Route.decode, answer.body)).documents
        except (NotFound, Undecodable):
            return ()

    async def missing(self, chunks: Iterable[ChunkRef]) -> frozenset[str]:
        """Return the digests of the chunks that the store lacks; it retains the others for at least an hour."""
        body = ChunkList(chunks=tuple(chunks)).model_dump_json()
        answer = await self._request("POST", "/v1/chunks/missing", body.encode(), _JSON)
        return frozenset(MissingChunks.model_validate_json(answer.body).missing)

    async def damaged(self) -> frozenset[str]:
        """Return the digests of chunks that retained versions need and the store lacks, and that were asked for."""
        answer = await self._request("GET", "/v1/chunks/damaged")
        return frozenset(MissingChunks.model_validate_json(answer.body).missing)

    async def verify(self, digest: str) -> bool:
        """Have a chunk verified; return True if it is intact. The store removes it if it is not."""
        answer = await self._request("POST", f"/v1/chunks/{digest}/verify")
        return ChunkState.model_validate_json(answer.body).intact

    async def put_chunk(self, chunk: ChunkRef, data: memoryview) -> None:
        """Upload a chunk without copying it as a whole."""

        async def slices() -> AsyncIterator[memoryview]:
            for start in range(0, len(data), _SLICE_BYTES):
                yield data[start : start + _SLICE_BYTES]

        await self._request("PUT", f"/v1/chunks/{chunk.digest}", slices(), {"Content-Length": str(len(data))})

    @asynccontextmanager
    async def chunk(self, digest: str, start: int) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Download a chunk from byte `start` on; yields the position of the first byte and the blocks.

        The store may redirect to its object store, which is not sent the token.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        with _translated(self.url):
            async with self._http.get(f"{self.url}/v1/chunks/{digest}", headers=headers) as response:
                if not response.ok:
                    _raise_for_status(response, await response.read(), self.url)
                yield (start if response.status == 206 else 0), response.content.iter_any()

    async def put_part(self, job_id: str, version: int, part: Part) -> None:
        """Upload the description of one rank's part."""
        await self._request("PUT", f"/v1/models/{job_id}/versions/{version}/parts/{part.rank}", part.encode())

    async def commit(self, job_id: str, version: int, request: CommitRequest) -> VersionInfo:
        """Make the version visible.

        Raises:
            Conflict: the head is not the expected one, or the parts are incomplete.

        """
        path = f"/v1/models/{job_id}/versions/{version}/commit"
        answer = await self._request("POST", path, request.model_dump_json().encode(), _JSON)
        return VersionInfo.model_validate_json(answer.body)

    async def pin(self, job_id: str, version: int) -> None:
        """Retain a version until it is unpinned."""
        await self._request("POST", f"/v1/models/{job_id}/versions/{version}/pin")

    async def unpin(self, job_id: str, version: int) -> None:
        """Release a pin: the version is removed once it is not among the newest."""
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
                # The signature of a signed URL covers its exact characters.
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
                    _raise_for_status(response, body, self.url)
                return _Answer(body, response.headers.get("ETag", ""))


async def retry_unavailable(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call while the store is unavailable; the caller's wait bounds the time."""
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


def _raise_for_status(response: aiohttp.ClientResponse, body: bytes, url: str) -> None:
    what = f"weight store at {url}: {_detail(response, body)}"
    match response.status:
        case 401 | 403 if not response.history:
            raise ConfigError(f"{what}; set RLBOOST_TOKEN to the store's token")
        case 404:
            raise NotFound(what)
        case 409:
            raise Conflict(what)
        case 416:
            raise Corrupt(f"{what}; its copy of a chunk is truncated")
        case 400 | 401 | 403 if response.history:
            raise StoreUnavailable(f"{what}; the signed URL may have expired")
        case 408 | 429 | 500 | 502 | 503 | 504 | 507:
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
