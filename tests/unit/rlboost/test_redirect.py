"""Following a standby to the manager that leads, with the token, and nowhere else."""

from __future__ import annotations

import httpx
import pytest

from rlboost.client import Client, ClientError
from rlboost.shared.errors import Conflict
from rlboost.shared.http.server_url import MAX_REDIRECTS, redirected_origin
from tests.support.fake_rest import FakeRest, ok, problem

ASKED = "http://one:8700/v1/jobs/a%2Fb?step=3"


def moved(to: str, status: int = 307) -> httpx.Response:
    return httpx.Response(status, headers={"location": to})


def test_redirected_origin_returns_the_leaders_origin() -> None:
    assert redirected_origin(ASKED, 307, "http://two:8702/v1/jobs/a%2Fb?step=3") == "http://two:8702"
    assert redirected_origin(ASKED, 307, "https://two/v1/jobs/a%2Fb?step=3") == "https://two"
    assert redirected_origin("https://one/v1/jobs", 307, "https://[::1]:8/v1/jobs") == "https://[::1]:8"


@pytest.mark.parametrize("status", [200, 201, 304, 401, 404, 503])
def test_redirected_origin_returns_none_for_a_response(status: int) -> None:
    assert redirected_origin(ASKED, status, "") is None


@pytest.mark.parametrize(
    ("asked", "status", "location"),
    [
        (ASKED, 307, ""),
        (ASKED, 307, "http://two:8702/v1/jobs"),
        (ASKED, 307, "http://two:8702/collect?step=3"),
        (ASKED, 307, "http://me:pw@two:8702/v1/jobs/a%2Fb?step=3"),
        (ASKED, 307, "ftp://two/v1/jobs/a%2Fb?step=3"),
        (ASKED, 307, "/v1/jobs/a%2Fb?step=3"),
        (ASKED, 302, "http://two:8702/v1/jobs/a%2Fb?step=3"),
        ("https://one/v1/jobs", 307, "http://one/v1/jobs"),
    ],
)
def test_redirected_origin_rejects_other_redirects(asked: str, status: int, location: str) -> None:
    with pytest.raises(Conflict, match="the token is not sent there"):
        redirected_origin(asked, status, location)


def test_client_follows_a_redirect_with_token_body_and_key() -> None:
    rest = FakeRest()
    rest.on("POST /v1/jobs", moved("http://two:1/v1/jobs"), ok({"id": "j"}, 201))
    assert Client("http://one:1", "secret", transport=rest).jobs.create({"steps": 1}) == {"id": "j"}
    first, second = rest.requests
    assert [request.url.host for request in rest.requests] == ["one", "two"]
    assert second.headers["authorization"] == "Bearer secret"
    assert second.headers["host"] == "two:1"
    assert second.headers["idempotency-key"] == first.headers["idempotency-key"]
    assert second.content == first.content


def test_client_keeps_the_query_and_the_prefix_of_a_proxy() -> None:
    rest = FakeRest()
    path = "/rl/v1/jobs/j/samples"
    rest.on(f"GET {path}", moved(f"http://two{path}?step=3"), ok([]))
    assert Client("http://one/rl", "secret", transport=rest).jobs.samples("j", 3) == []
    assert str(rest.requests[1].url) == f"http://two{path}?step=3"


def test_client_streams_follow_redirects() -> None:
    rest = FakeRest()
    rest.on("GET /v1/jobs/j/logs", moved("http://two/v1/jobs/j/logs?follow=0"), httpx.Response(200, text="one\ntwo\n"))
    assert list(Client("http://one", "secret", transport=rest).jobs.logs("j")) == ["one", "two"]


def test_client_sends_its_token_to_no_other_path() -> None:
    rest = FakeRest()
    rest.on("GET /v1/jobs", moved("http://evil/collect"))
    with pytest.raises(ClientError, match="the token is not sent there"):
        Client("http://one", "secret", transport=rest).jobs.list()
    assert len(rest.requests) == 1


def test_client_retries_circular_redirects_until_its_limit() -> None:
    rest = FakeRest()
    rest.on("GET /v1/jobs", moved("http://two/v1/jobs"))
    with pytest.raises(ClientError, match="redirect to each other"):
        Client("http://one", "secret", retry_for_s=0.0, transport=rest).jobs.list()
    assert len(rest.requests) == 1 + MAX_REDIRECTS


def test_client_retries_while_the_leader_changes() -> None:
    rest = FakeRest()
    rest.on("GET /v1/jobs", moved("http://two/v1/jobs"), problem(503, "No leader", "try again"), ok([]))
    assert Client("http://one", "secret", transport=rest).jobs.list() == []
    assert [request.url.host for request in rest.requests] == ["one", "two", "one"]
