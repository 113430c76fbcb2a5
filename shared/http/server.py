"""The HTTP base of every service: bearer token, RFC 9457 problems, `/healthz /readyz /metrics`, the server loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlboost.shared.errors import ConfigError, NotFound, Rejected, Retryable, RLBoostError, Unprocessable
from rlboost.shared.http.access import needs
from rlboost.shared.http.connections import KEEP_ALIVE_S, Connections, LimitedTransfer, limited, max_connections
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.problem import GUARDED_ERRORS, PROBLEM, Problem, problems
from rlboost.shared.http.server_url import server_url
from rlboost.shared.http.transfer_server import TransferServer
from rlboost.shared.process.lifecycle import Loop
from rlboost.shared.process.stalls import Stalls, Turnstile
from rlboost.shared.process.system import raise_open_files_limit
from rlboost.shared.process.waiting import Waits
from rlboost.shared.tls import ServerCertificate

# --- A process's current waits for Prometheus. Their subjects are no labels: they name steps and versions -------------


class WaitMetrics(Collector):
    """Reads the waits at the time of the scrape."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; 0 without a wait."""
        now, waits = time.time(), self._waits.current()
        oldest_s = max((now - wait.since for wait in waits), default=0.0)
        ratio = max(((now - wait.since) / wait.limit_s for wait in waits), default=0.0)
        yield GaugeMetricFamily("rlboost_wait_oldest_seconds", "How long the oldest current wait has lasted", oldest_s)
        yield GaugeMetricFamily(
            "rlboost_wait_limit_ratio",
            "Highest elapsed fraction of the limit of a current wait; at 1 the wait fails",
            ratio,
        )


# --- The server -------------------------------------------------------------------------------------------------------


_MAX_NAMED_FIELDS = 8
"""How many invalid fields the text of an error names; its `errors` has all."""
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
    app.add_middleware(_Paced)

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

    own_registry = CollectorRegistry()  # of this app: the process's registry takes each collector once
    app.state.stalls = Stalls()
    own_registry.register(app.state.stalls)
    if waits:
        own_registry.register(WaitMetrics(waits))
    guarded = guard.router(tags=["health"], responses=GUARDED_ERRORS)

    @guarded.get("/metrics", response_class=PlainTextResponse)
    @needs("read")
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        text = generate_latest(REGISTRY) + generate_latest(own_registry)
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


class _Paced:
    """Begins some of the requests that arrive together, then lets the event loop continue with what else is ready."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._turnstile.enter()
        await self._app(scope, receive, send)


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
        title = HTTPStatus(error.status_code).phrase
        answer = problem(request, error.status_code, title, str(error.detail))
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["Allow"] = _allowed_methods(app, request)
        return answer

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip()
        fields = [
            {"field": ".".join(map(str, item["loc"])), "error": _not_json(kind) if _is_text(item) else item["msg"]}
            for item in error.errors()
        ]
        detail = "; ".join(f"{each['field']}: {each['error']}" for each in fields[:_MAX_NAMED_FIELDS])
        return problem(request, 422, "Invalid request", detail, errors=fields)

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


def _is_text(error: Mapping[str, Any]) -> bool:
    """Return True if a body was not parsed as JSON, which FastAPI does by its `Content-Type`."""
    return error["loc"] == ("body",) and isinstance(error.get("input"), str | bytes)


def _not_json(content_type: str) -> str:
    given = f"is {content_type!r}" if content_type else "is missing"
    return f"the header Content-Type {given}: send 'Content-Type: application/json' and a JSON object"


def _allowed_methods(app: FastAPI, request: Request) -> str:
    """Return the methods of all routes with the request's path; Starlette names those of one route only."""
    routes = [
        route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
    ]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def _bind_advice(error: OSError, given_by: str) -> str:
    another = "choose another port" + (f" with {given_by}" if given_by else "")
    if isinstance(error, socket.gaierror):
        return "give an address of this machine, or a name that has one"
    if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
        return (
            "it is no address of this machine: give one that it has, and where a NAT gives it another one outside, a "
            "private one that workers can reach, such as a VPN's"
        )
    if error.errno == errno.EACCES:
        return f"only root may use this port: {another}, above 1023"
    return f"stop the process that uses it, or {another}"


def bind(host: str, port: int, given_by: str = "") -> socket.socket:
    """Return a bound socket; port 0 takes a free one. `given_by` is what chooses another port, for the error.

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
        where = server_url(host, port, tls=False).partition("//")[2]
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror or error}; {_bind_advice(error, given_by)}"
        ) from error
    return sock


def _limited_config(app: FastAPI, connections: Connections, **options: Any) -> uvicorn.Config:
    """Return how uvicorn serves an app, with limits of its connections, which are to be swept."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S, ws="none", **options
    )
    config.load()
    protocol: Any = config.http_protocol_class
    config.http_protocol_class = limited(protocol, connections)
    return config


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve an app until a signal, in a process that does nothing else; exit with 3 if it does not start."""
    server = _Swept(app, host, port)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise SystemExit(3)


class _Swept(uvicorn.Server):
    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._connections = Connections(max_connections(raise_open_files_limit()))
        super().__init__(_limited_config(app, self._connections, host=host, port=port))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and close the connections of silent clients."""
        sweeping = asyncio.create_task(self._connections.keep_swept(), name="sweep-connections")
        try:
            await super().serve(sockets)
        finally:
            sweeping.cancel()


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
        config = _limited_config(
            app,
            connections := Connections(max_connections(raise_open_files_limit())),
            timeout_graceful_shutdown=5,
            lifespan="off",
            ssl_certfile=certificate.certificate if certificate else None,
            ssl_keyfile=certificate.key if certificate else None,
        )
        if transfers is not None and certificate is None:
            app_protocol: Any = config.http_protocol_class
            # The server only calls it, so any callable that returns a protocol will do.
            config.http_protocol_class = lambda **options: LimitedTransfer(
                transfers, partial(app_protocol, **options), connections
            )  # type: ignore[assignment]
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="uvicorn")
        stopping = asyncio.create_task(stop.wait(), name="uvicorn-stop")
        sweeping = asyncio.create_task(connections.keep_swept(), name="sweep-connections")
        stalls: Stalls = getattr(app.state, "stalls", None) or Stalls()  # an app of `create_app` shows them
        measuring = asyncio.create_task(stalls.run(stop), name="measure-stalls")
        try:
            await asyncio.wait({serving, stopping, sweeping}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            if transfers is not None:
                await transfers.close()
            await serving
            if sweeping.done():  # it never returns: its error is the server's
                sweeping.result()
        finally:
            stopping.cancel()
            sweeping.cancel()
            measuring.cancel()

    return loop


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `shared.process.lifecycle`."""
        yield
