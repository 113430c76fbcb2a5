"""Makes the sessions of aiohttp, as `clients` makes the clients of httpx; apart, since few processes need both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlboost.shared.proxies import Route

if TYPE_CHECKING:
    import aiohttp


def aiohttp_session(route: Route, url: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session for requests to the server of `url`; options are those of `aiohttp.ClientSession`.

    Raises:
        UnusableProxy: see `Route`.

    """
    import aiohttp  # noqa: PLC0415 - an extra, and slow to import

    proxy = route(url)
    return aiohttp.ClientSession(trust_env=False, proxy=proxy.url if proxy else None, **options)
