"""Where a standby manager sends a request, and when a client may follow with its token.

HTTP libraries drop the `Authorization` header when a redirect leaves the origin, as the other port of a second manager
does. A client of ours sends its token there deliberately, and only there where the redirect is what a standby says:
the same path and query elsewhere, and never from `https` to `http`. Who says it has the token already, since it was
asked with it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from shared.errors import Conflict

MAX_REDIRECTS = 3
"""Of one request: the lead may move while it is looked for."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


def redirected(asked: str, status: int, location: str) -> str | None:
    """Return the origin to which a request must be sent again (`http://host:port`), None when it was answered.

    Args:
        asked: the URL that was asked.
        status: of the answer.
        location: the answer's `Location`, empty when it has none.

    Raises:
        Conflict: a redirect that no manager sends; the token must not follow it.

    """
    if status not in _REDIRECTS:
        return None
    old, new = urlsplit(asked), urlsplit(location)
    moved_only = (old.path, old.query) == (new.path, new.query) and not new.username and bool(new.hostname)
    allowed = {"https"} if old.scheme == "https" else {"http", "https"}
    if status != 307 or not moved_only or new.scheme not in allowed:
        raise Conflict(
            f"{asked} redirects to {location or 'nowhere'}, which a standby manager does not: "
            "the token is not sent there; use the manager's own URL"
        )
    return f"{new.scheme}://{new.netloc}"
