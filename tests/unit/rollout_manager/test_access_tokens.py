"""Access tokens over REST and on the command line: only digests of secrets are stored."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.client import Client
from rlboost.commands import machines as commands
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.streams import names
from tests.support.eventually import eventually
from tests.support.fake_rest import FakeRest, ok, problem
from tests.support.memory_bus import MemoryBus


class System:
    """A leading manager on a fake bus."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.manager = Manager(self.bus, lease_s=1.0, redis_limit_s=1.0)
        transport = httpx.ASGITransport(build(self.manager, self.bus, Settings(token="t")))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://manager/v1")

    async def request(self, method: str, path: str, body: object = None, secret: str = "t") -> httpx.Response:
        return await self.http.request(method, path, json=body, headers={"Authorization": f"Bearer {secret}"})


@pytest.fixture
async def system() -> AsyncIterator[System]:
    system = System()
    assert await system.manager.try_lead()
    yield system
    await system.http.aclose()


async def test_created_token_works_until_it_is_revoked(system: System) -> None:
    created = (await system.request("POST", "/tokens", {"scope": "read", "name": "grafana"})).json()
    assert (await system.request("GET", "/jobs", secret=created["secret"])).status_code == 200
    assert (await system.request("POST", "/jobs", {}, secret=created["secret"])).status_code == 403
    assert (await system.request("DELETE", f"/tokens/{created['id']}")).status_code == 204
    assert (await system.request("GET", "/jobs", secret=created["secret"])).status_code == 401


async def test_secret_is_neither_stored_nor_listed(system: System) -> None:
    created = (await system.request("POST", "/tokens", {"scope": "worker", "name": "spot", "expires_s": 60})).json()
    assert len(created["secret"]) >= 64
    stored = await system.bus.hash_all(names.TOKENS)
    listed = (await system.request("GET", "/tokens")).json()
    assert [(token["id"], token["scope"], token["name"]) for token in listed] == [(created["id"], "worker", "spot")]
    assert created["secret"] not in json.dumps([stored, listed])
    assert listed[0]["expires_at"] == pytest.approx(time.time() + 60, abs=30)


async def test_token_expires_at_its_time(system: System) -> None:
    created = (await system.request("POST", "/tokens", {"scope": "read", "expires_s": 0.001})).json()

    async def is_refused() -> bool:
        return bool((await system.request("GET", "/jobs", secret=created["secret"])).status_code == 401)

    await eventually(is_refused)


async def test_repeated_creation_under_one_id_leaves_one_token(system: System) -> None:
    body = {"id": "0123456789abcdef", "scope": "job"}
    first, second = [(await system.request("POST", "/tokens", body)).json()["secret"] for _ in range(2)]
    assert len((await system.request("GET", "/tokens")).json()) == 1
    answers = [(await system.request("GET", "/jobs", secret=secret)).status_code for secret in (first, second)]
    assert answers == [401, 200]


@pytest.mark.parametrize(
    "body", [{}, {"scope": "root"}, {"scope": "weights"}, {"scope": "job", "expires_s": 0}, {"scope": "job", "id": "x"}]
)
async def test_invalid_token_request_is_refused(system: System, body: dict[str, object]) -> None:
    assert (await system.request("POST", "/tokens", body)).status_code == 422


async def test_revocation_of_an_unknown_token_names_the_list(system: System) -> None:
    answer = await system.request("DELETE", "/tokens/0123456789abcdef")
    assert answer.status_code == 404
    assert "rlboost token list" in answer.json()["detail"]


# --- the command line -------------------------------------------------------------------------------------------------

TOKEN = {"id": "ab12", "scope": "worker", "name": "spot", "created_at": 0.0, "expires_at": None}


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> FakeRest:
    rest = FakeRest()
    monkeypatch.setattr(commands, "connect", lambda _: Client("http://api.test", "t", transport=rest))
    return rest


def test_create_prints_only_the_secret_to_standard_output(rest: FakeRest) -> None:
    rest.on("POST /v1/tokens", ok({**TOKEN, "secret": "rlb_secret"}, 201))
    result = CliRunner().invoke(app, ["token", "create", "--scope", "worker", "--name", "spot", "--expires", "30d"])
    assert (result.exit_code, result.stdout) == (0, "rlb_secret\n")
    assert "rlb_secret" not in result.stderr
    sent = json.loads(rest.requests[0].content)
    assert (sent["scope"], sent["name"], sent["expires_s"]) == ("worker", "spot", 30 * 86400)


@pytest.mark.parametrize("text", ["30", "d", "0d", "1w", "-1d", "1.5h"])
def test_expiry_that_is_no_duration_is_refused(rest: FakeRest, text: str) -> None:
    result = CliRunner().invoke(app, ["token", "create", "--scope", "read", "--expires", text])
    assert result.exit_code == 2
    assert "30d, 12h or 45m" in result.stderr
    assert rest.requests == []


def test_list_and_revoke_show_no_secret(rest: FakeRest) -> None:
    rest.on("GET /v1/tokens", ok([TOKEN, {**TOKEN, "id": "cd34", "expires_at": 1.0}]))
    rest.on(
        "DELETE /v1/tokens/ab12",
        httpx.Response(204),
        httpx.Response(204),
        problem(404, "No such token", "there is no token"),
    )
    listed = CliRunner().invoke(app, ["token", "list"])
    assert "never" in listed.stdout
    assert "(expired)" in listed.stdout
    assert CliRunner().invoke(app, ["token", "revoke", "ab12"]).exit_code == 0
    revoked = CliRunner().invoke(app, ["token", "revoke", "ab12", "--json"])
    assert json.loads(revoked.stdout) == {"id": "ab12", "revoked": True}
    assert CliRunner().invoke(app, ["token", "revoke", "ab12"]).exit_code == 1
