"""Ends requests at stop strings, exactly at the token that completes one.

An engine knows no text. It generates on until its tokens are taken, and what it has generated after the stop string is
discarded then: the tokens before depend on none of them. Where a completion ends is a function of its tokens alone, so
a sample that migrates ends at the same token as one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey
from rlboost.shared.messages import FINISH_NONE, FINISH_STOP, SamplingOption

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, without special tokens."""

_CONTEXT_CHARACTERS = 4
"""Text before a stop string that is decoded with it: a first token may have lost its space, or half of a character."""
_TRIM_FACTOR = 4
"""The tail is trimmed when it has this many times the tokens that a stop string may have."""


class _Completion:
    """The end of one request's completion."""

    def __init__(self, decode: Decode, stops: Sequence[str], tokens: Sequence[int]) -> None:
        """Start after `tokens`, in which no stop string is complete."""
        self._decode = decode
        self._stops = stops
        self._n_characters = max(map(len, stops)) + _CONTEXT_CHARACTERS
        self._tail = self._trimmed(tokens)

    def tokens_until_stop(self, tokens: Sequence[int]) -> int | None:
        """Add tokens; return how many there are up to the one that completes a stop string, None if none does."""
        tail, window = self._tail, [*self._tail, *tokens]
        if not self._has_stop(window):
            self._tail = self._trimmed(window) if len(window) > _TRIM_FACTOR * self._n_characters else window
            return None
        return next((n for n in range(1, len(tokens)) if self._has_stop([*tail, *tokens[:n]])), len(tokens))

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._stops)

    def _trimmed(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens, as many as hold all of a stop string but its end: a token may have no text."""
        n = self._n_characters
        while n < len(tokens) and len(self._decode(tokens[-n:])) < self._n_characters:
            n *= 2
        return list(tokens[-n:])


class StopStrings:
    """The stop strings of one engine's requests."""

    def __init__(self, decode: Decode | None = None) -> None:
        """Take the engine's tokenizer; None if there is none, and the engine refuses stop strings by name."""
        self._decode = decode
        self._completions: dict[RequestKey, _Completion | None] = {}
        """Of requests with stop strings; None once a request has ended at one."""
        self.ended: set[RequestKey] = set()
        """Those that have ended or were aborted: to be forgotten once the engine has emitted all of their tokens."""

    @property
    def options(self) -> frozenset[SamplingOption]:
        """Return what this adds to the options of the engine."""
        return frozenset() if self._decode is None else frozenset({"stop"})

    def submit(self, requests: Sequence[Request]) -> list[Request]:
        """Note the stop strings of requests; return the requests for the engine, without them."""
        if self._decode is None:
            return list(requests)
        submitted = []
        for request in requests:
            if request.sampling.stop:
                self._completions[request.key] = _Completion(self._decode, request.sampling.stop, request.tokens)
                request = replace(request, sampling=request.sampling.model_copy(update={"stop": ()}))  # noqa: PLW2901
            submitted.append(request)
        return submitted

    def on_abort(self, keys: Iterable[RequestKey]) -> None:
        """Record that the engine was told to abort requests; it may still emit tokens of them."""
        self.ended.update(key for key in keys if key in self._completions)

    def cut(self, emissions: Sequence[Emission]) -> tuple[list[Emission], list[RequestKey]]:
        """Return emissions up to the stop strings, and which requests the engine must abort."""
        found, aborted = [], []
        for emission in emissions:
            key = emission.sample, emission.attempt
            completion = self._completions.get(key)
            if completion is None:
                if key not in self._completions:
                    found.append(emission)
                continue
            n = completion.tokens_until_stop(emission.tokens)
            if n is not None:
                if emission.finish == FINISH_NONE and not emission.error:
                    aborted.append(key)
                emission = _until(emission, n)  # noqa: PLW2901
                self._completions[key] = None
            if emission.finish != FINISH_NONE or emission.error:
                self.ended.add(key)
            found.append(emission)
        return found, aborted

    def forget(self, keys: Iterable[RequestKey]) -> None:
        """Forget requests whose emissions were all cut."""
        for key in keys:
            self.ended.discard(key)
            self._completions.pop(key, None)


def _until(emission: Emission, n_tokens: int) -> Emission:
    """Return an emission that ends with one of its tokens."""
    return replace(
        emission,
        tokens=emission.tokens[:n_tokens],
        logprobs=emission.logprobs[:n_tokens],
        top_logprobs=emission.top_of(0, n_tokens),
        finish=FINISH_STOP,
        error="",
    )
