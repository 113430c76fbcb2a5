from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import httpx
import pytest

from rlboost import client as module
from rlboost.client import Attachment, Client, ClientError, ServerEvent, server_events
from rlboost.fleet import AsyncFleet
from tests.support.fake_rest import FakeRest, job, lines, ok, problem


@pytest.fixture
def rest() -> FakeRest:
    return FakeRest()


@pytest.fixture
def client(rest: FakeRest, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    return Client("http://api.test/", "secret", transport=rest)


def test_every_request_carries_the_token(rest: FakeRest, client: Client) -> None:
    rest.on("GET /v1/jobs", ok([]))
    assert client.jobs.list() == []
    assert rest.requests[0].headers["authorization"] == "Bearer secret"


def test_a_job_is_created_once_although_the_first_answer_was_lost(rest: FakeRest, client: Client) -> None:
    rest.on("POST /v1/jobs", httpx.ReadError("gone"), problem(503, "Unavailable", "try again"), ok({"id": "j"}, 201))
    assert client.jobs.create({"steps": 1}) == {"id": "j"}
    keys = {request.headers["idempotency-key"] for request in rest.requests}
    assert len(rest.requests) == 3
    assert len(keys) == 1
    assert json.loads(rest.requests[0].content) == {"steps": 1}


def test_two_jobs_have_two_keys(rest: FakeRest, client: Client) -> None:
    rest.on("POST /v1/jobs", ok({"id": "j"}, 201))
    client.jobs.create({})
    client.jobs.create({})
    assert len({request.headers["idempotency-key"] for request in rest.requests}) == 2


def test_a_problem_document_becomes_the_error(rest: FakeRest, client: Client) -> None:
    rest.on("POST /v1/jobs/j/pause", problem(409, "Conflict", "job j is completed"))
    with pytest.raises(ClientError, match="Conflict: job j is completed") as caught:
        client.jobs.pause("j")
    assert (caught.value.title, caught.value.detail, caught.value.status) == ("Conflict", "job j is completed", 409)


def test_an_error_survives_the_way_to_another_process() -> None:
    again = pickle.loads(pickle.dumps(ClientError("Paused", "job j is paused", 409)))
    assert (str(again), again.status) == ("Paused: job j is paused", 409)


@pytest.mark.parametrize("body", ["<html>", "[]", '{"title": "only"}'])
def test_an_error_without_a_problem_document_names_the_server(rest: FakeRest, client: Client, body: str) -> None:
    rest.on("GET /v1/jobs", httpx.Response(502, text=body))
    with pytest.raises(ClientError, match=r"http://api.test/v1/jobs answered 502"):
        client.jobs.list()


def test_a_web_page_is_no_answer(rest: FakeRest, client: Client) -> None:
    """Such as that of a proxy, to sign in."""
    rest.on("GET /v1/jobs", httpx.Response(200, html="<html>"))
    with pytest.raises(ClientError, match=r"http://api.test/v1/jobs is a web page: give the URL of the manager"):
        client.jobs.list()


def test_patience_ends(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs", httpx.ConnectError("refused"))
    with pytest.raises(ClientError, match=r"http://api.test does not answer \(refused\)") as caught:
        Client("http://api.test", "t", retry_for_s=0.0, transport=rest).jobs.list()
    assert caught.value.status is None


def test_ids_cannot_leave_their_place_in_the_path(rest: FakeRest, client: Client) -> None:
    with pytest.raises(ClientError, match=r"there is no job '\.\./fleet'") as caught:
        client.jobs.show("../fleet")
    assert caught.value.status == 404
    assert rest.requests == []
    with pytest.raises(ClientError):
        client.workers.drain("../fleet")
    assert rest.requests[0].url.raw_path == b"/v1/workers/..%2Ffleet/drain"


def test_each_call_has_its_route(rest: FakeRest, client: Client) -> None:
    for route in (
        "GET /v1/jobs/j",
        "POST /v1/jobs/j/cancel",
        "POST /v1/jobs/j/resume",
        "GET /v1/jobs/j/metrics",
        "GET /v1/jobs/j/samples",
        "GET /v1/jobs/j/audit",
        "GET /v1/workers",
        "POST /v1/workers/w-1/drain",
        "GET /v1/fleet",
    ):
        rest.on(route, ok({}))
    client.jobs.show("j")
    client.jobs.cancel("j")
    client.jobs.resume("j")
    client.jobs.metrics("j")
    client.jobs.samples("j", step=3)
    client.jobs.audit("j")
    client.workers.list()
    client.workers.drain("w-1")
    client.fleet()
    assert len(rest.requests) == 9
    assert rest.requests[4].url.params["step"] == "3"


def test_the_events_of_a_stream_are_its_blocks_without_the_comments() -> None:
    text = [
        ": still here",
        "",
        "id: 1-0",
        "event: step",
        "data: {}",
        "",
        "id:2-0",
        'data: {"a":',
        "data: 1}",
        "",
        "id: 3-0",
    ]
    assert list(server_events(text)) == [ServerEvent("1-0", "step", {}), ServerEvent("2-0", "message", {"a": 1})]


def test_a_broken_event_stream_resumes_after_the_last_event(rest: FakeRest, client: Client) -> None:
    first = lines(["id: 1-0", "data: {}", "", "id: 2-0", "data: {}", ""], then=httpx.ReadError("gone"))
    second = lines(["id: 3-0", "data: {}", ""])
    rest.on("GET /v1/jobs/j/events", first, second)
    assert [event.id for event in client.jobs.events("j")] == ["1-0", "2-0", "3-0"]
    assert [request.headers.get("last-event-id") for request in rest.requests] == [None, "2-0"]


def test_interrupted_log_raises_client_error(rest: FakeRest, client: Client) -> None:
    rest.on("GET /v1/jobs/j/logs", lines(["one"], then=httpx.ReadError("gone")))
    log = client.jobs.logs("j", follow=True)
    assert next(log) == "one"
    with pytest.raises(ClientError, match="broke off"):
        next(log)


def test_a_client_closes_its_connections(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job("running")))
    with Client("http://api.test", "t", transport=rest) as client:
        assert client.jobs.show("j-1")["state"] == "running"


async def test_trainer_generates_until_the_last_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, attachment = AsyncFleet("http://api.test", "secret", job="j"), object.__new__(Attachment)
    attachment.phases = ["training"]
    monkeypatch.setattr(fleet, "_attachment", attachment)
    reading = asyncio.create_task(asyncio.Event().wait())
    monkeypatch.setattr(fleet, "_ensure_reading", lambda: reading)

    async def completed(number: int) -> list[Any]:
        return [index async for index in fleet._completed(0, number, 1)]

    calls = [asyncio.create_task(completed(number)) for number in range(2)]
    await asyncio.sleep(0)
    for number, phase in enumerate(("generating", "training")):
        fleet._open[0, number].done.set()
        assert await calls[number] == [0]
        assert attachment.phases[-1] == phase
    reading.cancel()
