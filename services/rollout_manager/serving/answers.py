"""OpenAI's response bodies, from the chunks of completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, Literal

from rlboost.services.rollout_manager.serving.schemas import ChatBody, CompletionBody
from rlboost.services.rollout_manager.serving.text import CONTEXT_TOKENS, Detokenizer, ServedModel
from rlboost.services.rollout_manager.serving.tools import CallReader, ToolCall
from rlboost.services.rollout_manager.waiters import CompletionChunk
from rlboost.shared.messages import FinishReason
from rlboost.shared.wire import I32, ints, length

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for; vLLM's."""


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
    top_logprobs: list[list[tuple[str, float]]]
    """(Text, log-probability) of the most likely tokens at each of their positions; empty lists if not requested."""
    finish: FinishReason | Literal["tool_calls"] | None
    calls: Sequence[ToolCall] = ()
    """All tool calls of the completion, at its end."""
    stop: str = ""
    """The stop string that ended the completion, if one has."""
    weight_versions: Sequence[dict[str, Any]] = ()
    """Which weights generated the whole completion, at its end: see `_weight_versions`."""

    def parts(self) -> Iterator[Delta]:
        """Yield it as clients expect it in a stream: the finish reason after the tool calls."""
        if not self.calls:
            yield self
            return
        yield replace(self, finish=None, stop="")
        end = Delta(self.index, "", [], [], [], [], [], self.finish, stop=self.stop)
        yield replace(end, weight_versions=self.weight_versions)

    def merged(self, later: Delta) -> Delta:
        """Return this part and the next one as one."""
        return Delta(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            self.token_texts + later.token_texts,
            self.text_offsets + later.text_offsets,
            self.top_logprobs + later.top_logprobs,
            later.finish,
            (*self.calls, *later.calls),
            later.stop,
            later.weight_versions,
        )


def token_namer(model: ServedModel, body: CompletionBody | ChatBody) -> Callable[[int], str]:
    """Return what names a token in logprobs."""
    return "token_id:{}".format if body.return_tokens_as_token_ids else model.token_text


class Choice:
    """One completion as the client sees it, built from chunks."""

    def __init__(
        self,
        index: int,
        model: ServedModel,
        prompt: bytes,
        body: CompletionBody | ChatBody,
        calls: CallReader | None = None,
    ) -> None:
        """Start after a prompt, a column of tokens; `calls` reads the tool calls, None to leave them in the text."""
        self._index, self._model, self._calls = index, model, calls
        last = ints(prompt[-CONTEXT_TOKENS * I32.itemsize :])
        self._detokenizer = Detokenizer(model.decode if calls is None else model.decode_raw, last, body.stops)
        self._has_logprobs, self._has_stops = body.has_logprobs, bool(body.stops)
        self._name = token_namer(model, body)
        self._offset = 0
        """The number of characters of all single tokens so far."""
        self.n_tokens = 0

    def add(self, chunk: CompletionChunk) -> Delta:
        """Return what a chunk adds; nothing after a stop string."""
        has_stop_token = chunk.finish == "stop"  # it has no text
        of_text = chunk.tokens[:-1] if has_stop_token else chunk.tokens
        # To decode many tokens at once takes a fourth of the time, but leaves open which one has ended a stop string.
        parts = [[token] for token in of_text] if self._has_stops else [of_text]
        text, used, end = "", 0, ""
        for part in parts:
            used += len(part)
            text += self._read(self._detokenizer.add(part), part)
            if self._detokenizer.stopped:
                break
        if has_stop_token and not self._detokenizer.stopped:
            used, end = len(chunk.tokens), "".join(map(self._model.token_text, chunk.tokens[-1:]))
        finish: FinishReason | Literal["tool_calls"] | None = "stop" if self._detokenizer.stopped else chunk.finish
        calls: Sequence[ToolCall] = ()
        if finish:
            text += self._read(self._detokenizer.flush())
            finish = "stop" if self._detokenizer.stopped else finish
            if self._calls is not None:
                rest, calls = self._calls.finish(end)
                text += rest
            finish = "tool_calls" if calls and finish == "stop" else finish
        self.n_tokens += used
        tokens = chunk.tokens[:used]
        texts = [self._name(token) for token in tokens] if self._has_logprobs else []
        offsets = list(accumulate(map(len, texts), initial=self._offset))
        self._offset = offsets.pop()
        logprobs = [max(logprob, MIN_LOGPROB) for logprob in chunk.logprobs[:used]]
        top = [
            [(self._name(token), max(logprob, MIN_LOGPROB)) for token, logprob in one]
            for one in chunk.top_logprobs[:used]
        ] or [[] for _ in texts]
        stop, versions = self._detokenizer.stop, _weight_versions(chunk.spans, self.n_tokens) if finish else ()
        return Delta(self._index, text, tokens, logprobs, texts, offsets, top, finish, calls, stop, versions)

    def _read(self, text: str, tokens: Sequence[int] = ()) -> str:
        """Return the part of new text that is certainly outside of tool calls."""
        return text if self._calls is None else self._calls.add(text, self._model.special_texts(tokens))


class ResponseFormatter:
    """Builds OpenAI's response objects for one request."""

    def __init__(self, body: CompletionBody | ChatBody, group: int, job_id: str, prompts: Sequence[bytes]) -> None:
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
            body["prompt_token_ids"] = ints(self._prompts[0])
        return body

    def chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """Return one chunk of a streamed response."""
        body = self._body([self._choice(delta, first=first)])
        if first and self._chat and self._request.return_token_ids:
            body["prompt_token_ids"] = ints(self._prompts[0])
        return body

    def usage_chunk(self, n_tokens: int) -> dict[str, Any] | None:
        """Return the final chunk of a streamed response, None unless usage was requested."""
        if not self._request.stream_options.include_usage:
            return None
        return {**self._body([]), "usage": self._usage(n_tokens)}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self._object, "choices": choices}

    def _usage(self, n_tokens: int) -> dict[str, int]:
        n_prompt = sum(map(length, self._prompts))
        return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}

    def _choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": delta.finish, "logprobs": None}
        if delta.stop:
            choice["stop_reason"] = delta.stop
        if isinstance(self._request, CompletionBody):
            choice["text"] = delta.text
            if self._request.has_logprobs:
                choice["logprobs"] = _completion_logprobs(delta)
            if self._request.return_token_ids and first:
                choice["prompt_token_ids"] = ints(self._prompts[delta.index // self._request.n])
        else:
            choice["delta" if self._request.stream else "message"] = self._message(delta, first=first)
            if self._request.logprobs:
                choice["logprobs"] = {"content": _chat_logprobs(delta)}
        if self._request.return_token_ids:
            choice["token_ids"] = delta.tokens
            if delta.finish:
                choice["weight_versions"] = delta.weight_versions
        return choice

    def _message(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text} if first else {"content": delta.text}
        if delta.calls:
            message["content"] = (delta.text if self._request.stream else delta.text.strip()) or None
            calls = [call.public() for call in delta.calls]
            message["tool_calls"] = (
                [{"index": i, **call} for i, call in enumerate(calls)] if self._request.stream else calls
            )
        return message


def _weight_versions(spans: Sequence[tuple[str, int, int]], n_tokens: int) -> list[dict[str, Any]]:
    """Return vLLM's `WeightVersionSpan`s of the first tokens, from (worker, weight version, number of tokens)."""
    found, start = [], 0
    for version, same in groupby(spans, itemgetter(1)):
        end = min(start + sum(n for _, _, n in same), n_tokens)
        if start < end:
            found.append({"version": str(version), "start": start, "end": end})
        start = end
    return found


class PromptLogprobs:
    """A prompt's text and log-probabilities: each token of it but the first has its own, and the most likely ones'."""

    def __init__(self, model: ServedModel, body: CompletionBody, prompt: bytes, text: str | bytes) -> None:
        """Start with the first token, which has none.

        Args:
            model: whose tokens these are.
            body: the request.
            prompt: a column of token ids.
            text: the prompt as the client gave it.

        """
        self._model, self._prompt, self._name = model, prompt, token_namer(model, body)
        self._given = text
        self._found: list[tuple[int, float, list[tuple[int, float]]]] = []
        """(Token, log-probability, those of the most likely ones)."""
        self._spans: Sequence[tuple[str, int, int]] = ()

    def add(self, chunk: CompletionChunk) -> None:
        """Take the next tokens."""
        self._spans = chunk.spans
        for i, (token, logprob) in enumerate(zip(chunk.tokens, chunk.logprobs, strict=True)):
            top = chunk.top_logprobs[i] if chunk.top_logprobs else []
            both = [(one, max(value, MIN_LOGPROB)) for one, value in ((token, logprob), *top)]
            self._found.append((*both[0], both[1:]))

    @cached_property
    def fields(self) -> dict[str, Any]:
        """What each choice has: vLLM's `prompt_logprobs`, and the versions of the weights.

        The rank of a token is null unless it is among the most likely ones.
        """
        found: list[dict[str, Any] | None] = [None]
        for token, logprob, top in self._found:
            ranks = {one: rank for rank, (one, _) in enumerate(top, 1)}
            found.append(
                {str(one): self._scored(one, value, ranks.get(one)) for one, value in ((token, logprob), *top)}
            )
        spans = _weight_versions(self._spans, len(self._found))
        shifted = [{**span, "start": span["start"] + 1, "end": span["end"] + 1} for span in spans]
        return {"prompt_logprobs": found, "prompt_weight_versions": shifted}

    def _scored(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._model.token_text(token) if self._model.has_tokenizer else None
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    @cached_property
    def _text(self) -> str:
        return self._given if isinstance(self._given, str) else self._model.decode_raw(ints(self._prompt))

    def echoed(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return what a choice has in place of its own text and lists, with the prompt's before them."""
        text, after = self._text + choice["text"], choice["logprobs"]
        if after is None:
            return {"text": text}
        name = cache(self._name)
        texts = list(map(name, ints(self._prompt)))
        *offsets, end = accumulate(map(len, texts), initial=0)
        top = [{name(token): logprob, **{name(o): v for o, v in others}} for token, logprob, others in self._found]
        lists = {
            "text_offset": [*offsets, *(end + offset for offset in after["text_offset"])],
            "tokens": texts + after["tokens"],
            "token_logprobs": [None, *(logprob for _, logprob, _ in self._found), *after["token_logprobs"]],
            "top_logprobs": [None, *top, *after["top_logprobs"]],
        }
        return {"text": text, "logprobs": lists}


def _completion_logprobs(delta: Delta) -> dict[str, Any]:
    """Return parallel lists; the sampled token is among the most likely ones at each place, and alone for 0."""
    places = zip(delta.token_texts, delta.logprobs, delta.top_logprobs, strict=True)
    return {
        "text_offset": delta.text_offsets,
        "tokens": delta.token_texts,
        "token_logprobs": delta.logprobs,
        "top_logprobs": [{text: logprob, **dict(top)} for text, logprob, top in places],
    }


def _chat_logprobs(delta: Delta) -> list[dict[str, Any]]:
    places = zip(delta.token_texts, delta.logprobs, delta.top_logprobs, strict=True)
    return [
        {**_chat_logprob(text, logprob), "top_logprobs": [_chat_logprob(*one) for one in top]}
        for text, logprob, top in places
    ]


def _chat_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
