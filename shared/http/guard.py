"""Routes that check token, scope and the size of a request's body before they read the body.

FastAPI parses a body before it resolves dependencies, so a dependency that checks the token would let anyone make the
service hold and parse a body of any size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import structlog
from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from rlboost.shared.errors import RLBoostError
from rlboost.shared.http.access import (
    Authenticator,
    FailureLimit,
    Principal,
    Scope,
    credential_of,
    needed_scope,
    system_token,
)
from rlboost.shared.http.problem import Problem

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 64 << 20
"""Limit on one request's body: above any job file or chunk, and above the chunk list of a model of 235 B parameters."""
SCOPE_KEY = "x-scope"
"""The scope of a route in the OpenAPI document."""
_EXPECTED = (Problem, HTTPException, RequestValidationError, RLBoostError)
"""The errors of which `server.create_app` makes responses."""
_FAILED = "the request failed for a reason that is not known: see 'request_failed' in the log of this service"
_DOCUMENTED = Depends(HTTPBearer(auto_error=False))
"""Shows in the OpenAPI document that a route needs a token; the route itself checks it."""

_PRINCIPAL_KEY = "rlboost.principal"
TOKEN_SCOPES: Mapping[Scope, Scope] = {"models": "read", "session": "job"}
"""Scope for which users create no tokens -> the least that includes it."""


_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., object])
BodyLimit = Callable[[], int]
"""Returns the maximum size of one request's body at present."""


def principal_of(request: Request) -> Principal:
    """Return who sent a request that a guard has checked."""
    principal: Principal = request.scope[_PRINCIPAL_KEY]
    return principal


def limits_body(limit: BodyLimit) -> Callable[[_Endpoint], _Endpoint]:
    """Declare a limit of a route's bodies in place of that of its router."""

    def declare(endpoint: _Endpoint) -> _Endpoint:
        endpoint.__dict__["body_limit"] = limit
        return endpoint

    return declare


MAX_JSON_LISTS, MAX_JSON_VALUES = 1 << 20, 1 << 22
"""Of the JSON of a request: two bytes may become an object of 64, and all are built for an error of one."""


def require_few_values(text: bytes) -> None:
    """Check that a JSON text has no more lists, objects and values than any request needs, before it is parsed.

    Raises:
        ValueError: it has.

    """
    n_lists, n_values = text.count(b"[") + text.count(b"{"), text.count(b",")
    if n_lists > MAX_JSON_LISTS or n_values > MAX_JSON_VALUES:
        raise ValueError(
            f"it has about {n_lists} lists and objects and {n_values} values, at most {MAX_JSON_LISTS} and "
            f"{MAX_JSON_VALUES} are read: send it in parts"
        )


class _Request(Request):
    """A request whose JSON has a limited number of values."""

    async def json(self) -> Any:
        """Return the body's value, which FastAPI builds in the service's loop."""
        try:
            require_few_values(await self.body())
        except ValueError as error:
            raise HTTPException(413, f"the body is too large: {error}") from error
        return await super().json()


class Guard:
    """Authenticates the requests to one service.

    Args:
        authenticate: who a bearer token belongs to.
        clock: monotonic seconds.

    """

    def __init__(self, authenticate: Authenticator, clock: Callable[[], float] = time.monotonic) -> None:
        self._authenticate = authenticate
        self._clock = clock
        self._failures = FailureLimit()

    @classmethod
    def of_token(cls, token: str) -> Guard:
        """Return a guard that accepts one token, for every route; an empty one rejects all requests."""
        return cls(system_token(token))

    def router(self, *, max_body_bytes: int = MAX_BODY_BYTES, **options: Any) -> APIRouter:
        """Return a router whose routes reject requests without a token of their scope, or with too large a body.

        Args:
            max_body_bytes: maximum size of one request's body.
            options: further arguments of `APIRouter`.

        """
        guard = self

        class GuardedRoute(APIRoute):
            def __init__(self, path: str, endpoint: Callable[..., Any], **arguments: Any) -> None:
                shown = {**(arguments.pop("openapi_extra", None) or {}), SCOPE_KEY: needed_scope(endpoint)}
                super().__init__(path, endpoint, openapi_extra=shown, **arguments)

            def get_route_handler(self) -> _Handler:
                handle, scope = super().get_route_handler(), needed_scope(self.endpoint)
                body_limit: BodyLimit | None = self.endpoint.__dict__.get("body_limit")

                async def guarded(request: Request) -> Response:
                    try:
                        await guard.check(request, scope)
                        limit = body_limit() if body_limit else max_body_bytes
                        return await handle(_Request(request.scope, _limited(request, limit)))
                    except _EXPECTED:
                        raise
                    except UnicodeEncodeError as error:
                        half = error.object[error.start]  # which JSON can have, and no encoding
                        detail = f"a text has {half!r}, half of a character that UTF-16 writes as two: leave it out"
                        raise Problem(422, "Invalid request", detail) from error
                    except Exception as error:
                        # Starlette would answer as text and close the connection.
                        log.exception("request_failed", method=request.method, path=request.url.path)
                        raise Problem(500, "Internal error", _FAILED) from error

                return guarded

        dependencies = [_DOCUMENTED, *options.pop("dependencies", ())]
        return APIRouter(route_class=GuardedRoute, dependencies=dependencies, **options)

    async def check(self, request: Request, scope: Scope) -> None:
        """Check the token of a request; `principal_of` then returns its holder.

        Raises:
            Problem: 401, it has none that is valid; 403, its scope is another one; 429, its address failed too often.

        """
        given = credential_of(request.headers)
        principal = await self._authenticate(given) if given else None
        if principal is None:
            raise self._unauthorized(request, given)
        if not principal.may(scope):
            needed = TOKEN_SCOPES.get(scope, scope)
            detail = (
                f"this route needs a token of scope {needed!r}, and this one has {principal.scope!r}: an administrator "
                f"creates one with 'rlboost token create'"
            )
            raise Problem(403, "Forbidden", detail)
        request.scope[_PRINCIPAL_KEY] = principal

    def _unauthorized(self, request: Request, given: str) -> Problem:
        address = request.client.host if request.client else ""
        # A request without any token is no guess.
        if given and (wait_s := self._failures.fail(address, self._clock())):
            detail = f"too many requests from {address} with an invalid token: try again in {wait_s} s"
            return Problem(429, "Too many failures", detail, headers={"Retry-After": str(wait_s)})
        detail = (
            "the token is missing, unknown or expired: send the header 'Authorization: Bearer <token>', or "
            "'x-api-key: <token>', with this system's token or one that was created with 'rlboost token create'"
        )
        return Problem(401, "Unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})


def _limited(request: Request, max_bytes: int) -> Receive:
    """Return the request's `receive`, which raises 413 as soon as the body is known to exceed the limit."""
    declared = request.headers.get("Content-Length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    n_bytes = 0

    async def receive() -> Message:
        nonlocal n_bytes
        message = await request.receive()
        n_bytes += len(message.get("body", b""))
        if n_bytes > max_bytes:
            raise _too_large(max_bytes)
        return message

    return receive


def _too_large(max_bytes: int) -> HTTPException:
    # FastAPI turns any other exception that is raised while it reads a body into a 400.
    return HTTPException(413, f"the body has more than {max_bytes} bytes: send a smaller one")
