"""Who sent a request, by its bearer token, and the scope that a route needs."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlboost.shared.http.scopes import Principal, Scope

Authenticator = Callable[[str], Awaitable[Principal | None]]
"""Bearer token -> its holder; None if the token is unknown or has expired."""
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., object])


def needs(scope: Scope) -> Callable[[_Endpoint], _Endpoint]:
    """Declare the scope that a route needs; without a declaration it needs `admin`."""

    def declare(endpoint: _Endpoint) -> _Endpoint:
        endpoint.__dict__["needed_scope"] = scope
        return endpoint

    return declare


def needed_scope(endpoint: Callable[..., object]) -> Scope:
    """Return the scope that a route's function needs."""
    scope: Scope = endpoint.__dict__.get("needed_scope", "admin")
    return scope


def bearer_token(authorization: str) -> str:
    """Return the token in an `Authorization` header, empty if there is none."""
    scheme, _, given = authorization.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def is_token(given: str, token: str) -> bool:
    """Return True if the token is the given one, in constant time; an empty token equals none."""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


def system_token(token: str) -> Authenticator:
    """Return an authenticator that accepts one token, for everything; an empty one accepts none."""

    async def authenticate(given: str) -> Principal | None:
        return Principal("system", "admin") if is_token(given, token) else None

    return authenticate
