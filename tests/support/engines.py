"""Driving an engine from a test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey
from rlboost.services.rollout_worker.domain.speculation import PassTimes
from rlboost.services.rollout_worker.ports import Engine
from rlboost.shared.messages import FINISH_NONE, Sampling
from tests.support.eventually import eventually


def request(
    sample: int,
    *,
    max_tokens: int = 12,
    prompt: Iterable[int] = (3, 1, 4),
    tokens: Iterable[int] = (),
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: Iterable[int] = (),
    seed: int | None = None,
    attempt: int = 1,
    routed_experts: Iterable[int] = (),
    whole_logprobs: bool = False,
    **options: Any,
) -> Request:
    """Return a request; its seed is its sample number unless given, and `options` are those of clients."""
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        stop_token_ids=tuple(stop),
        routed_experts=tuple(routed_experts),
        whole_logprobs=whole_logprobs,
        **options,
    )
    seed = sample if seed is None else seed
    return Request(sample, attempt, list(prompt), list(tokens), sampling, seed)


@dataclass
class Collected:
    """What an engine made of one request; offsets were checked to be without gaps."""

    offset: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The version of each token."""
    finish: int = FINISH_NONE
    error: str = ""
    routed_experts: bytes = b""
    top_logprobs: bytes = b""

    @property
    def ended(self) -> bool:
        return bool(self.finish or self.error)


class FreePasses(PassTimes):
    """Passes that take no time, so that every sample gets the longest draft that is known."""

    def observe(self, seconds: float, n: int, drafted: int) -> None: ...


class Emitting(Protocol):
    """As much of an engine as a collector needs."""

    def take_emissions(self) -> list[Emission]: ...


class Collector:
    """Takes an engine's emissions, checks the contract of `take_emissions`, and joins the emissions of each request."""

    def __init__(self, engine: Emitting) -> None:
        self.engine = engine
        self.of: dict[RequestKey, Collected] = {}

    def take_emissions(self) -> list[Emission]:
        emissions = self.engine.take_emissions()
        try:
            self._join(emissions)
        except AssertionError as error:
            pytest.fail(f"the engine broke its contract: {error}")  # not to be taken for "not yet" by `eventually`
        return emissions

    def _join(self, emissions: list[Emission]) -> None:
        assert len({(e.sample, e.attempt, e.version) for e in emissions}) == len(emissions)
        for emission in emissions:
            made = self.of.setdefault((emission.sample, emission.attempt), Collected(emission.offset))
            assert not made.ended, "nothing comes after the end"
            assert emission.offset == made.offset + len(made.tokens), "no gap, no overlap"
            assert len(emission.tokens) == len(emission.logprobs)
            made.tokens += emission.tokens
            made.logprobs += emission.logprobs
            made.versions += [emission.version] * len(emission.tokens)
            made.finish, made.error = emission.finish, emission.error
            made.routed_experts = emission.routed_experts
            made.top_logprobs += emission.top_logprobs

    def made(self, sample: int, attempt: int = 1) -> int:
        """Take the emissions, and return how many tokens the request has."""
        self.take_emissions()
        return len(self.of[sample, attempt].tokens) if (sample, attempt) in self.of else 0

    async def all_ended(self, requests: Iterable[Request]) -> list[Collected]:
        """Wait until each of these has ended; return them in order."""
        keys = [request.key for request in requests]

        def ended() -> bool:
            self.take_emissions()
            return all(key in self.of and self.of[key].ended for key in keys)

        await eventually(ended, within_s=60.0, every_s=0.005)
        return [self.of[key] for key in keys]


async def run(engine: Engine, requests: list[Request]) -> list[Collected]:
    """Submit requests, wait for their ends and return them in order."""
    collector = Collector(engine)
    engine.submit(requests)
    return await collector.all_ended(requests)
