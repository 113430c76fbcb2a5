"""Origins of services: scheme, host and port."""

from __future__ import annotations

from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str:
    """Return scheme, host and port of an HTTP URL, such as `https://rewards.example:443`.

    Raises:
        ValueError: it has no such form.

    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://HOST[:PORT] or https://HOST[:PORT]")
    return f"{parts.scheme}://{parts.hostname}:{parts.port or _DEFAULT_PORTS[parts.scheme]}"
