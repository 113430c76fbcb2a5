"""OpenAI's request and response bodies, as far as the fleet supports them."""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from rlboost.services.rollout_manager.serving.text import Detokenizer, ServedModel
from rlboost.services.rollout_manager.waiters import CompletionChunk
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.server import ErrorFormat
from rlboost.shared.messages import FinishReason
from rlboost.shared.validation import describe

# --- errors -----------------------------------------------------------------------------------------------------------
#
# The format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.


ROUTES = "GET /v1/models, GET /v1/models/{model}, POST /v1/completions and POST /v1/chat/completions"

_WITHOUT_VERSION = ("/completions", "/chat/completions", "/models")
"""What clients request whose base URL lacks the version."""


def openai_problem(
    status: int, title: str, detail: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Problem:
    """Return an error that names the request's field `param`; its code is the title in snake case."""
    return Problem(status, title, detail, headers=headers, error=_error(status, title, detail, param))


def error_object(problem: Problem) -> dict[str, Any]:
    """Return the content of an error's `error`."""
    return dict(problem.extra.get("error") or _error(problem.status, problem.title, problem.detail))


def openai_error_format(own_paths: Collection[str]) -> ErrorFormat:
    """Return a function that gives errors this format on all routes below `/v1`, known or not, but RLBoost's own.

    Args:
        own_paths: the first part of the path of each of RLBoost's own routes below `/v1`, such as `jobs`.

    """

    def format_error(method: str, path: str, document: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if document["status"] in {404, 405} and path.rstrip("/") in _WITHOUT_VERSION:
            detail = f"{method} {path} is not supported: end the client's base_url with /v1, for {method} /v1{path}"
            return 404, {"error": _error(404, "Unknown URL", detail)}
        version, _, rest = path.strip("/").partition("/")
        if version != "v1" or rest.partition("/")[0] in own_paths:
            return None
        status, title, detail = document["status"], document["title"], document["detail"]
        if status == 401:
            title = "Invalid API key"
        elif "error" not in document and status in {404, 405}:
            title = "Unknown URL"
            detail = f"{method} {path} is not supported: of OpenAI's API, this server has {ROUTES}"
        elif fields := document.get("errors"):
            status, detail = 400, "; ".join(f"{item['field']}: {item['error']}" for item in fields)
        error = document.get("error") or _error(status, title, detail)
        return status, {"error": error}

    return format_error


def _error(status: int, title: str, detail: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": detail, "type": kind, "param": param, "code": title.lower().replace(" ", "_")}


# --- unsupported fields -----------------------------------------------------------------------------------------------
#
# Fields of OpenAI's and vLLM's requests that the fleet does not support, and those that change no completion.


IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that are accepted because they do not change the completion."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "top_k": (-1, 0),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Unsupported field -> its values that mean the default behavior and are therefore accepted."""


def supported_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without null, ignored and default fields; unknown fields stay in it.

    Raises:
        Problem: 400, naming the first unsupported field.

    """
    given = {name: value for name, value in raw.items() if value is not None}  # null means the default
    for name, defaults in UNSUPPORTED.items():
        if name in given and given[name] not in defaults:
            raise _unsupported(name, defaults)
    return {name: value for name, value in given.items() if name not in IGNORED and name not in UNSUPPORTED}


def _unsupported(name: str, defaults: tuple[Any, ...]) -> Problem:
    if not defaults:
        return openai_problem(400, "Unsupported parameter", f"{name}: not supported: remove it", param=name)
    accepted = " or ".join(map(json.dumps, defaults))
    detail = f"{name}: not supported, except for the default {accepted}: remove it"
    return openai_problem(400, "Unsupported value", detail, param=name)


# --- bodies -----------------------------------------------------------------------------------------------------------


MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
"""The end of a completion's text is compared with each beginning of a stop string, at each token."""
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for; vLLM's."""

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Line = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


def _prompts(value: object) -> list[str | list[int]]:
    """Return the prompts: the value is one text, one list of token ids, or a list of them."""
    if isinstance(value, str):
        return [_prompt(value)]
    if not isinstance(value, list) or not value:
        raise ValueError("should be text, a list of token ids, or a list of these, and not empty")
    if type(value[0]) is int:  # one list of token ids
        return [_prompt(value)]
    return [_prompt(prompt, f"entry {i} ") for i, prompt in enumerate(value)]


def _prompt(prompt: Any, entry: str = "") -> str | list[int]:
    """Return one prompt; `entry` names its place in a list of several."""
    if not isinstance(prompt, str | list):
        # A TypeError would not become an error of the field.
        raise ValueError(f"{entry}is {reprlib.repr(prompt)}: should be text or a list of token ids")  # noqa: TRY004
    if not prompt:
        raise ValueError(f"{entry}is empty: give at least one character or token id")
    if isinstance(prompt, list):
        at = next((i for i, token in enumerate(prompt) if type(token) is not int or not 0 <= token < 1 << 31), None)
        if at is not None:
            where = (
                f"{entry}has {reprlib.repr(prompt[at])} as token {at}"
                if entry
                else (f"entry {at} is {reprlib.repr(prompt[at])}")
            )
            raise ValueError(f"{where}: should be a token id from 0 to 2147483647")
    return prompt


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored."""


class _CompletionBase(_Body):
    """The fields that completions and chat completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def stops(self) -> Sequence[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(_CompletionBase):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    """One prompt or more, each as text or as token ids."""
    max_tokens: Count = 16
    logprobs: int | None = Field(None, ge=0, le=1)

    @property
    def has_logprobs(self) -> bool:
        """Return True if the log-probabilities of the sampled tokens are requested: 0 requests no others."""
        return self.logprobs is not None

    @property
    def requested_tokens(self) -> int | None:
        """Return the number of tokens that the client asks for, None if it leaves it to us."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None


class TextPart(_Body):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; additional fields are passed to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Line
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as a chat template takes it, with the parts of its content joined to one text."""
        content = "".join(p.text for p in self.content) if isinstance(self.content, list) else self.content
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatBody(_CompletionBase):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False

    @property
    def has_logprobs(self) -> bool:
        """Return True if the log-probabilities of the sampled tokens are requested."""
        return self.logprobs

    @property
    def requested_tokens(self) -> int | None:
        """Return the number of tokens that the client asks for, None if it leaves it to us."""
        return self.max_completion_tokens or self.max_tokens


Body = TypeVar("Body", CompletionBody, ChatBody)


def parse_completion(raw: dict[str, Any]) -> CompletionBody:
    """Return the request in a body.

    Raises:
        Problem: 400, naming the first invalid field.

    """
    return _parse(CompletionBody, raw)


def parse_chat(raw: dict[str, Any]) -> ChatBody:
    """Return the request in a body; see `parse_completion`."""
    return _parse(ChatBody, raw)


def _parse(body: type[Body], raw: dict[str, Any]) -> Body:
    try:
        return body.model_validate(supported_fields(raw))
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        lines = [line for line in describe(error, body) if line.partition(":")[0].partition(".")[0] == field]
        raise openai_problem(400, "Invalid value", "; ".join(lines), param=field) from error


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of one choice."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    token_texts: list[str]
    """The text of each single token; only with logprobs."""
    text_offsets: list[int]
    """Where each of these begins in the completion."""
    finish: FinishReason | None

    def merged(self, later: Delta) -> Delta:
        """Return this part and the next one as one."""
        return Delta(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            self.token_texts + later.token_texts,
            self.text_offsets + later.text_offsets,
            later.finish,
        )


class Choice:
    """One completion as the client sees it, built from chunks."""

    def __init__(self, index: int, model: ServedModel, prompt: Sequence[int], body: CompletionBody | ChatBody) -> None:
        self._index, self._model = index, model
        self._detokenizer = Detokenizer(model.decode, prompt, body.stops)
        self._has_logprobs = body.has_logprobs
        self._offset = 0
        """The number of characters of all single tokens so far."""
        self.n_tokens = 0

    def add(self, chunk: CompletionChunk) -> Delta:
        """Return what a chunk adds; nothing after a stop string."""
        text, used = "", 0
        for token in chunk.tokens:
            used += 1
            if chunk.finish != "stop" or used < len(chunk.tokens):  # a stop token has no text
                text += self._detokenizer.add(token)
            if self._detokenizer.stopped:
                break
        finish = "stop" if self._detokenizer.stopped else chunk.finish
        if finish:
            text += self._detokenizer.flush()
            finish = "stop" if self._detokenizer.stopped else finish
        self.n_tokens += used
        tokens = chunk.tokens[:used]
        texts = [self._model.token_text(token) for token in tokens] if self._has_logprobs else []
        offsets = list(accumulate(map(len, texts), initial=self._offset))
        self._offset = offsets.pop()
        logprobs = [max(logprob, MIN_LOGPROB) for logprob in chunk.logprobs[:used]]
        return Delta(self._index, text, tokens, logprobs, texts, offsets, finish)


class ResponseFormatter:
    """Builds OpenAI's response objects for one request."""

    def __init__(self, body: CompletionBody | ChatBody, group: int, job_id: str, prompts: Sequence[list[int]]) -> None:
        """Derive the response's id from its first group, so that a repeated request has the same id."""
        self._request, self._prompts = body, prompts
        self._chat = isinstance(body, ChatBody)
        kind = "chat.completion" if self._chat else "text_completion"
        self._object = f"{kind}.chunk" if self._chat and body.stream else kind
        self._head = {"id": f"cmpl-{group:016x}", "created": int(time.time()), "model": job_id}

    def response(self, deltas: Sequence[Delta], n_tokens: int) -> dict[str, Any]:
        """Return the response to a request that is not streamed."""
        body = {**self._body([self._choice(delta, first=True) for delta in deltas]), "usage": self._usage(n_tokens)}
        if self._chat and self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompts[0]
        return body

    def chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Return one chunk of a streamed response."""
        body = self._body([self._choice(delta, first=first)])
        if first and self._chat and self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompts[0]
        return body

    def usage_chunk(self, n_tokens: int) -> dict[str, Any] | None:
        """Return the final chunk of a streamed response, None unless usage was requested."""
        if not self._request.stream_options.include_usage:
            return None
        return {**self._body([]), "usage": self._usage(n_tokens)}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self._object, "choices": choices}

    def _usage(self, n_tokens: int) -> dict[str, int]:
        n_prompt = sum(map(len, self._prompts))
        return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}

    def _choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": delta.finish, "logprobs": None}
        if isinstance(self._request, CompletionBody):
            choice["text"] = delta.text
            if self._request.has_logprobs:
                choice["logprobs"] = _completion_logprobs(delta)
            if self._request.return_token_ids and first:
                choice["prompt_token_ids"] = self._prompts[delta.index // self._request.n]
        else:
            role = {"role": "assistant"} if first else {}
            choice["delta" if self._request.stream else "message"] = {**role, "content": delta.text}
            if self._request.logprobs:
                choice["logprobs"] = {"content": _chat_logprobs(delta)}
        if self._request.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice


def _completion_logprobs(delta: Delta) -> dict[str, Any]:
    """Return parallel lists, in which the sampled token is the only one at each place; so does vLLM for 0."""
    pairs = zip(delta.token_texts, delta.logprobs, strict=True)
    return {
        "text_offset": delta.text_offsets,
        "tokens": delta.token_texts,
        "token_logprobs": delta.logprobs,
        "top_logprobs": [{text: logprob} for text, logprob in pairs],
    }


def _chat_logprobs(delta: Delta) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(delta.token_texts, delta.logprobs, strict=True)
    ]
