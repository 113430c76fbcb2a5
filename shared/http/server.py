"""The HTTP base of every service: bearer token, RFC 9457 problems, `/healthz /readyz /metrics`, the server loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from rlboost.shared.errors import ConfigError, NotFound, Rejected, Retryable, RLBoostError, Unprocessable
from rlboost.shared.http.authentication import needs
from rlboost.shared.http.documented import GUARDED_ERRORS, problems
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.problem import PROBLEM, Problem
from rlboost.shared.http.transfer_server import TransferConnection, TransferServer
from rlboost.shared.http.wait_metrics import WaitMetrics
from rlboost.shared.process.lifecycle import Loop
from rlboost.shared.process.waiting import Waits
from rlboost.shared.tls import ServerCertificate

ErrorFormat = Callable[[str, str, Mapping[str, Any]], tuple[int, dict[str, Any]] | None]
"""(method, path, problem document) -> status and JSON body of the error; None to send the document."""


def create_app(
    title: str,
    *,
    guard: Guard,
    not_ready_reason: Callable[[], str | None],
    waits: Waits | None = None,
    error_format: ErrorFormat | None = None,
    metrics_path: str = "",
) -> FastAPI:
    """Return an app with the routes that every service has.

    Args:
        title: the service's name, for the OpenAPI document.
        guard: authenticates requests to `/metrics` and `/openapi.json`; `/healthz` and `/readyz` are open.
        not_ready_reason: returns what the service lacks, or None if it is ready.
        waits: shown by `/readyz` and `/metrics`.
        error_format: for routes whose clients do not expect problem documents.
        metrics_path: another path of the metrics, not to be guessed, for requests without a token; empty for none.

    """
    app = FastAPI(title=title, openapi_url=None)

    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Answer 200 while the process lives; needs no token."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"], responses=problems(503))
    async def readyz() -> dict[str, Any]:
        """Answer 200 when the service can work, 503 with the reason otherwise; needs no token."""
        missing = not_ready_reason()
        waiting = [wait.public() for wait in waits.current()] if waits else []
        state: dict[str, Any] = {"ready": missing is None, "missing": missing, "waiting": waiting}
        if missing is not None:
            raise Problem(503, "Not ready", missing, **state)
        return state

    wait_registry = CollectorRegistry()  # of this app: the process's registry takes each collector once
    if waits:
        wait_registry.register(WaitMetrics(waits))
    guarded = guard.router(tags=["health"], responses=GUARDED_ERRORS)

    @guarded.get("/metrics", response_class=PlainTextResponse)
    @needs("read")
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        text = generate_latest(REGISTRY) + generate_latest(wait_registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    if metrics_path:
        app.get(metrics_path, include_in_schema=False)(metrics)

    @guarded.get("/openapi.json")
    @needs("read")
    async def openapi() -> dict[str, Any]:
        """Return the OpenAPI document of this service."""
        return app.openapi()

    app.include_router(guarded)

    _add_problem_handlers(app, error_format)
    return app


def _problem_response(
    error_format: ErrorFormat | None, request: Request, status: int, title: str, detail: str, **extra: Any
) -> JSONResponse:
    document = {"type": "about:blank", "title": title, "status": status, "detail": detail, **extra}
    if error_format and (other := error_format(request.method, request.url.path, document)):
        status, body = other
        return JSONResponse(body, status)
    return JSONResponse(document, status, media_type=PROBLEM)


def _add_problem_handlers(app: FastAPI, error_format: ErrorFormat | None) -> None:
    problem = partial(_problem_response, error_format)

    @app.exception_handler(Problem)
    async def _(request: Request, error: Problem) -> Response:
        answer = problem(request, error.status, error.title, error.detail, **error.extra)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        answer = problem(request, error.status_code, str(error.detail), str(error.detail))
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["Allow"] = _allowed_methods(app, request)
        return answer

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        fields = [{"field": ".".join(map(str, item["loc"])), "error": item["msg"]} for item in error.errors()]
        return problem(request, 422, "Invalid request", "correct the fields listed in 'errors'", errors=fields)

    @app.exception_handler(RLBoostError)
    async def _(request: Request, error: RLBoostError) -> Response:
        if isinstance(error, NotFound):
            return problem(request, 404, "Not found", str(error))
        if isinstance(error, Rejected):
            return problem(request, 409, "Conflict", str(error))
        if isinstance(error, Unprocessable):
            return problem(request, 422, "Not usable", str(error))
        if isinstance(error, Retryable):
            return problem(request, 503, "Unavailable", f"{error}; try again")
        return problem(request, 500, "Internal error", str(error))


def _allowed_methods(app: FastAPI, request: Request) -> str:
    """Return the methods of all routes with the request's path; Starlette names those of one route only."""
    routes = [
        route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
    ]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 takes a free one.

    Raises:
        ConfigError: the port is in use, or the address does not belong to this machine.

    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop the process that uses it, or choose another port"
        ) from error
    return sock


def server_loop(
    app: FastAPI,
    sock: socket.socket,
    certificate: ServerCertificate | None = None,
    *,
    transfers: TransferServer | None = None,
) -> Loop:
    """Return a loop that serves `app` on `sock` until the stop; active requests get 5 s to finish.

    Args:
        app: responds to all requests but those that `transfers` takes: plain downloads and uploads.
        sock: bound.
        certificate: to serve HTTPS only. Then `app` responds to every request: threads neither encrypt nor decrypt.
        transfers: closed at the stop.

    """

    async def loop(stop: asyncio.Event) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
            lifespan="off",
            ssl_certfile=certificate.certificate if certificate else None,
            ssl_keyfile=certificate.key if certificate else None,
        )
        config.load()
        if transfers is not None and certificate is None:
            app_protocol = config.http_protocol_class
            # The server only calls it, so any callable that returns a protocol will do.
            config.http_protocol_class = lambda **options: TransferConnection(
                transfers, partial(app_protocol, **options)
            )  # type: ignore[assignment]
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="uvicorn")
        stopping = asyncio.create_task(stop.wait(), name="uvicorn-stop")
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            if transfers is not None:
                await transfers.close()
            await serving
        finally:
            stopping.cancel()

    return loop


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `shared.process.lifecycle`."""
        yield
