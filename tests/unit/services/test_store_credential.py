"""Workers download weights with credentials that expire, and that the manager renews."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from rlboost.services.rollout_manager.fleet_loops import StoreCredentials
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.weight_store import api as store_api
from rlboost.shared.http.access import (
    Publishing,
    credential_holder,
    issue_publishing_credential,
    issue_store_credential,
    may_download,
    may_upload,
    sign,
    store_authenticator,
    store_principal,
)
from rlboost.shared.http.guard import Guard
from rlboost.shared.messages import StoreCredential
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from tests.support.builders import worker_joined
from tests.support.memory_bus import MemoryBus

TOKEN = "token"
NOW, LIFE_S = 1000.0, 100.0
CREDENTIAL = issue_store_credential(TOKEN, "spot:1-ab", NOW, LIFE_S)
DOWNLOADS = {
    "GET /v1/chunk-directory",
    "GET /v1/chunks/{digest}",
    "HEAD /v1/chunks/{digest}",
    "POST /v1/chunks/{digest}/verify",
    "GET /v1/models",
    "GET /v1/models/{job_id}",
    "GET /v1/models/{job_id}/versions/{version}",
    "GET /v1/models/{job_id}/versions/{version}/route",
}
OTHERS = {
    "GET /metrics",
    "GET /openapi.json",
    "PUT /v1/chunks/{digest}",
    "POST /v1/chunks/missing",
    "POST /v1/chunks/apply",
    "GET /v1/damaged-chunks",
    "DELETE /v1/models/{job_id}",
    "GET /v1/models/{job_id}/head",
    "PUT /v1/models/{job_id}/versions/{version}/parts/{rank}",
    "POST /v1/models/{job_id}/versions/{version}/commit",
    "POST /v1/models/{job_id}/versions/{version}/pin",
    "DELETE /v1/models/{job_id}/versions/{version}/pin",
}
_CLIENTS = itertools.count()


def test_credential_is_valid_until_it_expires() -> None:
    assert credential_holder(CREDENTIAL, TOKEN, NOW + LIFE_S - 1) == "spot:1-ab"
    assert credential_holder(CREDENTIAL, TOKEN, NOW + LIFE_S) is None


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "weights",
        "weights:::",
        CREDENTIAL.replace("spot:1-ab", "spot:2-ab"),
        CREDENTIAL.replace("1100", "9999"),
        issue_store_credential("another", "w", NOW),
        f"weights:w:9999:{sign(TOKEN, 'chunk', 'w:9999')}",
        f"weights:w:9999:{sign(TOKEN, 'leader', 'w:9999')}",
    ],
)
def test_forged_credential_is_refused(forged: str) -> None:
    assert credential_holder(forged, TOKEN, NOW) is None


def test_empty_token_makes_no_credential_valid() -> None:
    assert credential_holder(issue_store_credential("", "w", NOW), "", NOW) is None


def store_app(now: float) -> FastAPI:
    guard = Guard(store_authenticator(TOKEN, lambda: now))
    return store_api.create(Mock(), guard=guard, not_ready_reason=lambda: None, waits=Waits(), metrics=Mock())


async def statuses(app: FastAPI, secret: str) -> dict[str, int]:
    """Return the status of every route for a bearer token."""
    found = {}
    for route in app.routes:
        if not isinstance(route, APIRoute) or route.path in {"/healthz", "/readyz"}:
            continue
        for method in route.methods:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(f"c-{next(_CLIENTS)}", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://store") as client:
                answer = await client.request(method, route.path, headers={"Authorization": f"Bearer {secret}"})
            found[f"{method} {route.path}"] = answer.status_code
    return found


async def test_credential_admits_downloads_only() -> None:
    found = await statuses(store_app(NOW), CREDENTIAL)
    assert set(found) == DOWNLOADS | OTHERS
    assert {route for route, status in found.items() if status not in {401, 403}} == DOWNLOADS
    assert {route for route, status in found.items() if status == 403} == OTHERS


async def test_store_admits_the_system_token_and_no_expired_credential() -> None:
    assert not {401, 403} & set((await statuses(store_app(NOW), TOKEN)).values())
    assert set((await statuses(store_app(NOW + LIFE_S), CREDENTIAL)).values()) == {401}


class Renewal:
    """A leading manager on a fake bus with one worker, and the renewal of credentials under a manual clock."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.manager = Manager(self.bus, lease_s=1000.0, redis_limit_s=1.0)
        self.now = NOW
        self.credentials = StoreCredentials(self.manager, TOKEN, life_s=LIFE_S, clock=lambda: self.now)

    async def start(self) -> None:
        assert await self.manager.try_lead()
        await self.bus.append(names.WORKER_HEARTBEATS, worker_joined("w-1"))
        await self.manager.turn()

    async def sent(self) -> list[str]:
        """Renew, and return all credentials that the worker has got."""
        self.credentials.renew()
        await self.manager.turn()
        return await self.received()

    async def received(self) -> list[str]:
        """Return all credentials that the worker has got."""
        entries = await self.bus.read({names.worker_commands("w-1"): START})
        return [entry.message.credential for entry in entries if isinstance(entry.message, StoreCredential)]


async def test_manager_renews_a_credential_before_half_of_its_life() -> None:
    renewal = Renewal()
    await renewal.start()
    (first,) = await renewal.sent()
    assert credential_holder(first, TOKEN, NOW) == "w-1"
    renewal.now += 0.39 * LIFE_S
    assert len(await renewal.sent()) == 1
    renewal.now = NOW + 0.4 * LIFE_S
    of_a_clock_ahead = renewal.now + LIFE_S * 35 / 60  # docs/failure-modes.md: 35 minutes of an hour
    assert credential_holder(first, TOKEN, of_a_clock_ahead) == "w-1"
    _, second = await renewal.sent()
    assert credential_holder(second, TOKEN, NOW + LIFE_S) == "w-1"


async def test_recovered_manager_renews_all_credentials() -> None:
    renewal = Renewal()
    await renewal.start()
    assert len(await renewal.sent()) == 1
    assert await renewal.manager.try_lead()
    assert len(await renewal.sent()) == 2


async def test_renewal_changes_the_world_in_the_next_turn_only() -> None:
    renewal = Renewal()
    await renewal.start()
    renewal.credentials.renew()
    assert not await renewal.received()


def test_files_are_sent_to_holders_of_a_valid_token_only() -> None:
    def may(authorization: str, now: float = NOW) -> bool:
        return may_download(authorization, TOKEN, lambda: now)

    assert may(f"Bearer {CREDENTIAL}")
    assert may(f"bearer {TOKEN}")
    assert not may(f"Bearer {CREDENTIAL}", NOW + LIFE_S)
    assert not any(may(authorization) for authorization in ("", "Bearer ", CREDENTIAL, "Bearer other"))


def test_files_are_received_from_trainers_only() -> None:
    def may(authorization: str, now: float = NOW) -> bool:
        return may_upload(authorization, TOKEN, lambda: now)

    publishing = issue_publishing_credential(TOKEN, Publishing("sums-1", 3), NOW, LIFE_S)
    assert may(f"Bearer {TOKEN}")
    assert may(f"Bearer {publishing}")
    assert not may(f"Bearer {publishing}", NOW + LIFE_S)
    assert not may(f"Bearer {publishing.replace(':3:', ':4:')}")
    assert not any(may(given) for given in (f"Bearer {CREDENTIAL}", "", "Bearer ", TOKEN, "Bearer other"))


def test_publishing_credential_names_its_job_and_epoch_and_grants_nothing_else() -> None:
    credential = issue_publishing_credential(TOKEN, Publishing("sums-1", 3), NOW, LIFE_S)
    principal = store_principal(credential, TOKEN, NOW)
    assert principal is not None
    assert Publishing.parse(principal.subject) == ("sums-1", 3)
    assert principal.may("publish")
    assert not any(
        principal.may(scope) for scope in ("admin", "job", "read", "session", "trainer", "weights", "worker")
    )
