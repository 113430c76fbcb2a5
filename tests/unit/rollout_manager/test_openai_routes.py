"""OpenAI's own client against the manager's routes, with a fake bus and simulated workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import structlog
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError

from rlboost.services.rollout_manager.ports import (
    NO_OPTIONS,
    ModelFiles,
    TemplateOptions,
    TextProcessesBusy,
    TokenizationError,
)
from rlboost.services.rollout_manager.serving import completion, routes
from rlboost.services.rollout_manager.serving.routes import BODY_BYTES
from rlboost.services.rollout_manager.serving.schemas import (
    IGNORED,
    UNSUPPORTED,
    error_object,
    parse_chat,
    parse_completion,
)
from rlboost.services.rollout_manager.serving.text import MAX_READS, ServedModel
from rlboost.shared.http.problem import Problem
from tests.support.eventually import eventually
from tests.support.manager_fakes import FakeTokenizer
from tests.support.serving_site import BEARER, TOKEN, Site, running_site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as site:
        yield site


TOKEN_IDS = {"return_token_ids": True}
CHAT: list[Any] = [{"role": "user", "content": "hi"}]


async def test_completions_of_several_prompts_are_indexed_by_prompt_then_sample(site: Site) -> None:
    prompts = ["ab", [7, 8, 9], "c"]
    asked: dict[str, Any] = {"model": "j", "prompt": prompts, "n": 2, "max_tokens": 5, "seed": 3}
    made = await site.client().completions.create(**asked, extra_body=TOKEN_IDS)
    assert [choice.index for choice in made.choices] == list(range(6))
    of_prompt: list[list[int]] = [choice.prompt_token_ids for choice in made.choices]
    assert of_prompt == [[1, 97, 98]] * 2 + [[7, 8, 9]] * 2 + [[1, 99]] * 2
    assert all(choice.text for choice in made.choices)
    span = {"version": "0", "start": 0, "end": 5}
    assert [choice.weight_versions for choice in made.choices] == [[span]] * 6
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3 + 3 + 2, 6 * 5)

    texts = [""] * 6
    usage = None
    async for chunk in await site.client().completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [text.count("[") for text in texts] == [5] * 6
    assert usage == made.usage


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [5, 6], [[5, 6]]])
async def test_one_prompt_is_taken_in_each_of_openais_forms(site: Site, prompt: Any) -> None:
    made = await site.client().completions.create(model="j", prompt=prompt, max_tokens=3)
    assert made.choices[0].text.count("[") == 3


async def test_several_prompts_with_a_key_are_not_generated_again(site: Site) -> None:
    asked: dict[str, Any] = {"model": "j", "prompt": [[5], [6]], "extra_headers": {"Idempotency-Key": "k"}}
    create = partial(site.client().completions.create, **asked, max_tokens=400, extra_body=TOKEN_IDS)
    broken = asyncio.create_task(create(), name="broken")
    await eventually(lambda: site.requested() == 2)
    broken.cancel()
    again = await create()
    assert [len(choice.token_ids) for choice in again.choices] == [400, 400]  # type: ignore[attr-defined]  # ours
    assert site.requested() == 2
    await eventually(lambda: not site.manager.world.ledger.served)


async def test_samples_of_a_request_with_a_key_are_released_together(site: Site) -> None:
    waiters = site.manager.completion_waiters
    groups = [await site.ask(), await site.ask()]
    ours = waiters.register(groups, site.manager.world, resumable=True)
    waiters.complete(ours, 0, 0)
    assert not waiters.clients.satisfied
    waiters.complete(ours, 1, 0)
    assert waiters.clients.satisfied == {group.group for group in groups}


async def test_more_completions_than_fit_are_rejected(site: Site) -> None:
    with pytest.raises(BadRequestError, match="1200 completions") as caught:
        await site.client().completions.create(model="j", prompt=[[5]] * 12, n=100)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "prompt: is empty"),
        ([], "not empty"),
        (["a", ""], "prompt: entry 1 is empty"),
        ([3, "a"], "prompt: entry 1 is 'a'"),
        ([5, -1], "prompt: entry 1 is -1"),
        (["a", 5], "prompt: entry 1 is 5"),
        ([[3], [7, -1]], "prompt: entry 1 has -1 as token 1"),
        ([True], "prompt: entry 0 is True"),
        (5, "prompt: should be text, a list of token ids, or a list of these"),
    ],
)
async def test_invalid_prompt_is_named_as_it_was_written(site: Site, prompt: Any, text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        await site.client().completions.create(model="j", prompt=prompt)
    assert text in str(caught.value.body["message"])  # type: ignore[index]
    assert "constrained" not in str(caught.value)
    assert caught.value.param == "prompt"


async def test_prompt_that_the_model_cannot_take_is_named_by_its_number(site: Site) -> None:
    site.files = ModelFiles("m", tokenizer=FakeTokenizer(), max_len=4)
    with pytest.raises(BadRequestError, match="prompt 1: a prompt of 4 tokens"):
        await site.client().completions.create(model="j", prompt=[[3], [3] * 4])


async def test_model_that_cannot_be_downloaded_takes_token_ids_and_says_why_no_text(site: Site) -> None:
    site.not_found = TokenizationError("the Hub is down")
    made = await site.client().completions.create(model="j", prompt=[3], max_tokens=4)
    assert made.usage is not None
    assert made.usage.completion_tokens
    for text in (
        site.client().completions.create(model="j", prompt="t3"),
        site.client().chat.completions.create(model="j", messages=CHAT),
    ):
        with pytest.raises(BadRequestError, match="the Hub is down"):
            await text
    assert (await site.client().models.list()).data[0].id == "j"
    site.not_found = TextProcessesBusy("it is being downloaded")
    with pytest.raises(APIStatusError, match="it is being downloaded") as caught:
        await site.client().completions.create(model="j", prompt="t3")
    assert caught.value.status_code == 503
    assert (await site.client().models.list()).data[0].id == "j"
    site.not_found = None
    assert (await site.client().completions.create(model="j", prompt="t3", max_tokens=4)).choices[0].text


async def test_list_of_models_waits_for_their_files_with_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LIST_LIMIT_S", 0.2)
    site.files = replace(site.files, max_len=9)
    for finding_s, known in ((60.0, None), (0.0, 9), (60.0, 9)):
        site.finding_s = finding_s
        async with asyncio.timeout(20.0):
            (listed,) = (await site.client().models.list()).data
        assert listed.model_dump().get("max_model_len") == known


CHATS_ONLY = {
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("reasoning_effort", "response_format", "structured_outputs", "top_logprobs"),
}


@pytest.mark.parametrize("field", [*UNSUPPORTED, *sorted(IGNORED)])
def test_known_field_is_unsupported_unless_it_changes_nothing(field: str) -> None:
    parse: Any = parse_completion if field in CHATS_ONLY else parse_chat
    raw = {"model": "j", "prompt": "a"} if field in CHATS_ONLY else {"model": "j", "messages": CHAT}
    for value in (*UNSUPPORTED.get(field, ["x", {"a": "b"}]), None):
        assert parse({**raw, field: value}) == parse(raw)
    if field in UNSUPPORTED:
        with pytest.raises(Problem, match=f"{field}: not supported") as caught:
            parse({**raw, field: {"other": 1}})
        assert error_object(caught.value)["param"] == field


def test_marks_for_a_cache_change_no_prompt() -> None:
    """As agents that also speak to Anthropic send them."""
    part = {"type": "text", "text": "a"}
    plain, marked = (
        parse_chat({"model": "j", "messages": [{"role": "user", "content": [one]}]}).messages[0].for_template()
        for one in (part, part | {"cache_control": {"type": "ephemeral"}})
    )
    assert plain == marked


async def test_openai_client_may_send_parameters_without_effect(site: Site) -> None:
    create = site.client().completions.create
    harmless = {"metadata": {"a": "b"}, "store": True, "response_format": {"type": "text"}, "top_k": -1}
    await create(model="j", prompt="a", max_tokens=1, user="me", best_of=1, extra_body=harmless)
    with pytest.raises(BadRequestError, match="response_format: not supported, except for the default") as caught:
        await create(model="j", prompt="a", extra_body={"response_format": {"type": "json_object"}})
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_value")
    with pytest.raises(BadRequestError, match="reasoning_effort: not supported: remove it") as caught:
        await create(model="j", prompt="a", extra_body={"reasoning_effort": "low"})
    assert caught.value.code == "unsupported_parameter"


async def test_unknown_field_is_unknown_and_the_nearest_one_suggested(site: Site) -> None:
    for wrong, hint in {"temprature": "did you mean temperature", "zzz": "unknown key"}.items():
        with pytest.raises(BadRequestError, match=hint) as caught:
            await site.client().completions.create(model="j", prompt="a", extra_body={wrong: 1})
        assert (caught.value.param, caught.value.code) == (wrong, "invalid_value")


async def test_errors_below_openais_routes_have_openais_format(site: Site) -> None:
    async def error_of(method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        answer = await site.http.request(method, path, **more)
        assert list(answer.json()) == ["error"], path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        return answer.status_code, answer.json()["error"]

    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for path in ("/v1/models", "/v1/models/x"):
        status, error = await error_of("GET", path)
        assert (status, error["code"]) == (401, "invalid_api_key")
    for path in ("/v1/embeddings", "/v1/moderations", "/v1/files/abc/content", "/v1/nonsense"):
        status, error = await error_of("POST", path, headers=bearer, json={})
        assert (status, error["code"]) == (404, "unknown_url")
        assert path in error["message"]
        assert "/v1/chat/completions" in error["message"]
    assert (await error_of("GET", "/v1/completions", headers=bearer))[0] == 405
    status, error = await error_of(
        "POST", "/v1/completions", headers={**bearer, "Content-Type": "application/json"}, content="{"
    )
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "JSON" in error["message"]
    for path in ("/v1/jobs", "/v1/jobs/none/nonsense", "/v1/workers", "/v1/fleet/x", "/metrics", "/nonsense"):
        answer = await site.http.get(path)
        assert answer.headers["content-type"] == "application/problem+json", path


async def test_openai_client_raises_its_own_errors(site: Site) -> None:
    with pytest.raises(AuthenticationError, match="this system's token") as denied:
        await site.client("wrong").completions.create(model="j", prompt="a")
    assert denied.value.code == "invalid_api_key"
    with pytest.raises(NotFoundError, match="not supported") as missing:
        await site.client().embeddings.create(model="j", input="a")
    assert missing.value.code == "unknown_url"
    with pytest.raises(NotFoundError, match="Qwen/Qwen3") as model:
        await site.client().models.retrieve("Qwen/Qwen3")
    assert (model.value.code, model.value.param) == ("model_not_found", "model")
    assert isinstance(model.value, APIStatusError)


class Broken(FakeTokenizer):
    """A tokenizer without tokens for some texts."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if "\x00" in text or "\ud800" in text:
            raise TokenizationError("no tokens")
        if "!" in text:
            raise RuntimeError("unforeseen")
        return super().encode(text, add_special_tokens=add_special_tokens)


class Template:
    """`ports.ChatTemplate` that renders contents."""

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS) -> str:
        del options
        return "".join(message["content"] for message in messages)

    def render_unchecked(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], is_prompt: bool) -> str:
        del tools, is_prompt
        return self.render(messages)


def broken(**more: Any) -> ModelFiles:
    return ModelFiles("m", tokenizer=Broken(), chat_template=Template(), **more)


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("text", ["a\x00", "a\ud800"])
@pytest.mark.parametrize("route", ["completions", "chat", "session"])
async def test_text_that_has_no_tokens_is_the_clients_error(site: Site, text: str, route: str) -> None:
    site.files = broken()
    messages = [{"role": "user", "content": text}]
    path, field = ("/v1/completions", "prompt") if route == "completions" else ("/v1/chat/completions", "messages")
    body = {"model": "j", field: text if route == "completions" else messages}
    headers = BEARER | ({"X-Session-ID": "s"} if route == "session" else {})
    answer = await site.http.post(path, headers=headers | JSON, content=json.dumps(body))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_unforeseen_error_has_openais_format_and_is_logged(site: Site, path: str) -> None:
    site.files = broken()
    body: dict[str, Any] = {"model": "j", "prompt": "!"}
    if "chat" in path:
        body = {"model": "j", "messages": [{"role": "user", "content": "!"}]}
    with structlog.testing.capture_logs() as logs:
        answer = await site.http.post(path, headers=BEARER, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["request_failed"]
    assert (await site.http.get("/v1/models", headers=BEARER)).status_code == 200


async def test_body_limit_follows_the_longest_context(site: Site) -> None:
    site.files = broken(max_len=100)
    assert (await site.http.post("/v1/completions", headers=BEARER, json={"model": "j", "prompt": "a"})).is_success
    answer = await site.http.post("/v1/completions", headers=BEARER, content=b" " * (BODY_BYTES + 6401))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_entity_too_large")
    answer = await site.http.post("/v1/completions", headers=BEARER, content=b" " * (BODY_BYTES + 6399))
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"X-Session-ID": "s" * 256}, {}, None),
        ({"Idempotency-Key": "k" * 256}, {}, None),
        ({}, {"stop": "s" * 1025}, "stop"),
        ({}, {"max_tokens": 98}, "max_tokens"),
        ({}, {"max_completion_tokens": 98}, "max_completion_tokens"),
    ],
)
async def test_value_beyond_its_limit_is_refused_by_name(
    site: Site, headers: dict[str, str], body: dict[str, Any], param: str | None
) -> None:
    site.files = broken(max_len=100)
    asked = {"model": "j", "messages": [{"role": "user", "content": "abc"}], **body}
    answer = await site.http.post("/v1/chat/completions", headers=BEARER | headers, json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_tokens_that_are_not_requested_are_cut_at_the_context(site: Site) -> None:
    site.files = ModelFiles("m", tokenizer=FakeTokenizer(), max_len=8)
    made = await site.client().completions.create(model="j", prompt=[5] * 5)
    assert made.usage is not None
    assert made.usage.completion_tokens == 3
    made = await site.client().completions.create(model="j", prompt=[5] * 5, max_tokens=3)
    with pytest.raises(BadRequestError, match="request 3 at most") as caught:
        await site.client().completions.create(model="j", prompt=[[5], [5] * 5], max_tokens=4)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


async def test_logprobs_are_parallel_lists_streamed_or_not(site: Site) -> None:
    """As vLLM 0.32 gives them for 0: the sampled token is in each list, and offsets count from the completion."""
    asked: dict[str, Any] = {"model": "j", "prompt": "ab", "max_tokens": 6, "seed": 1, "logprobs": 0}
    whole = (await site.client().completions.create(**asked)).choices[0]
    assert whole.logprobs is not None
    tokens, values = whole.logprobs.tokens or [], whole.logprobs.token_logprobs or []
    assert "".join(tokens) == whole.text
    assert len(tokens) == len(values) == 6
    assert whole.logprobs.top_logprobs == [{token: value} for token, value in zip(tokens, values, strict=True)]
    offsets = whole.logprobs.text_offset or []
    assert [whole.text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)] == tokens
    streamed: dict[str, list[Any]] = {}
    async for chunk in await site.client().completions.create(**asked, stream=True):
        assert chunk.choices[0].logprobs is not None
        for name, values_of_chunk in chunk.choices[0].logprobs.model_dump().items():
            streamed.setdefault(name, []).extend(values_of_chunk)
    assert streamed == whole.logprobs.model_dump()
    plain = (await site.client().completions.create(**{**asked, "logprobs": None})).choices[0]
    assert plain.logprobs is None
    more = {"return_tokens_as_token_ids": True, **TOKEN_IDS}  # as NeMo Gym asks for ids
    named: Any = (await site.client().completions.create(**asked, extra_body=more)).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token}" for token in named.token_ids]
    assert (named.text, named.logprobs.token_logprobs) == (whole.text, values)


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo_begins_a_text_with_its_prompt_as_it_was_given(site: Site, prompt: Any) -> None:
    asked: dict[str, Any] = {"model": "j", "prompt": prompt, "max_tokens": 3, "seed": 1}
    plain = (await site.client().completions.create(**asked)).choices[0]
    given = "ab" if prompt == "ab" else FakeTokenizer().decode(prompt, skip_special_tokens=False)
    echoed = (await site.client().completions.create(**asked, echo=True)).choices[0]
    assert (echoed.text, echoed.logprobs) == (given + plain.text, None)
    only = await site.client().completions.create(**{**asked, "max_tokens": 0}, echo=True)
    assert (only.choices[0].text, only.choices[0].finish_reason) == (given, "length")


async def test_prompt_of_tokens_is_decoded_for_echo_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a hundred thousand tokens, and the manager's loop decodes it."""
    decoded: list[int] = []

    def decode(self: ServedModel, tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return ""

    monkeypatch.setattr(ServedModel, "decode_raw", decode)
    asked: dict[str, Any] = {"model": "j", "prompt": [97] * 50, "max_tokens": 1, "n": 2}
    await site.client().completions.create(**asked)
    assert 50 not in decoded
    await site.client().completions.create(**asked, echo=True)
    assert decoded.count(50) == 1


@pytest.mark.parametrize(
    ("more", "param"),
    [({"logprobs": 2}, "logprobs"), ({"extra_body": {"top_k": 3}}, "top_k"), ({"logit_bias": {"5": 1}}, "logit_bias")],
)
async def test_option_that_no_worker_supports_is_refused_by_name(site: Site, more: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError, match=f"{param}: no worker of this job supports it") as caught:
        await site.client().completions.create(model="j", prompt="a", **more)
    assert caught.value.param == param


async def test_min_tokens_above_max_tokens_are_refused(site: Site) -> None:
    with pytest.raises(BadRequestError, match="min_tokens: 9 are more than the 8 tokens"):
        await site.client().completions.create(model="j", prompt="a", max_tokens=8, extra_body={"min_tokens": 9})


async def test_more_logprobs_than_the_manager_holds_are_refused(site: Site) -> None:
    with pytest.raises(BadRequestError, match="up to 80 MiB, and 64 MiB is the limit") as caught:
        await site.client().completions.create(model="j", prompt="a", logprobs=20, max_tokens=1 << 19)
    assert caught.value.param == "logprobs"
    more = {"prompt_logprobs": 20}  # of the prompt, in each of the choices
    with pytest.raises(BadRequestError, match="up to 205 MiB, and 64 MiB is the limit") as caught:
        await site.client().completions.create(model="j", prompt=[5] * 10_000, n=128, max_tokens=1, extra_body=more)
    assert caught.value.param == "prompt_logprobs"


async def test_requests_for_one_more_than_all_places_leave_some_to_the_system(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "MAX_SAMPLES_IN_FLIGHT", 1)
    site.manager.completion_waiters.register([await site.ask()], site.manager.world, resumable=True)
    assert (await site.client().completions.create(model="j", prompt="a", max_tokens=1)).choices


async def test_models_have_the_length_of_their_context_as_vllm_does(site: Site) -> None:
    for files, expected in ((ModelFiles("m"), None), (broken(max_len=100), 100)):
        site.files = files
        models = [model.model_dump() async for model in site.client().models.list()]
        assert [model["max_model_len"] for model in models] == [expected]
    assert (await site.client().models.retrieve("j")).model_dump()["max_model_len"] == 100


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/models"])
async def test_base_url_without_version_gets_a_hint(site: Site, path: str) -> None:
    answer = await site.http.post(path, headers=BEARER, json={})
    assert answer.status_code == 404
    assert "end the client's base_url with /v1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_body_without_its_type_names_the_header(site: Site, content_type: str | None) -> None:
    headers = BEARER | ({"Content-Type": content_type} if content_type else {})
    answer = await site.http.post("/v1/completions", headers=headers, content=b'{"model": "j", "prompt": "a"}')
    assert answer.status_code == 400
    assert "Content-Type" in answer.json()["error"]["message"]
    problem = (await site.http.post("/v1/jobs", headers=headers, content=b"{}")).json()
    assert "Content-Type: application/json" in problem["detail"]
    named = (await site.http.post("/v1/tokens", headers=BEARER, json={"scope": "read", "name": "x" * 300})).json()
    assert "body.name" in named["detail"]


async def test_waiting_conversations_share_a_few_reads_of_redis(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files = broken()
    reading, most = 0, 0

    async def hash_get(key: str, field: str) -> None:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= 1

    monkeypatch.setattr(site.bus, "hash_get", hash_get)
    chat = site.client().chat.completions.create
    asked = [chat(model="j", messages=CHAT, max_tokens=1, extra_headers={"X-Session-ID": str(i)}) for i in range(40)]
    assert len(await asyncio.gather(*asked)) == 40
    assert most == MAX_READS
