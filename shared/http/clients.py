"""The only place, with `aiohttp_sessions`, that makes HTTP clients: each takes a `Route`, and reads no proxy itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from rlboost.shared.proxies import Proxy, Route, UnusableProxy
from rlboost.shared.tls import client_verification

MAX_ANSWER_BYTES = 64 << 20
"""Of a server that the job file or user code names."""


def http_client(route: Route, *, transport: httpx.BaseTransport | None = None, **options: Any) -> httpx.Client:
    """Return a client whose requests take this route; options are those of `httpx.Client`.

    A request raises `httpx.ProxyError`, which names the variable, if its proxy cannot be used.
    """
    return httpx.Client(trust_env=False, transport=transport or _Routed(route), **options)


def async_http_client(route: Route, **options: Any) -> httpx.AsyncClient:
    """Return a client as `http_client` does."""
    return httpx.AsyncClient(trust_env=False, transport=_AsyncRouted(route), **options)


IDENTITY = {"accept-encoding": "identity"}
"""Headers of requests whose answers are limited: a few compressed bytes may become gigabytes."""


def limit_answer(answer: httpx.Response) -> None:
    """Have reading an answer fail beyond `MAX_ANSWER_BYTES`; a hook of clients.

    Raises:
        httpx.DecodingError: the answer is compressed.

    """
    if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
        raise httpx.DecodingError(
            f"the answer is compressed ({encoding}), which was not asked for", request=answer.request
        )
    answer.stream = _Limited(answer)


async def limit_async_answer(answer: httpx.Response) -> None:
    """Do what `limit_answer` does."""
    limit_answer(answer)


class _Limited(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, answer: httpx.Response) -> None:
        self._stream: Any = answer.stream
        self._request, self._left = answer.request, MAX_ANSWER_BYTES

    def __iter__(self) -> Iterator[bytes]:
        return map(self._counted, self._stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for block in self._stream:
            yield self._counted(block)

    def _counted(self, block: bytes) -> bytes:
        self._left -= len(block)
        if self._left < 0:
            raise httpx.DecodingError(f"the answer has more than {MAX_ANSWER_BYTES} bytes", request=self._request)
        return block

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Routed(httpx.BaseTransport):
    """Sends each request over a direct connection or through its proxy."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._transports: dict[str, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = _proxy_of(self._route, request)
        key = proxy.url if proxy else ""
        if key not in self._transports:
            self._transports[key] = httpx.HTTPTransport(**_transport_options(proxy))
        with _naming(proxy, request):
            return self._transports[key].handle_request(request)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


class _AsyncRouted(httpx.AsyncBaseTransport):
    """See `_Routed`."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._transports: dict[str, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        proxy = _proxy_of(self._route, request)
        key = proxy.url if proxy else ""
        if key not in self._transports:
            self._transports[key] = httpx.AsyncHTTPTransport(**_transport_options(proxy))
        with _naming(proxy, request):
            return await self._transports[key].handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()


def _transport_options(proxy: Proxy | None) -> Mapping[str, Any]:
    return {"verify": client_verification(), "proxy": proxy.url if proxy else None}


def _proxy_of(route: Route, request: httpx.Request) -> Proxy | None:
    try:
        return route(str(request.url))
    except UnusableProxy as error:
        raise httpx.ProxyError(str(error), request=request) from error


@contextmanager
def _naming(proxy: Proxy | None, request: httpx.Request) -> Iterator[None]:
    """Add the proxy to the error of a connection through it."""
    try:
        yield
    except httpx.TransportError as error:
        if proxy is None:
            raise
        text = f"{str(error) or type(error).__name__}, through the proxy {proxy}"
        raise type(error)(text, request=request) from error
