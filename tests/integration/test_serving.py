"""OpenAI's own client against a real manager, Redis and weight store, and real workers with the torch engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, APITimeoutError, AuthenticationError, BadRequestError, ConflictError, NotFoundError

from rlboost.shared.ids import SampleId
from rlboost.shared.messages import GroupRequested, JobReport, Message, SampleFinished, Sampling
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, pack
from tests.support.doc_snippets import blocks_in
from tests.support.generated_docs import ROOT
from tests.support.service_process import TOKEN
from tests.support.serving_system import WAIT_S, System, until

TEMPLATE = "{% for m in messages %}{{ bos_token }} {{ m.content }} {% endfor %}"
FOREVER = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("serving"), TEMPLATE)
    try:
        system.start()
        yield system
    finally:
        system.close()


def test_models_are_the_jobs_that_run(system: System) -> None:
    until(lambda: {model.id for model in system.openai.models.list()} == {system.job, system.remote})
    assert system.openai.models.retrieve("tiny").id == system.job


def test_a_completion_of_token_ids_has_text_logprobs_and_its_tokens(system: System) -> None:
    made = system.openai.completions.create(
        model="tiny", prompt=[3, 4, 5], n=3, max_tokens=9, logprobs=1, seed=1, extra_body=FOREVER
    )
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    texts = set()
    for choice in made.choices:
        tokens: list[int] = choice.token_ids  # type: ignore[attr-defined]
        assert (len(tokens), choice.finish_reason) == (9, "length")
        assert choice.text.split() == [f"t{token}" for token in tokens if token > 2]
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.tokens) == 9
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
        texts.add(choice.text)
    assert len(texts) == 3
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 27)


def test_the_same_seed_streamed_or_not_makes_the_same_text(system: System) -> None:
    asked: dict[str, Any] = {"model": system.job, "prompt": "t9 t8", "max_tokens": 40, "n": 2, "seed": 7}
    whole = system.openai.completions.create(**asked)
    texts, finish, usage = ["", ""], {}, None
    for chunk in system.openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finish[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert list(dict(sorted(finish.items())).values()) == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_several_prompts_are_completed_like_each_alone(system: System) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    prompts: list[str] = ["t3 t4", "t9", "t5 t6 t7"]
    alone = [system.openai.completions.create(**asked, prompt=prompt).choices[0].text for prompt in prompts]
    made = system.openai.completions.create(**asked, prompt=prompts, n=2, user="me")
    assert [choice.index for choice in made.choices] == list(range(6))
    assert [choice.text for choice in made.choices] == [text for text in alone for _ in range(2)]
    assert "<eos>" not in "".join(alone)


def test_a_chat_is_answered_and_temperature_zero_is_greedy(system: System) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "t3 t4"}]}],
        "temperature": 0,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    first, second = (system.openai.chat.completions.create(**asked, seed=seed) for seed in (1, 2))
    message = first.choices[0].message
    assert message.role == "assistant"
    assert message.content == second.choices[0].message.content
    assert first.prompt_token_ids == [1, 3, 4]
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.content is not None
    assert len(first.choices[0].logprobs.content) == len(first.choices[0].token_ids)
    chunks = list(system.openai.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content


def test_a_stop_string_ends_the_text_before_it_and_the_sample_with_it(system: System) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "t5", "seed": 3}
    words = system.openai.completions.create(**asked, max_tokens=40, extra_body=FOREVER).choices[0].text.split()
    stop = " ".join(words[9:11])
    stopped = system.openai.completions.create(**asked, max_tokens=8000, stop=[stop], extra_body=FOREVER)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text.split() == words[:9]
    until(lambda: system.audit()["serving"]["in_flight"] == 0)


def test_conversation_continues_after_its_worker_was_killed(system: System) -> None:
    messages: list[Any] = [{"role": "user", "content": "t3"}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "seed": 5,
        "extra_headers": {"X-Session-ID": "talk"},
        "extra_body": FOREVER,
    }
    first = system.openai.chat.completions.create(**asked, max_tokens=9)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "t4"}]
    prompt: list[int] = [1, 3, *first.choices[0].token_ids, 1, 4]
    before = system.audit()
    tokens: list[int] = []
    text, killed = "", False
    for chunk in system.openai.chat.completions.create(**asked, max_tokens=700, stream=True):
        tokens += chunk.choices[0].token_ids
        text += chunk.choices[0].delta.content or ""
        if not killed and len(tokens) > 100:
            system.kill_the_worker_that_runs()
            killed = True
    assert len(tokens) == 700
    audit = system.audit()
    assert audit["preemptions"]["without_notice"] == before["preemptions"].get("without_notice", 0) + 1
    assert audit["migrations"] == before["migrations"] + 1

    until(lambda: system.audit()["serving"]["in_flight"] == 0)
    system.manager.kill()
    system.manager.start()
    again = system.openai.chat.completions.create(**asked, max_tokens=700)
    assert again.prompt_token_ids == prompt
    assert again.choices[0].token_ids == tokens
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "t5"}]
    third = system.openai.chat.completions.create(**asked, max_tokens=1)
    assert third.prompt_token_ids == [*prompt, *tokens, 1, 5]
    messages[0] = {"role": "user", "content": "t6"}
    anew = system.openai.chat.completions.create(**asked, max_tokens=1)
    assert anew.prompt_token_ids[:2] == [1, 6]


def test_the_trainer_gets_its_samples_and_no_others(system: System) -> None:
    request = GroupRequested(
        job_id=system.job,
        group=SampleId(1, False, 0, 0, 0).pack(),
        n=4,
        prompt=pack([3, 4], I32),
        sampling=Sampling(max_tokens=30),
        version=0,
        seed=1,
    )
    system.send(names.rollouts_requested(system.job), request)
    system.openai.completions.create(model="tiny", prompt=[3], max_tokens=30)
    until(lambda: system.audit()["delivered"] == 4)
    until(lambda: system.audit()["serving"]["in_flight"] == 0)

    async def finished() -> list[Message]:
        bus = RedisBus(system.redis.url)
        entries = await bus.read({names.rollouts_finished(system.job): "0-0"})
        await bus.close()
        return [entry.message for entry in entries]

    samples = [m.sample for m in asyncio.run(finished()) if isinstance(m, SampleFinished)]
    assert sorted(samples) == [request.group + i for i in range(4)]
    audit = system.audit()
    serving = audit["serving"]
    assert audit["requested"] == 4
    assert serving["requested"] == serving["delivered"] + sum(serving["dropped"].values())
    made_again = sum(audit["tokens_regenerated"].values())
    assert audit["tokens_generated"] == audit["tokens_delivered"] + serving["tokens_delivered"] + made_again


def test_a_client_that_hangs_up_ends_its_samples(system: System) -> None:
    def counts() -> tuple[int, int]:
        serving = system.audit()["serving"]
        return serving["requested"], serving["dropped"].get("the client disconnected", 0)

    requested, dropped = counts()
    with system.openai.completions.create(
        model="tiny", prompt=[3], max_tokens=8000, n=2, stream=True, extra_body=FOREVER
    ) as stream:
        next(iter(stream))
    for patience_s in (0.3, 3.0, 30.0):  # until it is the answer that takes too long, and not the asking
        with pytest.raises(APITimeoutError):
            system.openai.completions.create(
                model="tiny", prompt=[3], max_tokens=8000, timeout=patience_s, extra_body=FOREVER
            )
        if counts()[0] >= requested + 3:
            break
    n_requested = counts()[0] - requested
    assert n_requested >= 3
    until(lambda: counts()[1] - dropped == n_requested)


def test_retry_with_the_same_key_continues_after_a_manager_kill(system: System) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 800, "extra_body": FOREVER}
    before = system.audit()["serving"]["requested"]
    headers = {"Idempotency-Key": "once"}
    stream = iter(system.openai.completions.create(**asked, stream=True, extra_headers=headers))
    assert len([next(stream) for _ in range(3)]) == 3
    system.manager.kill()
    with pytest.raises((APIError, httpx.HTTPError)):
        list(stream)
    system.manager.start()
    again = system.openai.completions.create(**asked, extra_headers=headers)
    assert len(again.choices[0].token_ids) == 800
    until(lambda: system.audit()["serving"]["in_flight"] == 0)
    assert system.audit()["serving"]["requested"] == before + 1


def test_without_a_tokenizer_token_ids_still_work(system: System) -> None:
    made = system.openai.completions.create(model="remote", prompt=[3], max_tokens=5)
    assert len(made.choices[0].token_ids) == 5  # type: ignore[attr-defined]
    with pytest.raises(BadRequestError, match="send the prompt as token ids"):
        system.openai.completions.create(model="remote", prompt="t3")
    with pytest.raises(BadRequestError, match="maximum length"):
        system.openai.completions.create(model="remote", prompt=[3] * 9000)


def test_many_conversations_at_once_are_all_answered(system: System) -> None:
    async def answers() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(
            base_url=system.manager.url, headers=headers, timeout=WAIT_S, limits=limits
        ) as http:

            async def chat(i: int) -> str:
                body = {"model": "tiny", "messages": [{"role": "user", "content": "t3"}], "max_tokens": 1, **FOREVER}
                answer = await http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": f"many-{i}"})
                return "" if answer.is_success else f"{answer.status_code} {answer.text}"

            return await asyncio.gather(*(chat(i) for i in range(256)))

    assert set(asyncio.run(answers())) == {""}


def test_long_prompt_neither_stops_the_manager_nor_costs_its_leadership(system: System) -> None:
    until(lambda: system.http.get("/readyz").is_success)
    led = system.manager.log().count("leadership_acquired")

    async def slowest() -> tuple[list[int], float]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=system.manager.url, headers=headers, timeout=WAIT_S) as http:

            async def ask(n_words: int) -> int:
                return (
                    await http.post("/v1/completions", json={"model": "tiny", "prompt": "t3 " * n_words})
                ).status_code

            asking = asyncio.gather(*(ask(n_words) for n_words in (400_000, 1_300_000, 7_000_000)))
            slowest_s = 0.0
            while not asking.done():
                began = time.monotonic()
                assert (await http.get("/healthz")).is_success
                slowest_s = max(slowest_s, time.monotonic() - began)
                await asyncio.sleep(0.02)
            return list(await asking), slowest_s

    statuses, slowest_s = asyncio.run(slowest())
    assert statuses == [400, 400, 413]
    assert slowest_s < 2.5  # the lease has 3 s
    assert system.manager.log().count("leadership_acquired") == led


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("n", 0),
        ("max_tokens", 0),
        ("extra_body", {"stop_token_ids": [1 << 40]}),
        ("logprobs", 21),
        ("logit_bias", {"96": 1}),
        ("stop", [""]),
        ("prompt", [3] * 8192),
        ("prompt", [96]),
        ("prompt", ["t3", ""]),
        ("best_of", 3),
    ],
)
def test_a_wrong_value_is_refused_by_name(system: System, field: str, value: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [3], "max_tokens": 1, field: value}
    with pytest.raises(BadRequestError) as refused:
        system.openai.completions.create(**asked)
    assert refused.value.param == ("stop_token_ids" if field == "extra_body" else field)
    assert refused.value.type == "invalid_request_error"


def test_openai_errors_are_raised_for_a_wrong_key_and_a_missing_route(system: System) -> None:
    with pytest.raises(AuthenticationError) as denied:
        system.openai.with_options(api_key="wrong").models.list()
    assert (denied.value.code, denied.value.type) == ("invalid_api_key", "invalid_request_error")
    with pytest.raises(NotFoundError, match="embeddings is not supported"):
        system.openai.embeddings.create(model="tiny", input="t3")


def test_request_for_an_unserved_model_is_refused_with_the_reason(system: System) -> None:
    with pytest.raises(NotFoundError, match=system.job):
        system.openai.completions.create(model="gpt-9", prompt="x")
    system.send(names.JOB_REPORTS, JobReport(job_id=system.remote, state="paused", step=0))
    until(lambda: system.http.get(f"/v1/jobs/{system.remote}").json()["state"] == "paused")
    with pytest.raises(ConflictError, match="rlboost resume"):
        system.openai.completions.create(model="remote", prompt=[3])
    system.send(names.JOB_REPORTS, JobReport(job_id=system.remote, state="completed", step=9))
    until(lambda: system.http.get(f"/v1/jobs/{system.remote}").json()["state"] == "completed")
    with pytest.raises(ConflictError, match="no longer served"):
        system.openai.completions.create(model="remote", prompt=[3])


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_client_blocks_of_the_documentation_run(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("countdown", "chess"):
        system.create_job(name, str(system.model))
    (tmp_path / ".rlboost").mkdir()
    (tmp_path / ".rlboost/config.json").write_text(json.dumps({"url": system.manager.url, "token": TOKEN}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("openai.OpenAI", lambda **_: system.openai)
    for page in ("serving.md", "rest.md"):
        blocks = blocks_in(ROOT / "docs" / page, "python")
        assert blocks
        module: dict[str, Any] = {}
        for block in blocks:
            exec(block, module)
        if page == "serving.md":
            assert module["second"].choices[0].message.role == "assistant"
