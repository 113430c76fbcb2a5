"""The only place, with `aiohttp_sessions`, that makes HTTP clients: each takes a `Route`, and reads no proxy itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from rlboost.shared.proxies import Proxy, Route, UnusableProxy
from rlboost.shared.tls import client_verification


def http_client(route: Route, *, transport: httpx.BaseTransport | None = None, **options: Any) -> httpx.Client:
    """Return a client whose requests take this route; options are those of `httpx.Client`.

    A request raises `httpx.ProxyError`, which names the variable, if its proxy cannot be used.
    """
    return httpx.Client(trust_env=False, transport=transport or _Routed(route), **options)


def async_http_client(route: Route, **options: Any) -> httpx.AsyncClient:
    """Return a client as `http_client` does."""
    return httpx.AsyncClient(trust_env=False, transport=_AsyncRouted(route), **options)


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
