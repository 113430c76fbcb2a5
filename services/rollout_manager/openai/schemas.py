"""OpenAI's request and response bodies, as far as the fleet supports them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from rlboost.services.rollout_manager.completion_waiters import CompletionChunk
from rlboost.services.rollout_manager.openai.detokenizer import Detokenizer
from rlboost.services.rollout_manager.openai.errors import openai_problem
from rlboost.services.rollout_manager.openai.served_model import ServedModel
from rlboost.services.rollout_manager.openai.unsupported import supported_fields
from rlboost.shared.messages import FinishReason
from rlboost.shared.validation import describe

MAX_N = 128
MAX_STOPS = 16

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Line = Annotated[str, Field(min_length=1)]


def _prompts(value: object) -> list[str | list[int]]:
    """Return the prompts: the value is one text, one list of token ids, or a list of them."""
    prompts: Any = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("should be text, a list of token ids, or a list of these, and not empty")
    for i, prompt in enumerate(prompts):
        entry = "" if prompts is not value else f"entry {i} "
        if prompt in ("", []):
            raise ValueError(f"{entry}is empty: give at least one character or token id")
        if not isinstance(prompt, str) and not _are_tokens(prompt):
            raise ValueError(f"{entry}is {prompt!r:.80}: should be text or a list of token ids from 0 to 2147483647")
    return prompts


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(type(i) is int and 0 <= i < 1 << 31 for i in value)


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
    stop: Line | Annotated[list[Line], Field(max_length=MAX_STOPS)] = []
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
        """Return the message as a chat template takes it, with the content as one text."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatBody(_CompletionBase):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False


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
    finish: FinishReason | None

    def merged(self, later: Delta) -> Delta:
        """Return this part and the next one as one."""
        return Delta(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            self.token_texts + later.token_texts,
            later.finish,
        )


class Choice:
    """One completion as the client sees it, built from chunks."""

    def __init__(self, index: int, model: ServedModel, prompt: Sequence[int], body: CompletionBody | ChatBody) -> None:
        self._index, self._model = index, model
        self._detokenizer = Detokenizer(model.decode, prompt, body.stops)
        self._has_logprobs = body.logprobs not in {None, False}
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
        return Delta(self._index, text, tokens, chunk.logprobs[:used], texts, finish)


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
            if self._request.logprobs is not None:
                choice["logprobs"] = _completion_logprobs(delta, top=self._request.logprobs > 0)
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


def _completion_logprobs(delta: Delta, *, top: bool) -> dict[str, Any]:
    pairs = zip(delta.token_texts, delta.logprobs, strict=True)
    return {
        "tokens": delta.token_texts,
        "token_logprobs": delta.logprobs,
        "top_logprobs": [{text: logprob} for text, logprob in pairs] if top else None,
    }


def _chat_logprobs(delta: Delta) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(delta.token_texts, delta.logprobs, strict=True)
    ]
