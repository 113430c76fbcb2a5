"""Fakes of `ports`, held to the same contract tests as the adapters. No library of an adapter is imported."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlboost.services.rollout_manager.adapters.request_bodies import parse_json
from rlboost.services.rollout_manager.adapters.text import call_style_of
from rlboost.services.rollout_manager.domain.offers import Failure
from rlboost.services.rollout_manager.ports import NO_OPTIONS, LoadModelFiles, ProviderFailed, TemplateOptions
from rlboost.shared.model.tool_calls import CallStyle
from rlboost.shared.wire import I32, pack


class FakeWorkerUsers:
    """`ports.WorkerUsers` of a Redis that may forget them."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}
        """Worker -> SHA-256 of its password."""

    async def put(self, worker: str, secret_sha256: str) -> None:
        """See `WorkerUsers.put`."""
        self.secrets[worker] = secret_sha256

    async def remove(self, workers: Collection[str]) -> None:
        """See `WorkerUsers.remove`."""
        for worker in workers:
            self.secrets.pop(worker, None)

    async def present(self) -> set[str]:
        """See `WorkerUsers.present`."""
        return set(self.secrets)


class FakeProvider:
    """`ports.FleetProvider` that starts nothing.

    Args:
        kinds: kinds of workers that it can start.

    """

    def __init__(self, kinds: Collection[str]) -> None:
        self.kinds = kinds
        self.requests: list[tuple[str, int]] = []
        """(kind, workers), failed ones included."""
        self.hosts: Collection[str] = ()
        """Those of the last request."""
        self.error = ""
        """Why every request fails; empty: none does."""
        self.failure = Failure()
        """What that means for the offer."""
        self.prices: dict[str, float] = {}
        """Dollars per hour of one worker, by kind."""

    async def scale(self, kind: str, workers: int, hosts: Collection[str] = (), /) -> None:
        """See `FleetProvider.scale`."""
        self.hosts = hosts
        self.requests.append((kind, workers))
        if self.error:
            raise ProviderFailed(self.error, self.failure)
        if kind not in self.kinds:
            raise ProviderFailed(f"{kind} not found: there are {', '.join(self.kinds)}")

    async def price(self, kind: str, /) -> float | None:
        """See `FleetProvider.price`."""
        if self.error:
            raise ProviderFailed(self.error, self.failure)
        return self.prices.get(kind)

    async def close(self) -> None:
        """See `FleetProvider.close`."""


class FakeLeaderWatch:
    """`ports.LeaderWatch` of a leader that dies between two calls.

    Args:
        dies_before: number of the first call, counted from 1, that finds it dead; None: it lives.

    """

    def __init__(self, dies_before: int | None = None) -> None:
        self.dies_before = dies_before
        self.watched: list[str] = []
        """The URL of every call."""

    async def has_died(self, url: str, limit_s: float) -> bool:
        """See `LeaderWatch.has_died`."""
        self.watched.append(url)
        await asyncio.sleep(0)
        return self.dies_before is not None and len(self.watched) >= self.dies_before


class InlineTextProcessor:
    """`ports.TextProcessor` in the calling thread, for models without files."""

    def __init__(self, load: LoadModelFiles) -> None:
        self.load = load

    async def parse(self, body: Sequence[bytes]) -> Any:
        """See `TextProcessor.parse`."""
        return parse_json(b"".join(body))

    async def encode(self, model: str, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """See `TextProcessor.encode`."""
        tokenizer = self.load(model).tokenizer
        assert tokenizer is not None
        return [pack(tokenizer.encode(text, add_special_tokens=add_special_tokens), I32) for text in texts]

    async def render(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        """See `TextProcessor.render`."""
        template = self.load(model).chat_template
        assert template is not None
        return template.render(messages, options)

    async def encode_chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> bytes:
        """See `TextProcessor.encode_chat`."""
        (tokens,) = await self.encode(model, [await self.render(model, messages, options)], add_special_tokens=False)
        return tokens

    async def call_style(self, model: str) -> CallStyle:
        """See `TextProcessor.call_style`."""
        return call_style_of(self.load(model))


class CharacterTokenizer:
    """`ports.Tokenizer` of one token per character, after special tokens whose ids are their places in a list."""

    def __init__(self, special: Sequence[str]) -> None:
        self.special = list(special)
        self._pattern = re.compile("(" + "|".join(map(re.escape, special)) + ")")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        del add_special_tokens
        return [
            token
            for i, part in enumerate(self._pattern.split(text))
            for token in ([self.special.index(part)] if i % 2 else map(ord, part))
        ]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Tokenizer.decode`."""
        n = len(self.special)
        special = ["" if skip_special_tokens else text for text in self.special]
        return "".join(special[token] if token < n else chr(token % 0xD800) for token in tokens)


class FakeTokenizer:
    """`ports.Tokenizer` of one token per character, where 1 begins a text, and tokens below 3 are special."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        return [1] * add_special_tokens + [ord(char) for char in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the tokens' numbers in brackets; see `Tokenizer.decode`."""
        return "".join("<eos>" * (not skip_special_tokens) if token < 3 else f"[{token}]" for token in tokens)
