"""Redirects of standby managers, and when a client may follow one with its token.

HTTP libraries drop the `Authorization` header when a redirect changes the origin, as the redirect to another manager
does. A client of this project sends its token to the new origin only if the redirect is one that a standby sends: the
same path and query on another origin, and never from `https` to `http`. The sender of the redirect has the token
already, since the first request carried it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from rlboost.shared.errors import Conflict

MAX_REDIRECTS = 3
"""Maximum per request. The leader may change while a client follows redirects, so one is not enough."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


def redirected_origin(url: str, status: int, location: str) -> str | None:
    """Return the origin to send a request to instead (`http://host:port`), None if the response is no redirect.

    Args:
        url: the requested URL.
        status: the response's status.
        location: the response's `Location` header, empty if there is none.

    Raises:
        Conflict: a standby manager does not send this redirect, so the token must not follow it.

    """
    if status not in _REDIRECTS:
        return None
    old, new = urlsplit(url), urlsplit(location)
    moved_only = (old.path, old.query) == (new.path, new.query) and not new.username and bool(new.hostname)
    allowed = {"https"} if old.scheme == "https" else {"http", "https"}
    if status != 307 or not moved_only or new.scheme not in allowed:
        raise Conflict(
            f"{url} redirects to {location or 'nowhere'}, as a standby manager does not: the token is not sent there; "
            "use the manager's own URL"
        )
    return f"{new.scheme}://{new.netloc}"
