"""The URL of one of our own servers."""

from __future__ import annotations


def server_url(host: str, port: int, *, tls: bool) -> str:
    """Return the URL of a server at a host name or an address, which may be of IPv6."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
