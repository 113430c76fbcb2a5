"""HTTP client of the weight store: one method per route, one attempt per call, transport errors translated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, Self, TypeVar

import aiohttp

from rlboost.shared.errors import (
    BadSignature,
    ConfigError,
    Conflict,
    Corrupt,
    Fatal,
    NotFound,
    StoreUnavailable,
    Undecodable,
)
from rlboost.shared.http.server_url import is_http_url
from rlboost.shared.process.waiting import retry_while
from rlboost.shared.proxies import aiohttp_session, internal
from rlboost.shared.secrets import bearer
from rlboost.shared.tls import client_verification
from rlboost.shared.weights.access import Access, SystemToken, check_manifest
from rlboost.shared.weights.delta_graph import Edge, Route, VersionEdges
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, digest_of
from rlboost.shared.weights.rest_models import (
    ChunkDirectory,
    ChunkList,
    ChunkState,
    CommitRequest,
    EdgeBatch,
    MissingChunks,
    ModelInfo,
    ModelList,
    VersionInfo,
)
from rlboost.shared.weights.transfer import BadStatus, BlobTransfer, Buffers, Download, DownloadFailed

T = TypeVar("T")

_CONNECT_S = 5.0
_STALL_S = 30.0
_TOTAL_S = 300.0
"""How long a request may take in all, but for blobs: see `transfer_limit_s`."""
_TIMEOUT = aiohttp.ClientTimeout(total=_TOTAL_S, sock_connect=_CONNECT_S, sock_read=_STALL_S)
_JSON = {"Content-Type": "application/json"}


class _Answer(NamedTuple):
    body: bytes
    etag: str


class StoreClient:
    """HTTP client of one weight store.

    All requests are idempotent: repeat them after `StoreUnavailable`, which is also raised while a worker's credential
    is expired, or the store's disk is full. The methods also raise `NotFound`, `Conflict`, `ConfigError` (URL or token)
    and `Fatal` (other refusals).
    """

    def __init__(self, url: str, access: str | Access) -> None:
        """Connect lazily.

        Args:
            url: the store's URL.
            access: the system's token, or what the manager has issued in its place.

        Raises:
            ConfigError: the URL or the token is malformed.

        """
        self.url = url.strip().rstrip("/")
        self._access: Access = SystemToken(access) if isinstance(access, str) else access
        if not is_http_url(self.url):
            raise ConfigError(f"weight store URL {self.url!r} is not valid: give http://host:port")
        self._session: aiohttp.ClientSession | None = None
        self._blobs = BlobTransfer(connect_s=_CONNECT_S, stall_s=_STALL_S, follow_redirects=True, route=internal)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release connections."""
        self._blobs.close()
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
            BadSignature: it is not signed by a holder of the system's token, or belongs to another version.

        """
        answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}")
        if answer.etag != f'"{digest_of(answer.body)}"':
            raise Corrupt(f"{self.url}: the manifest of version {version} of job {job_id} does not match its digest")
        return await asyncio.to_thread(self._verified, answer.body, job_id, version)

    def _verified(self, data: bytes, job_id: str, version: int) -> Manifest:
        manifest = Manifest.decode(data)
        check_manifest(manifest, self._access.manifest_key)
        if (manifest.job_id, manifest.version) != (job_id, version):
            asked, found = f"version {version} of job {job_id}", f"version {manifest.version} of job {manifest.job_id}"
            raise BadSignature(f"{self.url}: the manifest sent for {asked} is that of {found}; it is not loaded")
        return manifest

    async def route(self, job_id: str, version: int, have: int) -> tuple[VersionEdges, ...]:
        """Return the deltas that lead from version `have` to `version`; empty if there are none or they are corrupt."""
        try:
            answer = await self._request("GET", f"/v1/models/{job_id}/versions/{version}/route?have={have}")
            return (await asyncio.to_thread(Route.decode, answer.body)).documents
        except (NotFound, Undecodable):
            return ()

    async def directory(self) -> ChunkDirectory | None:
        """Return where the store has its chunks, None if they are not files."""
        try:
            answer = await self._request("GET", "/v1/chunk-directory")
        except NotFound:
            return None
        return ChunkDirectory.model_validate_json(answer.body)

    async def missing(self, chunks: Iterable[ChunkRef]) -> frozenset[str]:
        """Return the digests of the chunks that the store lacks; it retains the others for at least an hour."""
        body = ChunkList(chunks=tuple(chunks)).model_dump_json()
        answer = await self._request("POST", "/v1/chunks/missing", body.encode(), _JSON)
        return frozenset(MissingChunks.model_validate_json(answer.body).missing)

    async def apply(self, edges: Iterable[Edge]) -> frozenset[str]:
        """Have the store derive chunks from deltas that it has; return the digests of those that it cannot derive."""
        body = EdgeBatch(edges=tuple(edges)).model_dump_json()
        answer = await self._request("POST", "/v1/chunks/apply", body.encode(), _JSON)
        return frozenset(MissingChunks.model_validate_json(answer.body).missing)

    async def damaged(self) -> frozenset[str]:
        """Return the digests of requested chunks that retained versions need and the store lacks."""
        answer = await self._request("GET", "/v1/damaged-chunks")
        return frozenset(MissingChunks.model_validate_json(answer.body).missing)

    async def verify(self, digest: str) -> bool:
        """Have a chunk verified; return True if it is intact. The store removes it if it is not."""
        answer = await self._request("POST", f"/v1/chunks/{digest}/verify")
        return ChunkState.model_validate_json(answer.body).intact

    async def prepare(self, digest: str) -> None:
        """Have the store write the file of a derived chunk."""
        await self._request("HEAD", f"/v1/chunks/{digest}")

    async def put_chunk(self, chunk: ChunkRef, data: memoryview) -> None:
        """Upload a chunk without copying it."""
        path = f"/v1/chunks/{chunk.digest}"
        with self._translated_transfer(f"PUT {path}"):
            await self._blobs.upload(f"{self.url}{path}", self._authorization(), data)

    async def fetch(self, download: Download, keep: Callable[[], bool] = lambda: True) -> bool:
        """Download the rest of a blob, call `keep` in the thread that received it, and return its result.

        The store may redirect to its object store, which is not sent the token.

        Raises:
            Corrupt: the store's copy has another length.

        """
        path = f"/v1/chunks/{download.blob.digest}"
        with self._translated_transfer(f"GET {path}"):
            return await self._blobs.download(f"{self.url}{path}", self._authorization(), download, keep=keep)

    async def read(self, chunk: ChunkRef) -> bytes:
        """Return the bytes of a chunk.

        Raises:
            NotFound: the store does not have it.
            Corrupt: its bytes have another digest.

        """
        download, found = Download(chunk, Buffers()), b""

        def keep() -> bool:
            nonlocal found
            found = bytes(download.data)
            return digest_of(found) == chunk.digest

        if not await self.fetch(download, keep):
            await self.verify(chunk.digest)  # so that it can be uploaded again
            raise Corrupt(f"weight store at {self.url}: chunk {chunk.digest} arrived with another digest")
        return found

    async def put_part(self, job_id: str, version: int, part: Part) -> None:
        """Upload the description of one rank's part."""
        await self._request("PUT", f"/v1/models/{job_id}/versions/{version}/parts/{part.rank}", part.encode())

    async def commit(self, job_id: str, version: int, request: CommitRequest) -> VersionInfo:
        """Make the version visible.

        Raises:
            Conflict: the head is not the expected one, the parts are incomplete, or its trainer lost the job.
            Fatal: its tensors are not those of the model's version before.

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
            self._session = aiohttp_session(
                internal,
                self.url,
                timeout=_TIMEOUT,
                connector=aiohttp.TCPConnector(limit=0, ssl=client_verification()),
            )
        return self._session

    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> _Answer:
        headers = {"Authorization": self._authorization(), **(headers or {})}
        with _translated(self.url):
            async with self._http.request(method, f"{self.url}{path}", data=content, headers=headers) as response:
                body = await response.read()
                if not response.ok:
                    what = _detail(body, f"{method} {response.url.path}", response.status)
                    self._raise_for_status(
                        response.status, f"weight store at {self.url}: {what}", redirected=bool(response.history)
                    )
                return _Answer(body, response.headers.get("ETag", ""))

    @contextmanager
    def _translated_transfer(self, request: str) -> Iterator[None]:
        try:
            yield
        except DownloadFailed as error:
            raise StoreUnavailable(f"weight store at {self.url}: {error}") from error
        except BadStatus as error:
            what = f"weight store at {self.url}: {_detail(error.body, request, error.status)}"
            self._raise_for_status(error.status, what, redirected=error.redirected)

    def _authorization(self) -> str:
        return bearer("the weight store's token", self._access.credential)

    def _raise_for_status(self, status: int, what: str, *, redirected: bool = False) -> NoReturn:
        if status == 401 and not redirected and self._access.is_renewed:
            raise StoreUnavailable(
                f"{what}; the worker waits for a new credential of the manager. If this "
                "lasts, the clocks of manager and weight store differ: 'rlboost doctor' compares them"
            )
        _raise_for_status(status, what, redirected=redirected)


async def retry_unavailable(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call while the store is unavailable; the caller's wait bounds the time."""
    return await retry_while(StoreUnavailable, call)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"weight store URL {url!r}: {error}; give http://host:port") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StoreUnavailable(f"weight store at {url}: {str(error) or type(error).__name__}") from error


def _raise_for_status(status: int, what: str, *, redirected: bool = False) -> NoReturn:
    """Raise the error for a response's status; `redirected` if the object store sent it."""
    match status:
        case 401 | 403 if not redirected:
            raise ConfigError(f"{what}; set RLBOOST_TOKEN to the store's token")
        case 404:
            raise NotFound(what)
        case 409:
            raise Conflict(what)
        case 416:
            raise Corrupt(f"{what}; its copy of a chunk is truncated")
        case 400 | 401 | 403 if redirected:
            raise StoreUnavailable(f"{what}; the signed URL may have expired")
        case 408 | 429 | 500 | 502 | 503 | 504 | 507:
            raise StoreUnavailable(what)
        case _:
            raise Fatal(what)


def _detail(body: bytes, request: str, status: int) -> str:
    try:
        problem = json.loads(body)
        fields = "; ".join(f"{item['field']}: {item['error']}" for item in problem.get("errors", ()))
        return f"{problem['detail']} {fields}".rstrip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{request}: status {status}"
