"""URLs of servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def server_url(host: str, port: int, *, tls: bool) -> str:
    """Return the URL of a server at a host name or an address, which may be of IPv6."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_http_url(url: str) -> bool:
    """Return True for a URL with scheme `http` or `https`, a host, and a valid port or none."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # e.g. a port that is not a number
        return False
