"""OpenAI's requests and answers, as far as the fleet can honour them; what it cannot is refused and named."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.rollout_manager.domain.serving_text import Text
from services.rollout_manager.serving import Piece
from services.rollout_manager.serving_model import ServedModel
from shared.http import Problem
from shared.messages import FinishReason
from shared.validation import describe

MAX_N = 128
MAX_STOPS = 16

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Line = Annotated[str, Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
"""A field of OpenAI's that only its default is supported of."""


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Shape):
    """Of a streamed answer."""

    include_usage: bool = False


class Asked(_Shape):
    """What completions and chats have in common."""

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


class AskedCompletion(Asked):
    """`POST /v1/completions`."""

    prompt: Line | Tokens | Annotated[list[Line] | list[Tokens], Field(min_length=1, max_length=1)]
    max_tokens: Count = 16
    logprobs: int | None = Field(None, ge=0, le=1)


class Part(_Shape):
    """A part of a message: text is all there is."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; what else it has is the template's."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Line
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, Any]:
        """Return what a template gets: the content as one text."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class AskedChat(Asked):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=0)


def problem(
    status: int, title: str, detail: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Problem:
    """Return an error that is a problem document and has OpenAI's `error` in it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = title.lower().replace(" ", "_")
    error = {"message": detail, "type": kind, "param": param, "code": code}
    return Problem(status, title, detail, headers=headers, error=error)


def read_completion(raw: dict[str, Any]) -> AskedCompletion:
    """Return the request in a body.

    Raises:
        Problem: 400, naming the first wrong field.

    """
    try:
        return AskedCompletion.model_validate(_given(raw))
    except ValidationError as error:
        raise _wrong(error) from error


def read_chat(raw: dict[str, Any]) -> AskedChat:
    """Return the request in a body; see `read_completion`."""
    try:
        return AskedChat.model_validate(_given(raw))
    except ValidationError as error:
        raise _wrong(error) from error


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if value is not None}  # null is OpenAI's "as by default"


def _wrong(error: ValidationError) -> Problem:
    field = str(error.errors()[0]["loc"][0])
    lines = [line for line in describe(error) if line.partition(":")[0].partition(".")[0] == field]
    return problem(400, "Invalid value", "; ".join(lines), param=field)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    pieces: list[str]
    """Each token as text by itself; only where logprobs are asked for."""
    finish: FinishReason | None

    def joined(self, later: Delta) -> Delta:
        """Return this and what followed as one."""
        return Delta(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            self.pieces + later.pieces,
            later.finish,
        )


class Choice:
    """One completion as the client sees it, as its pieces come."""

    def __init__(self, model: ServedModel, prompt: Sequence[int], asked: AskedCompletion | AskedChat) -> None:
        """Begin with nothing."""
        self._model = model
        self._text = Text(model.decode, prompt, asked.stops)
        self._named = asked.logprobs not in {None, False}
        self.n_tokens = 0

    def take(self, piece: Piece) -> Delta:
        """Return what a piece adds; nothing behind a stop string."""
        text, used = "", 0
        for token in piece.tokens:
            used += 1
            if piece.finish != "stop" or used < len(piece.tokens):  # an end token is no text
                text += self._text.add(token)
            if self._text.stopped:
                break
        finish = "stop" if self._text.stopped else piece.finish
        if finish:
            text += self._text.end()
            finish = "stop" if self._text.stopped else finish
        self.n_tokens += used
        tokens = piece.tokens[:used]
        pieces = [self._model.piece(token) for token in tokens] if self._named else []
        return Delta(piece.member, text, tokens, piece.logprobs[:used], pieces, finish)


class Answer:
    """OpenAI's objects for one request."""

    def __init__(self, asked: AskedCompletion | AskedChat, group: int, job_id: str, prompt: Sequence[int]) -> None:
        """Name the answer after its group, so that it has the same id when it is asked for again."""
        self._asked, self._prompt = asked, list(prompt)
        self._chat = isinstance(asked, AskedChat)
        kind = "chat.completion" if self._chat else "text_completion"
        self._object = f"{kind}.chunk" if self._chat and asked.stream else kind
        self._head = {"id": f"cmpl-{group:016x}", "created": int(time.time()), "model": job_id}

    def whole(self, deltas: Sequence[Delta], n_tokens: int) -> dict[str, Any]:
        """Return the answer to a request that is not streamed."""
        body = {**self._body([self._choice(delta, first=True) for delta in deltas]), "usage": self._usage(n_tokens)}
        if self._chat and self._asked.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Return one part of a streamed answer."""
        body = self._body([self._choice(delta, first=first)])
        if first and self._chat and self._asked.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def last(self, n_tokens: int) -> dict[str, Any] | None:
        """Return the part behind all others, where it was asked for."""
        if not self._asked.stream_options.include_usage:
            return None
        return {**self._body([]), "usage": self._usage(n_tokens)}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self._object, "choices": choices}

    def _usage(self, n_tokens: int) -> dict[str, int]:
        n_prompt = len(self._prompt)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}

    def _choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": delta.finish, "logprobs": None}
        if isinstance(self._asked, AskedCompletion):
            choice["text"] = delta.text
            if self._asked.logprobs is not None:
                choice["logprobs"] = _completion_logprobs(delta, top=self._asked.logprobs > 0)
            if self._asked.return_token_ids and first:
                choice["prompt_token_ids"] = self._prompt
        else:
            role = {"role": "assistant"} if first else {}
            choice["delta" if self._asked.stream else "message"] = {**role, "content": delta.text}
            if self._asked.logprobs:
                choice["logprobs"] = {"content": _chat_logprobs(delta)}
        if self._asked.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice


def _completion_logprobs(delta: Delta, *, top: bool) -> dict[str, Any]:
    pairs = zip(delta.pieces, delta.logprobs, strict=True)
    return {
        "tokens": delta.pieces,
        "token_logprobs": delta.logprobs,
        "top_logprobs": [{piece: logprob} for piece, logprob in pairs] if top else None,
    }


def _chat_logprobs(delta: Delta) -> list[dict[str, Any]]:
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(delta.pieces, delta.logprobs, strict=True)
    ]
