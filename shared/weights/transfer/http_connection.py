"""Opens blocking HTTP connections, through the proxy that the environment names for a URL."""

from __future__ import annotations

import http.client
import ssl
from base64 import b64encode
from functools import cache
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from rlboost.shared.tls import verifying_context


def connect(url: str, *, timeout_s: float, use_proxies: bool) -> http.client.HTTPConnection:
    """Return an open connection for requests to the server of `url`.

    Raises:
        OSError: there is no connection within `timeout_s`.

    """
    parts = urlsplit(url)
    host, proxy = parts.hostname or "", _proxy(parts) if use_proxies else None
    connection: http.client.HTTPConnection
    if proxy is None:
        connection = _connection(parts.scheme, host, parts.port, timeout_s)
    elif parts.scheme == "https":
        connection = _connection("https", proxy.hostname or "", proxy.port, timeout_s)
        connection.set_tunnel(host, parts.port, _credential(proxy))
    else:
        connection = _ProxiedConnection(proxy.hostname or "", proxy.port, timeout=timeout_s)
        connection.origin, connection.credential = f"{parts.scheme}://{parts.netloc}", _credential(proxy)
    connection.connect()
    return connection


class _ProxiedConnection(http.client.HTTPConnection):
    """A connection to a proxy, which takes requests with whole URLs."""

    origin = ""
    credential: dict[str, str]

    def putrequest(self, method: str, url: str, *args: Any, **options: Any) -> None:
        super().putrequest(method, f"{self.origin}{url}", *args, **options)
        for name, value in self.credential.items():
            self.putheader(name, value)


def _connection(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_tls())
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


@cache
def _tls() -> ssl.SSLContext:
    return verifying_context()


def _proxy(parts: SplitResult) -> SplitResult | None:
    proxy = "" if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme, "")
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None


def _credential(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
