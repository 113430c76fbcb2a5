"""Trainable sessions at the endpoint: OpenAI's own client with a session's key; the test plays the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, OpenAI
from redis import Redis

from rlboost.services.rollout_manager.serving.sessions import MAX_REPEATS
from rlboost.shared.ids import SampleId
from rlboost.shared.job.agent import SESSION, SessionId, SessionRecord, key_of_start, session_key
from rlboost.shared.messages import Message, SampleFinished, Sampling, TurnOpened
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.wire import ints
from tests.support.service_process import TOKEN
from tests.support.serving_system import ENDS, WAIT_S, System, calling_system, until
from tests.support.stream_entries import read_all
from tests.support.tool_model import ADD

NUMBERS = count()
MAX_TURNS = 6


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with calling_system(tmp_path_factory.mktemp("sessions")) as system:
        yield system


class Session:
    """An open session, and its agent."""

    def __init__(self, system: System, **changes: Any) -> None:
        number = next(NUMBERS)
        self.system = system
        self.id = SessionId(system.job, SampleId(1, False, 0, number, 0).pack())
        sampling = Sampling(max_tokens=16, stop_token_ids=ENDS, whole_logprobs=True)
        fields: dict[str, Any] = {
            "version": 0,
            "first": 1000 + number,
            "stride": 100,
            "max_turns": MAX_TURNS,
            "n_ids": MAX_TURNS + 2,
            "seed": 5,
            "sampling": sampling,
        }
        self.record = SessionRecord(sample=self.id.sample, **(fields | changes))
        self.store(self.record)
        self.key = session_key(TOKEN, self.id)
        self.agent = self.client()

    def store(self, record: SessionRecord) -> None:
        async def put() -> None:
            bus = RedisBus(self.system.redis.url)
            await bus.transact([HashSet(self.id.redis_key, {SESSION: record.model_dump_json()})])
            await bus.close()

        asyncio.run(put())

    def client(self, start: str = "one", retries: int = 0) -> OpenAI:
        key = key_of_start(self.key, start)
        return OpenAI(base_url=f"{self.system.manager.url}/v1", api_key=key, max_retries=retries, timeout=WAIT_S)

    def ask(self, *messages: Any, agent: OpenAI | None = None, **more: Any) -> Any:
        asked = {"model": "policy", "messages": list(messages), "extra_body": {"return_token_ids": True}}
        return (agent or self.agent).chat.completions.create(**(asked | more))

    def entries(self) -> list[Message]:
        """Return what the trainer is told of this session, in order."""

        async def read() -> list[Message]:
            bus = RedisBus(self.system.redis.url)
            found = await read_all(bus, names.rollouts_finished(self.system.job))
            await bus.close()
            return [entry.message for entry in found]

        turns = {self.record.turn_id(number) for number in range(self.record.n_ids)}
        return [m for m in asyncio.run(read()) if isinstance(m, TurnOpened | SampleFinished) and m.sample in turns]

    def turns(self) -> tuple[list[TurnOpened], dict[int, SampleFinished]]:
        entries = self.entries()
        ends = {m.sample: m for m in entries if isinstance(m, SampleFinished)}
        return [m for m in entries if isinstance(m, TurnOpened)], ends


def redis_of(system: System) -> Redis:
    return Redis.from_url(system.redis.url)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tokens_of(made: Any) -> tuple[list[int], list[int]]:
    return made.prompt_token_ids, made.choices[0].token_ids


def test_calls_that_continue_keep_their_tokens_and_others_begin_branches(system: System) -> None:
    session = Session(system)
    first = session.ask(user("t3"), tools=[ADD])
    history = [user("t3"), first.choices[0].message.model_dump()]
    second = session.ask(*history, user("t4"), tools=[ADD])
    sibling = session.ask(*history, user("t5"), tools=[ADD])
    other = session.ask(user("t3"))
    opened, ends = session.turns()
    assert [one.sample for one in opened] == [session.record.turn_id(number) for number in range(4)]
    assert [one.parent for one in opened] == [0, opened[0].sample, opened[0].sample, 0]
    prompt, completion = tokens_of(first)
    for one, made in zip(opened[1:3], (second, sibling), strict=True):
        assert tokens_of(made)[0] == [*prompt, *completion, *ints(one.tokens)]
    assert [ints(one.tokens) for one in opened[::3]] == [prompt, tokens_of(other)[0]]
    for one, made in zip(opened, (first, second, sibling, other), strict=True):
        end = ends[one.sample]
        assert ints(end.tokens) == tokens_of(made)[1]
        assert {version for _, version, _ in end.spans} == {0}


def test_repeated_calls_get_the_turn_that_there_is(system: System) -> None:
    session = Session(system)
    made = session.ask(user("t3"))
    again = session.ask(user("t3"), extra_headers={"x-stainless-retry-count": "1"})
    assert tokens_of(again) == tokens_of(made)
    sibling = session.ask(user("t3"), extra_headers={"Idempotency-Key": "x"})
    named = session.ask(user("t3"), extra_headers={"Idempotency-Key": "x"})
    assert tokens_of(named) == tokens_of(sibling)
    assert len(session.turns()[0]) == 2
    restarted = session.client("two")
    repeated = [session.ask(user("t3"), agent=restarted) for _ in range(2)]
    assert [tokens_of(one) for one in repeated] == [tokens_of(made), tokens_of(sibling)]
    further = session.ask(user("t3"), repeated[0].choices[0].message.model_dump(), user("t4"), agent=restarted)
    opened, ends = session.turns()
    assert [(one.start, one.sample) for one in opened] == [
        *(("one", session.record.turn_id(number)) for number in (0, 1)),
        *(("two", session.record.turn_id(number)) for number in (0, 1, 2)),
    ]
    assert opened[-1].parent == opened[0].sample
    assert len(ends) == 3
    assert tokens_of(further)[0][: len(tokens_of(made)[0])] == tokens_of(made)[0]


def test_call_that_got_no_answer_is_repeated_without_a_mark(system: System) -> None:
    session = Session(system)
    made = session.ask(user("t3"))
    with redis_of(system) as redis:  # as after a connection that broke
        assert redis.hdel(session.id.redis_key, names.session_answer(session.record.turn_id(0)))
    again, other = session.ask(user("t3")), session.ask(user("t3"))
    assert tokens_of(again) == tokens_of(made)
    opened, ends = session.turns()
    assert [one.sample for one in opened] == [session.record.turn_id(number) for number in (0, 1)]
    assert ints(ends[opened[1].sample].tokens) == tokens_of(other)[1]


def test_agent_that_breaks_every_answer_off_gets_another_sample_in_the_end(system: System) -> None:
    session = Session(system)
    for _ in range(MAX_REPEATS + 2):
        session.ask(user("t3"))
        with redis_of(system) as redis:
            redis.hdel(session.id.redis_key, names.session_answer(session.record.turn_id(0)))
    assert len(session.turns()[0]) == 2


def test_turn_of_another_start_that_is_not_continued_is_not_repeated(system: System) -> None:
    session = Session(system)
    first = session.ask(user("t3")).choices[0].message.model_dump()
    session.ask(user("t3"), first, user("t4"))
    with redis_of(system) as redis:
        assert redis.hdel(session.id.redis_key, names.session_answer(session.record.turn_id(1)))
    session.ask(user("t3"), first, user("t4"), agent=session.client("two"))
    opened, _ = session.turns()
    assert [(one.start, one.sample) for one in opened[2:]] == [("two", session.record.turn_id(2))]


def test_streams_and_responses_are_turns_as_well(system: System) -> None:
    session = Session(system)
    chunks = list(session.ask(user("t3"), stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    made: Any = session.agent.responses.create(model="policy", input="t4")
    opened, ends = session.turns()
    assert len(opened) == len(ends) == 2
    assert made.output_text is not None
    whole = session.ask(user("t3"), extra_headers={"x-stainless-retry-count": "1"})
    assert (whole.choices[0].message.content or "") == text


def test_messages_of_anthropic_are_turns_that_continue(system: System) -> None:
    session = Session(system)
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 16, "messages": [user("t3")]}
    asked["tools"] = [{"name": "add", "input_schema": ADD["function"]["parameters"]}]
    url, headers = f"{system.manager.url}/v1/messages", {"x-api-key": key_of_start(session.key, "one")}
    made = httpx.post(url, headers=headers, json=asked, timeout=WAIT_S).json()
    calls = [block for block in made["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "t5"} for call in calls]
    history = [{"role": "assistant", "content": made["content"]}, user("t4") | ({"content": results} if calls else {})]
    asked["messages"] = [user("t3"), *history]
    second = httpx.post(url, headers=headers, json=asked, timeout=WAIT_S).json()
    assert second["type"] == "message"
    counted = httpx.post(f"{url}/count_tokens", headers=headers, json=asked, timeout=WAIT_S).json()
    assert counted["input_tokens"] > 0
    refused = httpx.post(url, headers=headers, json=asked | {"stop_sequences": ["t9"]}, timeout=WAIT_S)
    message = refused.json()["error"]["message"]
    text = "stop_sequences: not supported in a trainable session: leave it out, or set sampling.stop of the job"
    assert message == text
    opened, ends = session.turns()
    assert [one.parent for one in opened] == [0, opened[0].sample]
    assert len(ends) == 2


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"temperature": 0.5}, 400, "temperature: this session trains with 1"),
        ({"extra_body": {"top_k": 5}}, 400, "top_k: this session trains with 0: leave it out, or set sampling.top_k"),
        ({"n": 2}, 400, "one answer a turn"),
        ({"stop": "t9"}, 400, "stop: not supported in a trainable session: leave it out, or set sampling.stop"),
        ({"seed": 3}, 400, "seed: not supported"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias: not supported"),
        ({"logprobs": True, "top_logprobs": 2}, 400, "top_logprobs: not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format: not supported"),
        ({"tools": [ADD], "tool_choice": "required"}, 400, "tool_choice: a trainable session draws"),
        ({"model": "gpt-9"}, 404, "'policy'"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    system: System, asked: dict[str, Any], status: int, words: str
) -> None:
    session = Session(system)
    with pytest.raises(APIStatusError, match=words) as refused:
        session.ask(user("t3"), **asked)
    assert refused.value.status_code == status
    assert session.entries() == []
    session.ask(user("t3"), temperature=1.0, top_p=1.0, n=1, model=system.job, extra_body={"top_k": 0, "min_p": 0})


def test_session_ends_at_its_limit_and_with_its_end(system: System) -> None:
    session = Session(system, max_turns=2, n_ids=4)
    for text in ("t3", "t4"):
        session.ask(user(text))
    with pytest.raises(BadRequestError, match=r"its 2 turns \(agent\.max_turns\)") as refused:
        session.ask(user("t5"))
    assert refused.value.code == "session_limit"
    restarted = session.client("two")
    for text in ("t6", "t7"):
        session.ask(user(text), agent=restarted)
    with pytest.raises(BadRequestError, match="its 2 turns"):
        session.ask(user("t8"), agent=restarted)
    with pytest.raises(APIStatusError, match="made other calls than before"):
        session.ask(user("t8"), agent=session.client("three"))
    session.store(session.record.model_copy(update={"is_over": True}))
    with pytest.raises(APIStatusError, match="has ended") as over:
        session.ask(user("t3"), extra_headers={"x-stainless-retry-count": "1"})
    assert over.value.status_code == 409
    unknown = OpenAI(
        base_url=f"{system.manager.url}/v1", api_key=session_key(TOKEN, SessionId(system.job, 1 << 20)), max_retries=0
    )
    with pytest.raises(APIStatusError, match="not open"):
        session.ask(user("t3"), agent=unknown)


def test_key_is_for_calls_of_its_session_only(system: System) -> None:
    session, other = Session(system), Session(system)
    for key in (
        session.key[:-1] + ("0" if session.key[-1] != "0" else "1"),
        other.key.replace("-", "_"),
        "sk-rlboost-session-",
        key_of_start(key_of_start(session.key, "a"), "b"),
        key_of_start(session.key, ""),
    ):
        refused = httpx.post(
            f"{system.manager.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={"model": "policy", "messages": [user("t3")]},
        )
        assert refused.status_code == 401
    for path in ("jobs", "workers", f"jobs/{system.job}/spec"):
        answer = httpx.get(f"{system.manager.url}/v1/{path}", headers={"Authorization": f"Bearer {session.key}"})
        assert answer.status_code == 403, path
    completion = {"model": system.job, "prompt": "t3"}
    answer = httpx.post(
        f"{system.manager.url}/v1/completions", headers={"Authorization": f"Bearer {session.key}"}, json=completion
    )
    assert answer.status_code == 403


def test_concurrent_calls_are_turns_of_their_own(system: System) -> None:
    session = Session(system)

    async def all_at_once() -> list[Any]:
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            headers = {"Authorization": f"Bearer {key_of_start(session.key, 'one')}"}
            url, body = f"{system.manager.url}/v1/chat/completions", {"model": "policy", "messages": [user("t3")]}
            asked = [client.post(url, headers=headers, json=body) for _ in range(MAX_TURNS + 2)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_at_once())
    assert sorted(answer.status_code for answer in answers) == [*[200] * MAX_TURNS, 400, 400]
    opened, ends = session.turns()
    assert (
        {one.sample for one in opened} == set(ends) == {session.record.turn_id(number) for number in range(MAX_TURNS)}
    )


def test_calls_read_what_is_new_of_their_session_only(system: System) -> None:
    session = Session(system, max_turns=8, n_ids=10)

    def n_whole_reads() -> int:
        with redis_of(system) as redis:
            counted: Any = redis.info("commandstats")
        return int(counted.get("cmdstat_hgetall", {"calls": 0})["calls"])

    history = [user("t3")]
    history.append(session.ask(*history).choices[0].message.model_dump())
    n_before = n_whole_reads()
    for number in range(6):
        history.append(user(f"t{4 + number}"))
        history.append(session.ask(*history).choices[0].message.model_dump())
    assert n_whole_reads() - n_before <= 2  # of tokens, once in two seconds
    opened, _ = session.turns()
    assert [one.parent for one in opened] == [0, *(one.sample for one in opened[:-1])]


def test_session_that_begins_anew_has_no_turn_of_before(system: System) -> None:
    session = Session(system)
    made = session.ask(user("t3"))
    with redis_of(system) as redis:
        redis.delete(session.id.redis_key)
    session.record = session.record.model_copy(update={"first": session.record.first + 50})
    session.store(session.record)
    session.ask(user("t3"), made.choices[0].message.model_dump(), user("t4"), agent=session.client("two"))
    (opened,), _ = session.turns()
    assert (opened.parent, opened.sample) == (0, session.record.turn_id(0))


def test_turn_survives_the_death_of_manager_and_worker(system: System) -> None:
    session = Session(system, sampling=Sampling(max_tokens=700, whole_logprobs=True))
    with session.client(retries=20) as agent, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(session.ask, user("t3"), agent=agent)
        until(lambda: any(worker["running"] for worker in system.http.get("/v1/workers").json()))
        system.kill_the_worker_that_runs()
        system.manager.kill()
        system.manager.start()
        made = asked.result(WAIT_S)
    (one,), ends = session.turns()
    assert tokens_of(made) == (ints(one.tokens), ints(ends[one.sample].tokens))
