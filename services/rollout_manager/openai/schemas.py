"""OpenAI's request and response bodies, as far as the fleet supports them; unsupported fields are rejected by name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlboost.services.rollout_manager.completion_waiters import CompletionChunk
from rlboost.services.rollout_manager.openai.detokenizer import Detokenizer
from rlboost.services.rollout_manager.openai.served_model import ServedModel
from rlboost.shared.http.problem import Problem
from rlboost.shared.messages import FinishReason
from rlboost.shared.validation import describe

MAX_N = 128
MAX_STOPS = 16

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Line = Annotated[str, Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
"""A field of OpenAI's of which only the default is supported."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool = False


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
    user: str = ""
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0

    @property
    def stops(self) -> Sequence[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(_CompletionBase):
    """`POST /v1/completions`."""

    prompt: Line | Tokens | Annotated[list[Line] | list[Tokens], Field(min_length=1, max_length=1)]
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
    top_logprobs: int = Field(0, ge=0, le=0)


def openai_problem(
    status: int, title: str, detail: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Problem:
    """Return an error whose problem document has OpenAI's `error` in it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = title.lower().replace(" ", "_")
    error = {"message": detail, "type": kind, "param": param, "code": code}
    return Problem(status, title, detail, headers=headers, error=error)


def parse_completion(raw: dict[str, Any]) -> CompletionBody:
    """Return the request in a body.

    Raises:
        Problem: 400, naming the first invalid field.

    """
    try:
        return CompletionBody.model_validate(_without_nulls(raw))
    except ValidationError as error:
        raise _invalid(error) from error


def parse_chat(raw: dict[str, Any]) -> ChatBody:
    """Return the request in a body; see `parse_completion`."""
    try:
        return ChatBody.model_validate(_without_nulls(raw))
    except ValidationError as error:
        raise _invalid(error) from error


def _without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if value is not None}  # null means the default


def _invalid(error: ValidationError) -> Problem:
    field = str(error.errors()[0]["loc"][0])
    lines = [line for line in describe(error) if line.partition(":")[0].partition(".")[0] == field]
    return openai_problem(400, "Invalid value", "; ".join(lines), param=field)


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

    def __init__(self, model: ServedModel, prompt: Sequence[int], body: CompletionBody | ChatBody) -> None:
        """Start an empty choice."""
        self._model = model
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
        return Delta(chunk.member, text, tokens, chunk.logprobs[:used], texts, finish)


class ResponseFormatter:
    """Builds OpenAI's response objects for one request."""

    def __init__(self, body: CompletionBody | ChatBody, group: int, job_id: str, prompt: Sequence[int]) -> None:
        """Derive the response's id from its group, so that a repeated request has the same id."""
        self._request, self._prompt = body, list(prompt)
        self._chat = isinstance(body, ChatBody)
        kind = "chat.completion" if self._chat else "text_completion"
        self._object = f"{kind}.chunk" if self._chat and body.stream else kind
        self._head = {"id": f"cmpl-{group:016x}", "created": int(time.time()), "model": job_id}

    def response(self, deltas: Sequence[Delta], n_tokens: int) -> dict[str, Any]:
        """Return the response to a request that is not streamed."""
        body = {**self._body([self._choice(delta, first=True) for delta in deltas]), "usage": self._usage(n_tokens)}
        if self._chat and self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Return one chunk of a streamed response."""
        body = self._body([self._choice(delta, first=first)])
        if first and self._chat and self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def usage_chunk(self, n_tokens: int) -> dict[str, Any] | None:
        """Return the final chunk of a streamed response, None unless usage was requested."""
        if not self._request.stream_options.include_usage:
            return None
        return {**self._body([]), "usage": self._usage(n_tokens)}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self._object, "choices": choices}

    def _usage(self, n_tokens: int) -> dict[str, int]:
        n_prompt = len(self._prompt)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}

    def _choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": delta.finish, "logprobs": None}
        if isinstance(self._request, CompletionBody):
            choice["text"] = delta.text
            if self._request.logprobs is not None:
                choice["logprobs"] = _completion_logprobs(delta, top=self._request.logprobs > 0)
            if self._request.return_token_ids and first:
                choice["prompt_token_ids"] = self._prompt
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
