"""Every route of every service admits the scopes of this table, and no others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from rlboost.services.rollout_manager.access import REFRESH_S, AccessToken, TokenTable, digest_of_secret
from rlboost.services.rollout_manager.api import jobs as manager_api
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.serving.routes import add_openai_routes
from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_worker.api import notice_routes
from rlboost.services.trainer import __main__ as trainer_main
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.http.access import Principal, TokenScope
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.server import create_app
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashDelete, HashSet
from tests.support.memory_bus import MemoryBus

SYSTEM = "system-token"
EVERYWHERE = {"GET /metrics": "read", "GET /openapi.json": "read"}
MANAGER = EVERYWHERE | {
    "POST /v1/jobs": "job",
    "GET /v1/jobs": "read",
    "GET /v1/jobs/{job_id}": "read",
    "GET /v1/jobs/{job_id}/spec": "read",
    "GET /v1/jobs/{job_id}/tokenizer": "worker",
    "POST /v1/jobs/{job_id}/pause": "job",
    "POST /v1/jobs/{job_id}/resume": "job",
    "POST /v1/jobs/{job_id}/cancel": "job",
    "POST /v1/jobs/{job_id}/profile": "job",
    "POST /v1/jobs/{job_id}/trainer": "trainer",
    "PUT /v1/jobs/{job_id}/trainer": "trainer",
    "DELETE /v1/jobs/{job_id}/trainer": "trainer",
    "POST /v1/jobs/{job_id}/groups": "trainer",
    "GET /v1/jobs/{job_id}/finished": "trainer",
    "POST /v1/jobs/{job_id}/steps": "trainer",
    "POST /v1/jobs/{job_id}/end": "trainer",
    "GET /v1/jobs/{job_id}/audit": "read",
    "GET /v1/jobs/{job_id}/cost": "read",
    "GET /v1/jobs/{job_id}/metrics": "read",
    "GET /v1/jobs/{job_id}/samples": "read",
    "GET /v1/jobs/{job_id}/events": "read",
    "GET /v1/jobs/{job_id}/logs": "read",
    "POST /v1/join": "worker",
    "GET /v1/join": "worker",
    "GET /v1/scrape-targets": "read",
    "GET /v1/workers": "read",
    "POST /v1/workers/{worker_id}/drain": "admin",
    "GET /v1/fleet": "read",
    "POST /v1/fleet/scale": "admin",
    "GET /v1/weights": "read",
    "POST /v1/tokens": "admin",
    "GET /v1/tokens": "admin",
    "DELETE /v1/tokens/{token_id}": "admin",
    "GET /v1/models": "read",
    "GET /v1/models/{model:path}": "read",
    "POST /v1/completions": "job",
    "POST /v1/chat/completions": "job",
    "POST /v1/responses": "job",
    "POST /v1/messages": "job",
    "POST /v1/messages/count_tokens": "job",
    "POST /v1/jobs/{job_id}/sessions/next": "agent",
    "POST /v1/jobs/{job_id}/sessions/renew": "agent",
    "POST /v1/sessions/{session}/reward": "job",
}
WORKER = EVERYWHERE | {"POST /v1/notice": "admin"}
ADMITTED = {
    "admin": {"admin"},
    "agent": {"admin", "agent", "job"},
    "job": {"admin", "job"},
    "read": {"admin", "job", "read"},
    "trainer": {"admin", "job", "trainer"},
    "worker": {"admin", "worker"},
}
SCOPES: tuple[TokenScope, ...] = ("admin", "agent", "job", "read", "trainer", "worker")
_CLIENTS = itertools.count()


def stored(scope: TokenScope, *, expires_at: float | None = None) -> AccessToken:
    return AccessToken(
        id=f"{scope}-token",
        scope=scope,
        name="",
        sha256=digest_of_secret(f"secret of {scope}"),
        created_at=0.0,
        expires_at=expires_at,
    )


async def save(bus: MemoryBus, token: AccessToken) -> None:
    await bus.transact([HashSet(names.TOKENS, {token.id: token.model_dump_json()})])


def manager_app(bus: MemoryBus) -> FastAPI:
    def openai(router: Any, manager: Any, bus: Any, settings: Any) -> None:
        add_openai_routes(
            router, manager, bus, settings, find_model_folder=Mock(), load_model_files=Mock(), text=Mock()
        )

    manager = Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0)  # it does not lead: admitted requests get a 503
    return manager_api.build(manager, bus, Settings(token=SYSTEM), [openai])


def worker_app() -> FastAPI:
    guard = Guard.of_token(SYSTEM)
    app = create_app("worker", guard=guard, not_ready_reason=lambda: None)
    app.include_router(notice_routes(Mock(), guard))
    return app


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path not in {"/healthz", "/readyz"}:
            yield from ((method, route.path) for method in sorted(route.methods))


async def status(app: FastAPI, method: str, path: str, secret: str | None) -> int:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(f"client-{next(_CLIENTS)}", 1))
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return (await client.request(method, path, headers=headers)).status_code


@pytest.mark.parametrize(
    ("app", "table"),
    [
        (manager_app(MemoryBus()), MANAGER),
        (worker_app(), WORKER),
        (trainer_main.create_app(Mock(), SYSTEM, Waits()), EVERYWHERE),
    ],
)
async def test_routes_of_services_are_those_of_the_table(app: FastAPI, table: dict[str, str]) -> None:
    assert {f"{method} {path}" for method, path in routes(app)} == set(table)
    for method, path in routes(app):
        assert await status(app, method, path, SYSTEM) not in {401, 403}
        for secret in (None, "", "another"):
            assert await status(app, method, path, secret) == 401


async def test_manager_route_admits_the_scopes_that_include_its_own() -> None:
    bus = MemoryBus()
    for scope in SCOPES:
        await save(bus, stored(scope))
    app = manager_app(bus)
    for method, path in routes(app):
        for scope in SCOPES:
            expected = scope in ADMITTED[MANAGER[f"{method} {path}"]]
            answer = await status(app, method, path, f"secret of {scope}")
            assert (answer not in {401, 403}, answer == 403) == (expected, not expected), (method, path, scope, answer)


async def test_manager_route_rejects_an_expired_token() -> None:
    bus = MemoryBus()
    await save(bus, stored("admin", expires_at=time.time() - 1.0))
    app = manager_app(bus)
    for method, path in routes(app):
        assert await status(app, method, path, "secret of admin") == 401


async def test_refusal_names_the_scope_that_is_needed() -> None:
    bus = MemoryBus()
    await save(bus, stored("read"))
    transport = httpx.ASGITransport(manager_app(bus))
    async with httpx.AsyncClient(transport=transport, base_url="http://manager") as client:
        answer = await client.post("/v1/jobs", json={}, headers={"Authorization": "Bearer secret of read"})
    assert answer.status_code == 403
    assert "scope 'job'" in answer.json()["detail"]


async def test_revoked_token_is_rejected_when_the_table_is_read_again() -> None:
    bus, now_s = MemoryBus(), [0.0]
    await save(bus, stored("read"))
    table = TokenTable(bus, SYSTEM, monotonic=lambda: now_s[0])
    assert (await table.authenticate("secret of read")) is not None
    await bus.transact([HashDelete(names.TOKENS, ("read-token",))])
    now_s[0] += REFRESH_S
    assert (await table.authenticate("secret of read")) is None


async def test_token_created_while_the_table_is_read_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus()
    table, read = TokenTable(bus, SYSTEM), bus.hash_all

    async def read_before_the_change(key: str) -> dict[str, str]:
        monkeypatch.undo()
        stored_before = await read(key)
        await save(bus, stored("read"))
        table.invalidate()
        return stored_before

    monkeypatch.setattr(bus, "hash_all", read_before_the_change)
    assert (await table.authenticate("secret of read")) is None
    assert (await table.authenticate("secret of read")) is not None


async def test_configured_join_token_admits_to_join_only() -> None:
    table = TokenTable(MemoryBus(), SYSTEM, "join")
    assert await table.authenticate("join") == Principal("join token", "worker")
    assert await TokenTable(MemoryBus(), SYSTEM).authenticate("") is None


async def test_token_is_unknown_while_redis_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unavailable(key: str) -> dict[str, str]:
        raise BusUnavailable("Redis does not answer")

    bus, now_s = MemoryBus(), [0.0]
    await save(bus, stored("read"))
    table = TokenTable(bus, SYSTEM, monotonic=lambda: now_s[0])
    assert await table.authenticate("secret of read")
    monkeypatch.setattr(bus, "hash_all", unavailable)
    now_s[0] += REFRESH_S
    with pytest.raises(Problem) as caught:
        await table.authenticate("secret of read")
    assert caught.value.status == 503
    assert (await table.authenticate(SYSTEM)) is not None


async def test_damaged_record_of_a_token_grants_nothing() -> None:
    bus = MemoryBus()
    await bus.transact([HashSet(names.TOKENS, {"a": "{}", "b": '{"scope": "root"}'})])
    await save(bus, stored("job"))
    table = TokenTable(bus, SYSTEM)
    assert [token.scope for token in await table.tokens()] == ["job"]
