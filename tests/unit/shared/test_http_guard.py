"""No service reads a body before it has checked the token and the body's size."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute

from rlboost.services.rollout_manager.api import jobs as manager_api
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.serving.routes import add_openai_routes
from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_worker.api import notice_routes
from rlboost.services.weight_store import api as store_api
from rlboost.shared.http.access import ADDRESSES_MAX, BURST, FailureLimit, system_token
from rlboost.shared.http.guard import MAX_JSON_LISTS, Guard
from rlboost.shared.http.server import create_app
from rlboost.shared.process.waiting import Waits
from tests.support.memory_bus import MemoryBus

TOKEN = "token"
LIMIT_BYTES = 1000
OPEN = {"/healthz", "/readyz"}
_CLIENTS = itertools.count()


def manager_app() -> FastAPI:
    def openai(router: Any, manager: Any, bus: Any, settings: Any) -> None:
        add_openai_routes(
            router, manager, bus, settings, find_model_folder=Mock(), load_model_files=Mock(), text=Mock()
        )

    manager = Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0)
    return manager_api.build(manager, MemoryBus(), Settings(token=TOKEN), [openai])


def worker_app() -> FastAPI:
    app = create_app("worker", guard=Guard.of_token(TOKEN), not_ready_reason=lambda: None)
    app.include_router(notice_routes(Mock(), Guard.of_token(TOKEN)))
    return app


APPS = {
    "manager": manager_app(),
    "worker": worker_app(),
    "weight_store": store_api.create(
        Mock(), guard=Guard.of_token(TOKEN), not_ready_reason=lambda: None, waits=Waits(), metrics=Mock()
    ),
}
GUARDED = [
    pytest.param(app, method, route.path, id=f"{name} {method} {route.path}")
    for name, app in APPS.items()
    for route in app.routes
    if isinstance(route, APIRoute) and route.path not in OPEN
    for method in sorted(route.methods)
]


class Body:
    """A body that counts how much of it is read."""

    def __init__(self, n_blocks: int = 100) -> None:
        self.n_blocks, self.n_read = n_blocks, 0

    async def blocks(self) -> AsyncIterator[bytes]:
        for _ in range(self.n_blocks):
            self.n_read += 1
            yield bytes(100)


async def send(
    app: FastAPI, method: str, path: str, body: Body, headers: dict[str, str], address: str = ""
) -> httpx.Response:
    """Send a request from an address, by default from a new one: failures are limited for each."""
    transport = httpx.ASGITransport(app, client=(address or f"client-{next(_CLIENTS)}", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.request(method, path, content=body.blocks(), headers=headers)


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer other", "Basic token", f"{TOKEN}"])
@pytest.mark.parametrize(("app", "method", "path"), GUARDED)
async def test_route_without_the_token_reads_no_body(app: FastAPI, method: str, path: str, authorization: str) -> None:
    body = Body()
    answer = await send(app, method, path, body, {"Authorization": authorization} if authorization else {})
    assert (answer.status_code, body.n_read) == (401, 0)


def test_every_service_has_guarded_routes() -> None:
    assert {str(param.id).partition(" ")[0] for param in GUARDED} == set(APPS)


def limited_app() -> tuple[FastAPI, list[int]]:
    """Return an app with a route for JSON and one for raw bytes, and the sizes that reached them."""
    app, sizes = create_app("limited", guard=Guard.of_token(TOKEN), not_ready_reason=lambda: None), list[int]()
    router = Guard.of_token(TOKEN).router(max_body_bytes=LIMIT_BYTES)

    @router.post("/json")
    async def json_body(body: list[int]) -> None:
        sizes.append(len(body))

    @router.post("/raw")
    async def raw_body(request: Request) -> None:
        sizes.append(len(await request.body()))

    app.include_router(router)
    return app, sizes


@pytest.mark.parametrize("path", ["/json", "/raw"])
async def test_body_over_the_limit_is_refused_when_the_limit_is_reached(path: str) -> None:
    app, sizes = limited_app()
    body = Body()
    answer = await send(app, "POST", path, body, {"Authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, sizes) == (413, [])
    assert f"{LIMIT_BYTES} bytes" in answer.json()["detail"]
    assert body.n_read <= LIMIT_BYTES // 100 + 1


async def test_body_that_declares_too_many_bytes_is_not_read() -> None:
    app, _ = limited_app()
    body = Body()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Length": "10000"}
    assert (await send(app, "POST", "/raw", body, headers)).status_code == 413
    assert body.n_read == 0


async def test_body_of_exactly_the_limit_is_taken() -> None:
    app, sizes = limited_app()
    answer = await send(app, "POST", "/raw", Body(LIMIT_BYTES // 100), {"Authorization": f"bearer {TOKEN}"})
    assert (answer.status_code, sizes) == (200, [LIMIT_BYTES])


async def test_json_of_too_many_lists_is_refused_before_it_is_parsed() -> None:
    """It would take 32 times its size in the service's memory, and hold up its loop for seconds."""
    body = b"[" + b"[]," * MAX_JSON_LISTS + b"0]"
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    transport = httpx.ASGITransport(APPS["weight_store"], client=("many", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answer = await client.post("/v1/chunks/missing", content=body, headers=headers)
    assert (answer.status_code, str(MAX_JSON_LISTS) in answer.json()["detail"]) == (413, True)


async def test_half_of_a_character_is_rejected_by_name() -> None:
    """JSON can have it, no encoding can: nothing could store it."""
    app = create_app("texts", guard=Guard.of_token(TOKEN), not_ready_reason=lambda: None)
    router = Guard.of_token(TOKEN).router()

    @router.post("/texts")
    async def texts(body: dict[str, int]) -> list[str]:
        return [text.encode().hex() for text in body]

    app.include_router(router)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        answer = await client.post("/texts", content=b'{"\\ud800": 1}', headers=headers)
        twice = await client.post("/texts", content=b'{"steps": 1, "steps": 2}', headers=headers)
        deep = await client.post("/texts", content=b"[" * 100_000, headers=headers)
    assert (answer.status_code, "half of a character" in answer.text) == (422, True)
    assert (twice.status_code, "the key 'steps' is there twice: remove one" in twice.text) == (422, True)
    assert deep.status_code == 422


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": TOKEN}, 200),
        ({"X-Api-Key": f" {TOKEN} "}, 200),
        ({"x-api-key": "other"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": TOKEN, "Authorization": "Bearer other"}, 401),
        ({"x-api-key": "other", "Authorization": f"Bearer {TOKEN}"}, 200),
        ({"x-api-key": TOKEN, "Authorization": "Basic other"}, 200),
    ],
)
async def test_api_key_is_a_token_where_no_bearer_token_is_given(headers: dict[str, str], status: int) -> None:
    app, _ = limited_app()
    assert (await send(app, "GET", "/metrics", Body(0), headers)).status_code == status


async def test_empty_token_rejects_every_request() -> None:
    app = create_app("unset", guard=Guard.of_token(""), not_ready_reason=lambda: None)
    assert (await send(app, "GET", "/metrics", Body(0), {"Authorization": "Bearer "})).status_code == 401


def clocked_app() -> tuple[FastAPI, list[float]]:
    """Return an app whose guard reads its clock from a list of one time."""
    now_s = [0.0]
    return create_app(
        "clocked", guard=Guard(system_token(TOKEN), clock=lambda: now_s[0]), not_ready_reason=lambda: None
    ), now_s


async def fail(app: FastAPI, address: str) -> httpx.Response:
    return await send(app, "GET", "/metrics", Body(0), {"Authorization": "Bearer guess"}, address)


async def test_address_that_fails_too_often_gets_429_with_a_time() -> None:
    app, now_s = clocked_app()
    assert {(await fail(app, "a")).status_code for _ in range(BURST)} == {401}
    refused = await fail(app, "a")
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert (await fail(app, "b")).status_code == 401
    now_s[0] += 1.0
    assert [(await fail(app, "a")).status_code for _ in range(2)] == [401, 429]


async def test_valid_token_is_never_limited() -> None:
    app, _ = clocked_app()
    for _ in range(BURST + 1):
        await fail(app, "a")
    for _ in range(2 * BURST):
        answer = await send(app, "GET", "/metrics", Body(0), {"Authorization": f"Bearer {TOKEN}"}, "a")
        assert answer.status_code == 200


async def test_requests_without_a_token_are_not_limited() -> None:
    app, _ = clocked_app()
    assert {(await send(app, "GET", "/metrics", Body(0), {}, "a")).status_code for _ in range(2 * BURST)} == {401}


def test_failures_of_many_addresses_take_bounded_memory() -> None:
    limit = FailureLimit()
    for number in range(ADDRESSES_MAX + 100):
        limit.fail(str(number), 0.0)
    assert len(limit._buckets) == ADDRESSES_MAX
