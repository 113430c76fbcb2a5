"""Which connection goes through a proxy.

- Connections between our own processes (manager, weight store, workers, trainer, command line, doctor) are direct,
  unless `RLBOOST_PROXY` names a proxy for them. They carry tokens, and proxies of companies refuse private addresses.
- Connections to other servers (reward services, price lists, object stores) use the proxy that `HTTPS_PROXY`,
  `HTTP_PROXY` or `ALL_PROXY` names, except for the hosts of `NO_PROXY`, which may have networks such as `10.0.0.0/8`.
- Loopback and the addresses at which clouds give out credentials are never reached through a proxy.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from rlboost.shared.errors import ConfigError
from rlboost.shared.secrets import clean_url

if TYPE_CHECKING:
    import aiohttp

PROXY_VARIABLE = "RLBOOST_PROXY"
_METADATA = tuple(
    map(
        ip_network,
        (
            "169.254.0.0/16",
            "fe80::/10",
            "fd00:ec2::/32",  # AWS
            "fd20:ce::/32",  # Google Cloud
            "168.63.129.16/32",  # Azure
            "100.100.100.200/32",  # Alibaba
        ),
    )
)
"""Addresses at which clouds give out a machine's credentials: link-local addresses, and their own."""
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal"})
_NAT64 = ip_network("64:ff9b::/96")
"""IPv6 addresses that a gateway translates to the IPv4 address in the last 4 bytes."""
_SCHEMES = {"http", "https"}
_SOCKS = {"socks5", "socks5h"}


class Proxy(NamedTuple):
    """A proxy, and the variable that names it."""

    url: str
    variable: str

    def __str__(self) -> str:
        """Return it without its password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} of {self.variable}"


Route = Callable[[str], Proxy | None]
"""URL -> the proxy that connects to it, None for a direct connection; raises `UnusableProxy`."""


class UnusableProxy(ConfigError):
    """A variable does not name a proxy that can be used; the text names it."""


def direct(url: str) -> Proxy | None:
    """Return None: a server on this machine, or next to it, is never reached through a proxy."""
    del url
    return None


def internal(url: str) -> Proxy | None:
    """Return the proxy between our own processes, which only `RLBOOST_PROXY` names."""
    given = os.environ.get(PROXY_VARIABLE, "").strip()
    return _usable(given, PROXY_VARIABLE) if given and not _is_local(_host(url)) else None


def external(url: str) -> Proxy | None:
    """Return the proxy that the environment names for another server."""
    parts = urlsplit(url)
    if _is_local(_host(url)) or _is_excluded(_host(url), parts.port or {"https": 443}.get(parts.scheme, 80)):
        return None
    for scheme in (parts.scheme, "all"):
        # The lower-case name first, as curl does; HTTP_PROXY is what a CGI script's client would set.
        for variable in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            if given := os.environ.get(variable, "").strip():
                return _usable(given, variable)
    return None


def exclude_metadata() -> None:
    """Keep the clients of libraries from asking a cloud's metadata service through a proxy."""
    for variable in ("NO_PROXY", "no_proxy"):
        if variable in os.environ or any(name.lower().endswith("_proxy") for name in os.environ):
            given = [part for part in os.environ.get(variable, os.environ.get("no_proxy", "")).split(",") if part]
            missing = [name for name in ("169.254.169.254", "metadata.google.internal") if name not in given]
            if missing and "*" not in given:
                os.environ[variable] = ",".join([*given, *missing])


def is_metadata(host: str) -> bool:
    """Return True if an address, as a socket names it, may be a cloud's metadata service."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        translated = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or translated or address
    return any(address in network for network in _METADATA)


def _usable(given: str, variable: str) -> Proxy:
    """Return the proxy that a variable names.

    Raises:
        UnusableProxy: it is not one; the value is not quoted, as it may have a password.

    """
    url = clean_url(variable, given)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        is_usable = False
    if not is_usable:
        raise UnusableProxy(f"{variable} is not the URL of a proxy: give http://HOST:PORT, or remove it")
    if parts.scheme in _SOCKS and variable != PROXY_VARIABLE and importlib.util.find_spec("socksio") is not None:
        return Proxy(url, variable)
    if parts.scheme not in _SCHEMES:
        raise UnusableProxy(
            f"{variable} names a proxy of the kind {parts.scheme}, which cannot be used: give http://HOST:PORT, "
            "except the server with NO_PROXY, or remove the variable"
        )
    return Proxy(parts.geturl(), variable)


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def _is_local(host: str) -> bool:
    if host in _METADATA_NAMES or host == "localhost" or host.endswith(".localhost"):
        return True
    with suppress(ValueError):
        return ip_address(host.partition("%")[0]).is_loopback or is_metadata(host)
    return False


def _is_excluded(host: str, port: int) -> bool:
    """Return True if NO_PROXY has the host: as a name or domain, an address, or in a network, each with a port."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return any(_covers(pattern.strip().lower(), host, port) for pattern in given.split(",") if pattern.strip())


def _covers(pattern: str, host: str, port: int) -> bool:
    if pattern == "*":
        return True
    pattern, only_port = _without_port(pattern)
    if only_port and only_port != str(port):
        return False
    with suppress(ValueError):
        network = ip_network(pattern.strip("[]"), strict=False)
        return any(address in network for address in _address(host))
    domain = pattern.removeprefix("*").lstrip(".").rstrip(".")
    return host == domain or host.endswith(f".{domain}")


def _without_port(pattern: str) -> tuple[str, str]:
    head, colon, port = pattern.rpartition(":")
    if colon and port.isdigit() and (":" not in head or head.endswith("]")):
        return head, port
    return pattern, ""


def _address(host: str) -> Iterable[IPv4Address | IPv6Address]:
    with suppress(ValueError):
        address = ip_address(host.partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return (mapped or address,)
    return ()


def aiohttp_session(route: Route, url: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session for requests to the server of `url`; options are those of `aiohttp.ClientSession`.

    Raises:
        UnusableProxy: see `Route`.

    """
    import aiohttp  # noqa: PLC0415 - an extra, and slow to import

    proxy = route(url)
    return aiohttp.ClientSession(trust_env=False, proxy=proxy.url if proxy else None, **options)
