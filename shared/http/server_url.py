"""URLs of servers, and when a client may follow a redirect with its token."""

from __future__ import annotations

from urllib.parse import urlsplit

from rlboost.shared.errors import ConfigError, Conflict
from rlboost.shared.secrets import clean_url

# --- Redirects of standby managers, and when a client may follow one with its token -----------------------------------
# HTTP libraries drop the `Authorization` header when a redirect changes the origin, as the redirect to another manager
# does. A client of this project sends its token to the new origin only if the redirect is one that a standby sends: the
# same path and query on another origin, and never from `https` to `http`. The sender of the redirect has the token
# already, since the first request carried it.


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


# --- URLs of servers --------------------------------------------------------------------------------------------------


_DEFAULT_PORTS = {"http": 80, "https": 443}


def server_url(host: str, port: int, *, tls: bool) -> str:
    """Return the URL of a server at a host name or an address, which may be of IPv6."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def manager_url(given_by: str, url: str) -> str:
    """Return the URL of a manager's REST API without a trailing slash and without `/v1`, which OpenAI clients need.

    Raises:
        ConfigError: it is not a URL, or has a user name; names the option or variable.

    """
    url = clean_url(given_by, url)
    if "@" in url:
        raise ConfigError(f"{given_by} has a user name or password, which would replace the token: remove it")
    if not is_http_url(url):
        raise ConfigError(f"{given_by} {url!r} is not a URL: use the form http://10.0.0.5:8700")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_http_url(url: str) -> bool:
    """Return True for a URL with scheme `http` or `https`, a host, and a valid port or none."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # e.g. a port that is not a number
        return False


def origin_of(url: str) -> str:
    """Return scheme, host and port of an HTTP URL, such as `https://rewards.example:443`.

    Raises:
        ValueError: it has no such form.

    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://HOST[:PORT] or https://HOST[:PORT]")
    return f"{parts.scheme}://{parts.hostname}:{parts.port or _DEFAULT_PORTS[parts.scheme]}"
