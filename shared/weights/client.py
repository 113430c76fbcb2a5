"""The weight store as its users see it: one method a route, one attempt a call, httpx's errors as ours."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Self, TypeVar

import httpcore
import httpx
import stamina

from shared.errors import ConfigError, Conflict, Corrupt, Fatal, NotFound, StoreUnavailable, Undecodable
from shared.weights.edges import VersionEdges
from shared.weights.manifest import ChunkRef, Manifest, Part, digest_of
from shared.weights.wire import ChunkList, CommitRequest, MissingChunks, VersionInfo

T = TypeVar("T")

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_JSON = {"Content-Type": "application/json"}
_SLICE_BYTES = 1 << 20

# By default 64 KiB are asked of the socket at a time, which costs 1.7 times the CPU per byte of a chunk.
httpcore.AsyncHTTP11Connection.READ_NUM_BYTES = 1 << 20


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
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=_TIMEOUT,
                limits=httpx.Limits(max_connections=None),
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"weight store URL {url!r}: {error}; give http://host:port") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()

    async def head(self, job_id: str) -> VersionInfo | None:
        """Return the newest committed version, None before the first."""
        try:
            response = await self._request("GET", f"/v1/models/{job_id}/head")
        except NotFound:
            return None
        return VersionInfo.model_validate_json(response.content)

    async def manifest(self, job_id: str, version: int) -> Manifest:
        """Return the manifest of a committed version.

        Raises:
            Corrupt: it is not the one that was committed.

        """
        response = await self._request("GET", f"/v1/models/{job_id}/versions/{version}")
        if response.headers.get("ETag") != f'"{digest_of(response.content)}"':
            raise Corrupt(f"{self.url}: the manifest of version {version} of job {job_id} does not have its digest")
        return await asyncio.to_thread(Manifest.decode, response.content)

    async def edges(self, job_id: str, version: int) -> VersionEdges | None:
        """Return the deltas that lead to a version's chunks; None where there are none, or none that can be read."""
        try:
            response = await self._request("GET", f"/v1/models/{job_id}/versions/{version}/edges")
            return await asyncio.to_thread(VersionEdges.decode, response.content)
        except (NotFound, Undecodable):
            return None

    async def missing(self, chunks: Iterable[ChunkRef]) -> frozenset[str]:
        """Return the digests of those chunks that the store lacks; it keeps the others for an hour at least."""
        body = ChunkList(chunks=tuple(chunks)).model_dump_json()
        response = await self._request("POST", "/v1/chunks/missing", content=body, headers=_JSON)
        return frozenset(MissingChunks.model_validate_json(response.content).missing)

    async def put_chunk(self, chunk: ChunkRef, data: memoryview) -> None:
        """Upload a chunk's bytes, without a copy of the whole."""

        async def slices() -> AsyncIterator[bytes]:
            for start in range(0, len(data), _SLICE_BYTES):
                yield data[start : start + _SLICE_BYTES]  # type: ignore[misc]  # h11 joins any buffers

        await self._request(
            "PUT", f"/v1/chunks/{chunk.digest}", content=slices(), headers={"Content-Length": str(len(data))}
        )

    @asynccontextmanager
    async def chunk(self, digest: str, start: int) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Download a chunk's bytes from `start` on: the position of the first byte that comes, and the blocks."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        with _translated(self.url):
            async with self._http.stream("GET", f"/v1/chunks/{digest}", headers=headers) as response:
                if response.is_error:
                    await response.aread()
                    _refuse(response, self.url)
                yield (start if response.status_code == httpx.codes.PARTIAL_CONTENT else 0), response.aiter_raw()

    async def put_part(self, job_id: str, version: int, part: Part) -> None:
        """Say what one rank has published."""
        await self._request("PUT", f"/v1/models/{job_id}/versions/{version}/parts/{part.rank}", content=part.encode())

    async def commit(self, job_id: str, version: int, request: CommitRequest) -> VersionInfo:
        """Make the version visible.

        Raises:
            Conflict: the head is another than expected, or the parts are not whole.

        """
        response = await self._request(
            "POST",
            f"/v1/models/{job_id}/versions/{version}/commit",
            content=request.model_dump_json(),
            headers=_JSON,
        )
        return VersionInfo.model_validate_json(response.content)

    async def pin(self, job_id: str, version: int) -> None:
        """Keep a version until it is unpinned."""
        await self._request("POST", f"/v1/models/{job_id}/versions/{version}/pin")

    async def unpin(self, job_id: str, version: int) -> None:
        """Let a version go when it is no longer among the newest."""
        await self._request("DELETE", f"/v1/models/{job_id}/versions/{version}/pin")

    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | str | AsyncIterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        with _translated(self.url):
            response = await self._http.request(method, path, content=content, headers=headers)
        if response.is_error:
            _refuse(response, self.url)
        return response


async def persistently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call for as long as the store is away; the caller's wait has the limit."""
    async for attempt in stamina.retry_context(on=StoreUnavailable, attempts=None, timeout=None, wait_max=2.0):
        with attempt:
            return await call()
    raise AssertionError("a retry context ends with a result or an error")


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigError(f"weight store URL {url!r}: {error}; give http://host:port") from error
    except httpx.TransportError as error:
        raise StoreUnavailable(f"weight store at {url}: {str(error) or type(error).__name__}") from error


def _refuse(response: httpx.Response, url: str) -> None:
    what = f"weight store at {url}: {_detail(response)}"
    match response.status_code:
        case 401 | 403:
            raise ConfigError(f"{what}; set RLBOOST_TOKEN to the store's token")
        case 404:
            raise NotFound(what)
        case 409:
            raise Conflict(what)
        case 416:
            raise Corrupt(f"{what}; its copy of a chunk is shorter than the chunk")
        case 408 | 429 | 500 | 502 | 503 | 504:
            raise StoreUnavailable(what)
        case _:
            raise Fatal(what)


def _detail(response: httpx.Response) -> str:
    try:
        problem = response.json()
        fields = "; ".join(f"{item['field']}: {item['error']}" for item in problem.get("errors", ()))
        return f"{problem['detail']} {fields}".rstrip()
    except (ValueError, KeyError, TypeError):
        return f"{response.request.method} {response.request.url.path}: status {response.status_code}"
