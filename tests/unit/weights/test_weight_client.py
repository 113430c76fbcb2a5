"""The weight store's client, without a store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlboost.shared.errors import ConfigError, StoreUnavailable
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import ChunkRef, digest_of

CHUNK = b"chunk"
REF = ChunkRef(digest=digest_of(CHUNK), n_bytes=len(CHUNK))
CALLS: dict[str, Callable[[StoreClient], Awaitable[object]]] = {
    "head": lambda client: client.head("job-1"),
    "missing": lambda client: client.missing([REF]),
    "pin": lambda client: client.pin("job-1", 0),
    "prepare": lambda client: client.prepare(REF.digest),
    "put_chunk": lambda client: client.put_chunk(REF, memoryview(CHUNK)),
    "read": lambda client: client.read(REF),
}


@pytest.mark.parametrize(
    ("url", "token", "text"),
    [
        ("http://127.0.0.1:1", "", "token"),
        ("http://127.0.0.1:1", "with a newline\n", "token"),
        ("127.0.0.1:8701", "secret", "give http://host:port"),
        ("http://127.0.0.1:port", "secret", "give http://host:port"),
    ],
)
def test_store_client_refuses_an_invalid_url_or_token(url: str, token: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        StoreClient(url, token)


_CHECKED_LATER = {("read", 200), ("put_chunk", 200)}


async def answered(call: str, answer: Callable[[web.Request], web.Response]) -> list[web.Request]:
    """Make a call of the client whose requests get these answers; return them."""
    requests: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        requests.append(request)
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server, StoreClient(str(server.make_url("/")), "secret") as client:
        await CALLS[call](client)
    return requests


@pytest.mark.parametrize("call", [call for call in CALLS if call != "read"])
async def test_redirect_of_a_proxy_is_refused_by_name(call: str) -> None:
    """After a 301, HTTP libraries send a GET without a body in place of a POST, and another server no token."""
    seen: list[str] = []

    def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.Response(status=301, headers={"Location": "/elsewhere"})

    with pytest.raises(ConfigError, match=r"redirected to .*give the store's own URL"):
        await answered(call, answer)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("call", "status"),
    # A chunk's bytes are compared with its digest, and a commit names the chunks that the store lacks.
    [(call, status) for call in CALLS for status in (200, 404, 413) if (call, status) not in _CHECKED_LATER],
)
async def test_page_of_a_proxy_is_no_answer_of_a_store(call: str, status: int) -> None:
    """Such as a page to sign in, that of a path which the proxy does not know, or of its limit of bodies."""

    def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>", content_type="text/html")

    with pytest.raises(ConfigError, match=f"web page and status {status}, not by a weight store"):
        await answered(call, answer)


async def test_page_of_a_temporary_failure_is_waited_for() -> None:
    with pytest.raises(StoreUnavailable, match="status 502"):
        await answered("head", lambda _: web.Response(status=502, text="<html>", content_type="text/html"))


async def test_no_proxy_may_compress_an_answer() -> None:
    (request,) = await answered("head", lambda _: web.Response(status=404))
    assert request.headers["Accept-Encoding"] == "identity"
