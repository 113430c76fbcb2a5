"""What only the rollout worker needs from the world.

An inference engine that continues samples token by token, weights for it, and word that its machine will be taken away.
Importing this module imports no inference library.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.rollout_worker.domain.notices import Advice, Notice
from shared.canary import Canary
from shared.errors import Fatal
from shared.messages import FINISH_NONE, Sampling

if TYPE_CHECKING:
    import torch

Key = tuple[int, int]
"""Which request: (sample, attempt)."""
Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt, completion) of each, token ids; neither is empty."""


class EngineFailed(Fatal):
    """The engine died or hangs. What it ran may have been the cause."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate, from its prompt or from where somebody else stopped."""

    sample: int
    attempt: int
    prompt: list[int]
    tokens: list[int]
    """Completion tokens made so far; the first new token has offset `len(tokens)`."""
    sampling: Sampling
    """`max_tokens` counts the whole completion, `tokens` included."""
    seed: int
    """The sample's own seed. The token at offset o depends on (weights, prompt, earlier tokens, seed, o) and on nothing
    else, so whoever continues the sample draws the tokens that its first owner would have drawn."""

    @property
    def key(self) -> Key:
        """Return (sample, attempt), under which the engine knows the request."""
        return self.sample, self.attempt


@dataclass(slots=True)
class Emission:
    """Tokens of one sample, all made by one weight version."""

    sample: int
    attempt: int
    offset: int
    """Index of `tokens[0]` within the completion."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token under exactly the distribution it was drawn from: after temperature and top-p.
    At temperature 0 that distribution would be a certainty, so the model's own (temperature 1) is reported instead."""
    version: int
    """Of no meaning where there are no tokens."""
    finish: int = FINISH_NONE
    """FINISH_* of `shared.messages`. A stop token is the last of `tokens`."""
    error: str = ""
    """Not empty: this request cannot be generated, and why; nothing more comes of it."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's load now."""

    running: int
    """Requests that take part in each decode step."""
    pending: int
    """Requests that wait for a slot, or for room in the KV cache."""
    tokens_made_total: int
    """Completion tokens made since the engine was built, those of aborted requests included."""
    version: int
    """The weight version in use; -1 before the first and after a load that failed."""


class Engine(Protocol):
    """An inference engine with continuous batching.

    The plain methods return at once and are called from the event loop's thread; the coroutines take effect between two
    decode steps. Their limits are the caller's: cancelling one that has not begun withdraws it. If the engine dies,
    every later call but `close` raises `EngineFailed` with the cause.
    """

    slots: int
    """How many requests run at once; more wait in the order of their submission."""
    kv_tokens: int
    """How many tokens its KV cache holds at once; 0 where it does not say. A request that finds no room there waits."""
    kv_row_tokens: int
    """Not 0 where that cache is a rectangle: see `WorkerBeat`."""
    kv_page_tokens: int
    """Not 0 where it is paged and keeps common beginnings once: see `WorkerBeat`."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. They wait while no weights are loaded and while the engine is suspended.

        A request that is finished already (its tokens end in a stop token, or reach `max_tokens`) gives one empty
        emission with `finish`; one that cannot run gives one with `error`. A sample that reaches the model's maximum
        length ends with FINISH_LENGTH.

        Raises:
            Conflict: a request with the same key is queued or running; none of `requests` was taken.

        """

    def abort(self, keys: Iterable[Key]) -> None:
        """Forget requests; unknown keys are ignored.

        No token of them is made after the return. What was made before stays drainable, without `finish`.
        """

    def release(self, keys: Iterable[Key]) -> None:
        """Like `abort`, for requests that go on elsewhere: the last emission of each one has FINISH_RELEASED.

        It comes even where there is no token to go with it. A request that has ended by itself keeps its own end.
        """

    def drain(self) -> list[Emission]:
        """Return everything since the last drain, at most one emission per (sample, attempt, version).

        The versions of one request come in the order in which they made its tokens.
        """

    def stats(self) -> EngineStats:
        """Return the load."""

    def running(self) -> set[Key]:
        """Return the requests that take part in each decode step: of an engine that died, in the last one."""

    async def load_weights(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool = False
    ) -> None:
        """Load weights under their Hugging Face names and make them version `version`.

        Running requests go on under the new weights with their KV cache recomputed, so every later token has the
        logprob that a full forward pass of the new weights gives. With `keep_kv` the cache stays as it is, if the
        engine was not suspended without it since: later tokens attend to keys and values of the old weights, and their
        logprobs are of exactly that. The first load gives every tensor; a later one may give only those that changed.
        A suspended engine stays suspended: to verify before anything is served, suspend, load, compare
        `loaded_tensors`, resume. `tensors` is consumed on the engine's own thread.

        Raises:
            ConfigError: a tensor is unknown, missing, of the wrong shape, or would be rounded by the engine's dtype.
                The engine then holds no version and generates nothing until a load that gives every tensor.

        """

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is actually loaded, under Hugging Face names, in the engine's dtype, without copying.

        Tensors tied to each other come under each of their names.
        """

    async def score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """Return each completion token's log-probability, given all before it, under the weights that are loaded.

        The engine is suspended, and no request of it keeps a KV cache. It answers by the forward pass that it would
        generate with, as far as it can, and without a trace in its counters.

        Args:
            sequences: not longer than the model's maximum length.
            temperature: of the distribution, above 0.

        """

    async def suspend(self, *, keep_kv: bool = False) -> None:
        """Stop decoding and keep the requests. The memory of the KV cache is given back; `resume` recomputes it.

        With `keep_kv` the cache stays. A call without it gives back, too, what an engine that stands already has kept,
        or has taken since for weights or for scoring.
        """

    async def resume(self) -> None:
        """Go on."""

    async def close(self) -> None:
        """Stop for good; idempotent. Tokens made so far stay drainable."""

    async def wait_failed(self) -> None:
        """Return once the engine is closed.

        Raises:
            EngineFailed: the engine died; the cause is chained.

        """


class EngineFactory(Protocol):
    """Makes engines. Both methods block, and are called outside the event loop's thread."""

    def prepare(self) -> None:
        """Do beforehand what takes long and needs no model, such as imports.

        Raises:
            ConfigError: there is no such device.

        """

    def build(self, config_json: str) -> Engine:
        """Return an engine without weights for the model of a Hugging Face `config.json`.

        Raises:
            ConfigError: it cannot run such a model, or not on this device.

        """


class StagedWeights(Protocol):
    """One version of a job's weights on this machine, its bytes verified."""

    @property
    def config_json(self) -> str:
        """The model's Hugging Face `config.json`."""

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """By name, what stands for each tensor's bytes: where it is equal in two versions of a model, so are they."""

    @property
    def canary(self) -> Canary | None:
        """What the trainer says of a fixed probe under these weights; None where it says nothing."""

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those of these names, on the CPU, in its published dtype. Reads files."""

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that are not among `loaded` bit for bit. Takes long: not in the event loop.

        A tensor loaded in a wider dtype counts as equal when narrowing it gives the published bytes.
        """


@dataclass(frozen=True, slots=True)
class Memory:
    """What is in use now; 0 where it is not known."""

    resident_bytes: int = 0
    """Of this process."""
    device_used_bytes: int = 0
    """On the engine's device, by whomever."""
    device_total_bytes: int = 0


class WeightSource(Protocol):
    """Where weights come from."""

    async def pull(self, job_id: str, version: int) -> StagedWeights:
        """Bring a version to this machine.

        Raises:
            NotFound: it does not exist, or is no longer kept.
            Timeout: the source was away for too long.

        """


class DraftSource(Protocol):
    """Where weights can be had before they are committed."""

    async def follow(self, job_id: str) -> None:
        """Wait for some seconds for chunks of the job's next version, and bring them to this machine.

        Raises:
            RLBoostError: it could not; nothing but time is lost.

        """


class NoticeSource(Protocol):
    """Something that says beforehand that this machine will be taken away. No call takes longer than some seconds."""

    name: str

    async def found(self) -> bool:
        """Tell whether there is such a thing here."""

    async def ask(self) -> Notice | Advice | None:
        """Return what it says now.

        Raises:
            Retryable: it does not answer, or makes no sense.

        """

    async def acknowledge(self, notice: Notice) -> None:
        """Say that everything has been handed off: nothing more is needed of this machine.

        Raises:
            Retryable: it does not answer.

        """
