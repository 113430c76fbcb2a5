"""A reward over HTTP, against a real server that is slow, busy, wrong or gone."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from threading import Thread
from typing import Any

import pytest

from rlboost.services.trainer.adapters.reward_pool import RewardPool
from rlboost.services.trainer.children import reward
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.shared import proxies
from rlboost.shared.http.clients import MAX_ANSWER_BYTES
from rlboost.shared.job.reward import RewardSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.proxies import is_metadata

Start = Callable[..., Awaitable[RewardPool]]


class Service:
    """Answers each request with the next of `answers`, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.location = self.encoding = ""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                service.asked.append(json.loads(body))
                service.tokens.append(self.headers.get("authorization"))
                status, answer = service.answers.pop(0) if len(service.answers) > 1 else service.answers[0]
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                if service.encoding:
                    self.send_header("content-encoding", service.encoding)
                if service.location:
                    self.send_header("location", service.location)
                self.end_headers()
                with suppress(OSError):  # the client may have had enough
                    self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(*token_origins: str, **reward: Any) -> RewardPool:
            spec = RewardSpec.model_validate({"timeout_s": 10, **reward})
            pool = RewardPool(spec, Waits(), token_origins=token_origins)
            stack.push_async_callback(pool.close)
            await pool.start()
            return pool

        yield make


ANSWERS = {"answer": ["4", "4"]}
BATCH = RewardBatch(["2+2="] * 2, ["4", "5"], [[4, 2], [5, 2]], ANSWERS, ["4", "5"], ["4<eos>", "5<eos>"])


async def test_a_group_is_one_request_of_rows(service: Service, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    service.answers = [(200, b'{"rewards": [1, 0.5]}')]
    pool = await start(service.url.removesuffix("/score"), url=service.url)
    assert await pool.score(BATCH) == Scores((1.0, 0.5))
    [asked] = service.asked
    assert asked["rows"][1] == {
        "prompt": "2+2=",
        "completion": "5",
        "completion_ids": [5, 2],
        "completion_raw": "5<eos>",
        "solution": "5",
        "columns": {"answer": "4"},
    }
    assert service.tokens == ["Bearer secret"]


@pytest.mark.parametrize("listed", [(), ("https://127.0.0.1:443", "http://other.example:80")])
async def test_token_is_not_sent_to_an_unlisted_service(
    service: Service, start: Start, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, ...]
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    service.answers = [(401, b"no token")]
    pool = await start(*listed, url=service.url)
    scores = await pool.score(BATCH)
    assert service.tokens == [None]
    assert "RLBOOST_TRAINER_REWARD_TOKEN_ORIGINS" in scores.detail


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("169.254.169.254", True),
        ("::ffff:169.254.169.254", True),
        ("fe80::1%eth0", True),
        ("fd00:ec2::254", True),
        ("fd20:ce::254", True),
        ("100.100.100.200", True),
        ("168.63.129.16", True),
        ("64:ff9b::a9fe:a9fe", True),
        ("2002:a9fe:a9fe::1", True),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::1", False),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("100.100.100.201", False),
        ("fd00::1", False),
    ],
)
def test_metadata_addresses_are_recognized(host: str, expected: bool) -> None:
    assert is_metadata(host) is expected


@pytest.mark.parametrize("listed", [False, True])
def test_metadata_service_gets_a_request_only_if_the_operator_lists_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    monkeypatch.setattr(proxies, "_METADATA", (ip_network("127.0.0.0/8"),))
    service.answers = [(200, b'{"rewards": [1]}')]
    url = service.url.replace("127.0.0.1", "localhost")  # the name says nothing
    caller = reward.remote({"url": url, "name": "r", "timeout_s": 5.0, "gets_token": listed})
    request = {name: ["2+2="] for name in ("prompts", "completions", "completion_ids", "completions_raw", "solutions")}
    if listed:
        assert caller.call({**request, "columns": {}}) == [1]
    else:
        with pytest.raises(reward.RemoteFailed, match=r"is at 127\.0\.0\.1, where clouds serve credentials"):
            caller.call({**request, "columns": {}})
    assert len(service.asked) == listed


async def test_redirect_is_not_followed(service: Service, start: Start) -> None:
    service.answers, service.location = [(307, b"")], service.url
    pool = await start(url=service.url)
    scores = await pool.score(BATCH)
    assert "answered 307" in scores.detail
    assert len(service.asked) == 1


async def test_it_may_be_one_of_several(service: Service, start: Start) -> None:
    service.answers = [(200, b'{"rewards": [1, null]}')]
    local = {"function": "tests.support.reward_functions:later", "weight": 2.0}
    pool = await start(functions=[{"url": service.url, "weight": 3.0}, local])
    scores = await pool.score(BATCH)
    assert scores.rewards == (4.0, 1.0)
    assert scores.parts == {"remote": (1.0, None), "later": (0.5, 0.5)}


async def test_a_service_that_is_busy_is_asked_again(service: Service, start: Start) -> None:
    service.answers = [(503, b"busy"), (429, b"slow down"), (200, b'{"rewards": [1, 0]}')]
    pool = await start(url=service.url)
    assert await pool.score(BATCH) == Scores((1.0, 0.0))
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("status", "answer", "reason", "detail"),
    [
        (400, b"no column gold", "raised", "answered 400 no column gold"),
        (200, b"hello", "raised", 'no {"rewards": [...]} but 200 hello'),
        (200, b'{"rewards": 1}', "raised", "rewards is no list"),
        (200, b'{"rewards": [1]}', "wrong_length", "1 rewards for 2"),
        (200, b'{"rewards": [1, NaN]}', "not_a_number", "nan"),
        (200, b'{"rewards": [1, null]}', "missing", "completion 1"),
        (503, b"still busy", "raised", "within 3 s; last error: 503 still busy"),
    ],
)
async def test_failed_remote_reward_gives_the_reason(
    service: Service, start: Start, status: int, answer: bytes, reason: str, detail: str
) -> None:
    service.answers = [(status, answer)]
    pool = await start(url=service.url, timeout_s=3)
    scores = await pool.score(BATCH)
    assert (scores.rewards, scores.reason) == (None, reason)
    assert detail in scores.detail


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_answer_that_would_fill_the_memory_fails(service: Service, start: Start, encoding: str) -> None:
    text = b'{"rewards": [1, 0], "more": "%s"}' % bytes(MAX_ANSWER_BYTES)
    service.encoding, service.answers = encoding, [(200, gzip.compress(text, 1) if encoding else text)]
    scores = await (await start(url=service.url, timeout_s=20)).score(BATCH)
    assert (scores.rewards, scores.reason) == (None, "raised")
    assert ("compressed (gzip)" if encoding else f"more than {MAX_ANSWER_BYTES} bytes") in scores.detail
    assert len(service.asked) == 1


async def test_a_service_that_is_not_there_is_a_reason(start: Start) -> None:
    pool = await start(url="http://127.0.0.1:1/", timeout_s=3)
    scores = await pool.score(BATCH)
    assert scores.reason == "raised"
    assert "ConnectError" in scores.detail


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ({"url": "host/path"}, "not of the form http"),
        ({"url": "http://h/", "function": "m:f"}, "give either function"),
        ({"url": "http://h/", "style": "verl"}, "style and arguments are for a function"),
    ],
)
def test_a_url_that_is_none_is_refused(reward: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RewardSpec.model_validate(reward)
