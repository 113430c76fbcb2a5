"""Routes that check the token and the size of a request's body before they read the body.

FastAPI parses a body before it resolves dependencies, so a dependency that checks the token would let anyone make the
service hold and parse a body of any size.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from rlboost.shared.http.problem import Problem

MAX_BODY_BYTES = 64 << 20
"""Of one request: more than any job file or chunk, and than the chunk list of a model of 235 B parameters."""
_DOCUMENTED = Depends(HTTPBearer(auto_error=False))
"""Shows in the OpenAPI document that a route needs the token; the route itself checks it."""

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def guarded_router(token: str, *, max_body_bytes: int = MAX_BODY_BYTES, **options: Any) -> APIRouter:
    """Return a router whose routes reject requests without this bearer token, or with too large a body.

    Args:
        token: the system's token; an empty one rejects all requests.
        max_body_bytes: of one request.
        options: further arguments of `APIRouter`.

    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> _Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                _check_token(request, token)
                return await handle(Request(request.scope, _limited(request, max_body_bytes)))

            return guarded

    return APIRouter(route_class=GuardedRoute, dependencies=[_DOCUMENTED, *options.pop("dependencies", ())], **options)


def is_authorized(authorization: str, token: str) -> bool:
    """Return True if the `Authorization` header carries this bearer token; with an empty token, none does."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and bool(token) and hmac.compare_digest(given.strip().encode(), token.encode())


def _check_token(request: Request, token: str) -> None:
    if not is_authorized(request.headers.get("Authorization", ""), token):
        raise Problem(401, "Unauthorized", "send the header 'Authorization: Bearer <token>' with this system's token")


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
