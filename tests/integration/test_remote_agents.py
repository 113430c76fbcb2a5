"""Hosts that take sessions, keep and end them, at a real manager and Redis; the test plays the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from rlboost.services.rollout_manager.session_offers import LEASE_S, MAX_STARTS
from rlboost.shared.ids import SampleId
from rlboost.shared.job.agent import REWARDED, SESSION, TASK, Offer, SessionId, SessionRecord, SessionTask
from rlboost.shared.messages import Sampling, SessionRewarded, TurnOpened
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Delete, HashSet
from tests.support.serving_system import ENDS, WAIT_S, System, calling_system, until
from tests.support.stream_entries import read_all

NUMBERS = count()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with calling_system(tmp_path_factory.mktemp("remote"), agent={"remote": True}) as system:
        yield system


@pytest.fixture
def offers(system: System) -> Iterator[Offers]:
    offers = Offers(system)
    yield offers
    offers.clear()


class Offers:
    """What a trainer offers."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.key = names.job_offers(system.job)
        token = system.http.post("/v1/tokens", json={"scope": "agent"}).json()["secret"]
        headers = {"Authorization": f"Bearer {token}"}
        self.host = httpx.Client(base_url=system.manager.url, headers=headers, timeout=WAIT_S)

    def transact(self, *ops: Any) -> None:
        async def put() -> None:
            bus = RedisBus(self.system.redis.url)
            await bus.transact(ops)
            await bus.close()

        asyncio.run(put())

    def stored(self, key: str) -> dict[str, str]:
        async def read() -> dict[str, str]:
            bus = RedisBus(self.system.redis.url)
            found = await bus.hash_all(key)
            await bus.close()
            return found

        return asyncio.run(read())

    def offer(self, timeout_s: float = 60.0, **row: Any) -> SessionId:
        number = next(NUMBERS)
        session = SessionId(self.system.job, SampleId(1, False, 0, number, 0).pack())
        record = SessionRecord(
            sample=session.sample,
            version=0,
            first=1000 + number,
            stride=100,
            max_turns=4,
            n_ids=8,
            seed=5,
            sampling=Sampling(max_tokens=16, stop_token_ids=ENDS, whole_logprobs=True),
        )
        task = SessionTask(
            row={"prompt": "t3", **row}, sample=f"1/0/{number}/0", step=0, is_eval=False, timeout_s=timeout_s
        )
        fields = {SESSION: record.model_dump_json(), TASK: task.model_dump_json()}
        self.transact(HashSet(session.redis_key, fields), HashSet(self.key, {f"{session.sample:x}": ""}))
        return session

    def clear(self) -> None:
        self.transact(Delete(self.key))
        self.host.close()

    def next(self, count: int = 1, wait: float = 0.0) -> list[dict[str, Any]]:
        answer = self.host.post(f"/v1/jobs/{self.system.job}/sessions/next", params={"count": count, "wait": wait})
        assert answer.status_code == 200, answer.text
        taken: list[dict[str, Any]] = answer.json()
        return taken

    def renew(self, *given: dict[str, Any]) -> list[str]:
        body = {"sessions": [one["id"] for one in given]}
        answer = self.host.post(f"/v1/jobs/{self.system.job}/sessions/renew", json=body)
        over: list[str] = answer.json()["over"]
        return over

    def expire(self, session: SessionId) -> None:
        """Have the lease of a session's host run out."""
        field = f"{session.sample:x}"
        offer = Offer.model_validate_json(self.stored(self.key)[field])
        self.transact(HashSet(self.key, {field: offer.model_copy(update={"until": 0.0}).model_dump_json()}))

    def ends(self, session: SessionId) -> list[SessionRewarded]:
        async def read() -> list[Any]:
            bus = RedisBus(self.system.redis.url)
            found = await read_all(bus, names.rollouts_finished(self.system.job))
            await bus.close()
            return [entry.message for entry in found]

        messages = asyncio.run(read())
        return [m for m in messages if isinstance(m, SessionRewarded) and m.session == session.sample]

    def starts(self, session: SessionId) -> list[str]:
        async def read() -> list[Any]:
            bus = RedisBus(self.system.redis.url)
            found = await read_all(bus, names.rollouts_finished(self.system.job))
            await bus.close()
            return [entry.message for entry in found]

        return [m.start for m in asyncio.run(read()) if isinstance(m, TurnOpened) and m.session == session.sample]


def reward(given: dict[str, Any], **body: Any) -> httpx.Response:
    url = given["base_url"].removesuffix("/v1")
    headers = {"Authorization": f"Bearer {given['key']}"}
    return httpx.post(f"{url}/v1/sessions/{given['session']}/reward", headers=headers, json=body, timeout=WAIT_S)


def ask(given: dict[str, Any], text: str = "t3") -> Any:
    with OpenAI(base_url=given["base_url"], api_key=given["key"], max_retries=0, timeout=WAIT_S) as client:
        made = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
        return made.choices[0].message.content


def test_each_offered_session_is_handed_out_once_and_ends_once(offers: Offers) -> None:
    sessions = [offers.offer(number=i) for i in range(3)]
    with ThreadPoolExecutor(4) as hosts:
        taken = [one for some in hosts.map(lambda _: offers.next(2), range(4)) for one in some]
    assert sorted(one["row"]["number"] for one in taken) == [0, 1, 2]
    assert offers.next() == []
    (first,) = (one for one in taken if one["row"]["number"] == 0)
    assert first["row"]["prompt"] == "t3"
    assert first["expires_at"] > time.time()
    assert ask(first) is not None
    answers = [reward(first, reward=0.5) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, 204]
    other = reward(first, reward=0.25)
    assert other.status_code == 409
    assert "another reward" in other.json()["detail"]
    (end,) = offers.ends(sessions[0])
    assert (end.reward, end.reason, end.start) == (0.5, "", first["id"].partition(".")[2])
    assert f"{sessions[0].sample:x}" not in offers.stored(offers.key)
    with pytest.raises(APIStatusError, match="has ended"):
        ask(first, "t4")
    (second,) = (one for one in taken if one["row"]["number"] == 1)
    assert reward(second, reward=0.5, rewards={"first": 1.0}).status_code == 422
    assert reward(second, infrastructure="no disk", rewards={f"cmpl-{1:016x}": 1.0}).status_code == 422
    assert reward(second, infrastructure="no disk").status_code == 204
    (lost,) = offers.ends(sessions[1])
    assert (lost.reason, lost.detail) == ("infrastructure", "no disk")
    (third,) = (one for one in taken if one["row"]["number"] == 2)
    rewards = {f"cmpl-{7:016x}": 1.0, f"resp_{8:016x}": -0.5}
    assert [reward(third, reward=0.25, rewards=rewards).status_code for _ in range(2)] == [204, 204]
    (end,) = offers.ends(sessions[2])
    assert (end.reward, end.rewards) == (0.25, ((7, 1.0), (8, -0.5)))


@pytest.mark.parametrize(
    "body", ["{}", '{"reward": null}', '{"reward": NaN}', '{"reward": 1e16}', '{"reward": "1"}', '{"reward": true}']
)
def test_reward_that_is_no_finite_number_is_refused(offers: Offers, body: str) -> None:
    session = offers.offer()
    (given,) = offers.next()
    url = f"{offers.system.manager.url}/v1/sessions/{given['session']}/reward"
    headers = {"Authorization": f"Bearer {given['key']}", "Content-Type": "application/json"}
    refused = httpx.post(url, headers=headers, content=body)
    assert refused.status_code == 422, refused.text
    assert offers.ends(session) == []


def test_session_of_a_vanished_host_begins_again_elsewhere(offers: Offers) -> None:
    session = offers.offer()
    (lost,) = offers.next()
    answer = ask(lost)
    assert offers.renew(lost) == []
    offers.expire(session)
    (again,) = offers.next(wait=WAIT_S / 2)  # a new manager gives hosts the time of a lease to come back
    assert again["id"] != lost["id"]
    assert ask(again) == answer
    assert [start in lost["id"] for start in offers.starts(session)] == [True, False]
    with pytest.raises(APIStatusError, match="another one has the session"):
        ask(lost, "t5")
    assert reward(lost, reward=1.0).status_code == 409
    assert offers.renew(lost, again) == [lost["id"]]
    assert reward(again, reward=1.0).status_code == 204


def test_host_that_renews_after_a_restart_of_the_manager_keeps_its_sessions(offers: Offers) -> None:
    session = offers.offer()
    (given,) = offers.next()
    answer = ask(given)
    offers.expire(session)  # as if the manager had not answered for long
    offers.system.manager.kill()
    offers.system.manager.start()
    until(lambda: httpx.get(f"{offers.system.manager.url}/readyz").status_code == 200)
    assert offers.next() == []
    assert offers.renew(given) == []
    assert float(Offer.model_validate_json(offers.stored(offers.key)[f"{session.sample:x}"]).until) > time.time()
    assert ask(given) is not None
    assert answer is not None
    assert reward(given, reward=0.0).status_code == 204
    offers.system.manager.kill()
    offers.system.manager.start()
    until(lambda: httpx.get(f"{offers.system.manager.url}/readyz").status_code == 200)
    assert reward(given, reward=0.0).status_code == 204
    assert len(offers.ends(session)) == 1


def test_session_ends_at_its_time_limit_and_after_many_lost_hosts(offers: Offers) -> None:
    late = offers.offer(timeout_s=0.05)
    (given,) = offers.next()
    until(lambda: offers.renew(given) == [given["id"]])
    (end,) = offers.ends(late)
    assert end.reason == "timeout"
    # This manager leads for less than a lease: a host might come back.
    deadly = offers.offer()
    record = Offer(start="x", until=0.0, n_starts=MAX_STARTS).model_dump_json()
    offers.transact(HashSet(offers.key, {f"{deadly.sample:x}": record}))
    limit = time.monotonic() + 2 * LEASE_S
    while not offers.ends(deadly):
        assert offers.next() == []
        assert time.monotonic() < limit
        time.sleep(0.5)
    (end,) = offers.ends(deadly)
    assert (end.reason, end.detail) == ("crashed", f"{MAX_STARTS} hosts that ran it have vanished")
    assert REWARDED in offers.stored(deadly.redis_key)


def test_host_waits_for_an_offer(offers: Offers) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(offers.next, 1, 30.0)
        time.sleep(0.5)
        offers.offer(number=7)
        (given,) = waiting.result(20.0)
    assert given["row"]["number"] == 7


def test_token_of_a_host_takes_sessions_of_jobs_and_does_nothing_else(offers: Offers) -> None:
    offers.offer()
    (given,) = offers.next()
    for path in ("jobs", f"jobs/{offers.system.job}/spec", "models", "workers"):
        assert offers.host.get(f"/v1/{path}").status_code == 403, path
    missing = offers.host.post("/v1/jobs/none/sessions/next")
    assert missing.status_code == 404
    local = offers.host.post("/v1/jobs/remote/sessions/next")
    assert (local.status_code, "give it agent.remote: true" in local.text) == (409, True)
    named = offers.host.post("/v1/jobs/tiny/sessions/next", params={"wait": 0})
    assert (named.status_code, named.json()) == (200, [])
    with OpenAI(base_url=given["base_url"], api_key=given["key"]) as client:
        (model,) = client.models.list().data
        assert (model.id, client.models.retrieve("policy").id) == ("policy", "policy")
    other = {**given, "session": given["session"][:-1] + "f0"}
    assert reward(other, reward=1.0).status_code == 403
    headers = {"Authorization": f"Bearer {given['key']}"}
    taken = httpx.post(f"{offers.system.manager.url}/v1/jobs/{offers.system.job}/sessions/next", headers=headers)
    assert taken.status_code == 403
