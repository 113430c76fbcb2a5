"""Interfaces of the rollout worker: inference engine, weights, membership and preemption notices.

Importing this module imports no inference library.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlboost.services.rollout_worker.domain.load import EngineStats
from rlboost.services.rollout_worker.domain.preemption import Notice, RebalanceRecommendation
from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey
from rlboost.shared.errors import Fatal, UnsuitableWeights
from rlboost.shared.streams.bus import Bus
from rlboost.shared.weights.manifest import ParityReference

if TYPE_CHECKING:
    import torch

    from rlboost.shared.weights.changed_words import ChangedWords

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt, completion) token ids of each; neither is empty."""


class EngineFailed(Fatal):
    """The engine died or hangs; a running sample may be the cause."""


class EngineClosed(Fatal):
    """The engine was closed: another model's takes its place, or the worker ends."""


class MustBeMerged(UnsuitableWeights):
    """The engine cannot hold a job's adapters next to its weights, so it serves that job alone."""


class Engine(Protocol):
    """An inference engine with continuous batching.

    The plain methods return at once and are called from the event loop's thread. The coroutines take effect between
    two decode steps and have no time limit of their own; cancelling one that has not begun withdraws it. After the
    engine has died, every call but `close` raises `EngineFailed` with the cause.
    """

    slots: int
    """Maximum number of running requests; further ones are queued in order of submission."""
    kv_tokens: int
    """Capacity of the KV cache in tokens; 0 = unknown. Requests that do not fit are queued."""
    kv_block_tokens: int
    """Size of the KV-cache blocks that requests with a common prefix share; 0 = none are shared."""
    max_request_tokens: int
    """Longest accepted request, prompt and `max_tokens` together; 0 = no limit."""
    returns_routed_experts: bool
    """True if requests may ask for the experts of each token."""
    sampling_options: frozenset[str]
    """The `SamplingOption`s that requests may have. Not "stop": stop strings are the generator's, as an engine knows no
    text."""
    adapters: AdapterEngine | None
    """Serves several jobs with adapters of the loaded weights; None: it knows none, and adapters are merged."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. None starts while no weights are loaded or while the engine is suspended.

        A request that is already finished (its tokens end in a stop token, or reach `max_tokens`) gives one empty
        emission with `finish`; a request that cannot run gives one with `error`. A sample that reaches the model's
        maximum length ends with FINISH_LENGTH.

        Raises:
            Conflict: a request with the same key is queued or running; none of `requests` was taken.

        """

    def abort(self, keys: Iterable[RequestKey]) -> None:
        """Abort requests; unknown keys are ignored.

        No token of them is generated after the return. Earlier tokens can still be taken, without `finish`.
        """

    def release(self, keys: Iterable[RequestKey]) -> None:
        """Abort requests that migrate to another worker: the last emission of each one has FINISH_RELEASED.

        That emission is made even if it has no token. A request that has already finished keeps its `finish`.
        """

    def hint(self, completions: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Take likely continuations of prompts as drafts, each with a sample of its prompt; an engine may ignore them.

        They change nothing of what is generated. Those for samples without a request are ignored.
        """

    def set_images(self, key: RequestKey, images: Sequence[bytes] | str) -> None:
        """Give a queued request its images, without which it does not start, or say why it can have none.

        Args:
            key: ignored if the request has ended.
            images: the chunks that `Sampling.images` names; a text ends the request with this error.

        """

    def take_emissions(self) -> list[Emission]:
        """Return everything since the last call, an emission per (sample, attempt) and load of weights for its job.

        The emissions of one request are in the order of its tokens.
        """

    def stats(self) -> EngineStats:
        """Return the load."""

    def running(self) -> set[RequestKey]:
        """Return the requests in each decode step; of a dead engine, those in its last step."""

    async def load_weights(
        self, version: int, weights: StagedWeights, changes: Changes | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        """Load weights as version `version`; return the names of the tensors whose bytes are not the published ones.

        Running requests continue under the new weights with their KV cache recomputed, so every later token has the
        logprob of a full forward pass of the new weights. With `keep_kv` the cache stays, unless the engine was
        suspended without it since: later tokens attend to keys and values of the old weights, and their logprobs are
        those of that computation. A suspended engine stays suspended: to verify before anything is served, suspend,
        load, resume.

        Args:
            version: the number that new tokens carry.
            weights: read by the engine, outside the event loop's thread.
            changes: what differs from the loaded weights; an engine may load more. None = load everything.
            keep_kv: see above.

        Raises:
            UnsuitableWeights: a tensor is unknown, missing, of the wrong shape, or the engine's dtype would round it.
                The engine then has no version and generates nothing until a load of all tensors.
            Corrupt: the bytes on this machine are damaged or missing. As above, if the engine is still alive.

        """

    async def differing(self, weights: StagedWeights) -> list[str]:
        """Return the names of the tensors in the engine's memory that are not those of the loaded `weights`.

        Requests may run meanwhile. An engine whose memory cannot be compared returns none.
        """

    async def score(self, sequences: Sequences, temperature: float, job_id: str = "") -> list[list[float]]:
        """Return the log-probability of each completion token given all before it, under the loaded weights.

        The engine must be suspended, and no request may keep its KV cache. It uses the same forward pass as for
        generation, as far as possible, and does not count in `stats`.

        Args:
            sequences: at most as long as the model's maximum length.
            temperature: temperature of the distribution, above 0.
            job_id: with the adapter of this job, if it has one.

        """

    async def sample(self, requests: Sequence[Request]) -> list[Emission]:
        """Generate requests as submitted ones are generated, and return their emissions, one for each.

        The engine must be suspended, and no request may keep its KV cache. Queued and running requests wait; nothing
        counts in `stats`.
        """

    async def suspend(self, *, keep_kv: bool = False) -> None:
        """Stop decoding and keep the requests. The memory of the KV cache is freed; `resume` recomputes it.

        With `keep_kv` the cache stays. A call without it on a suspended engine frees the cache that it kept, and the
        memory that it has since allocated for weights or for scoring.
        """

    async def resume(self) -> None:
        """Decode again."""

    async def close(self) -> None:
        """Stop for good; idempotent. Tokens generated so far can still be taken."""


class AdapterEngine(Protocol):
    """The part of an engine that serves several jobs at once, each with an adapter of the loaded weights."""

    max_adapters: int
    """Maximum number of jobs."""

    def adapter_refusal(self, adapter: StagedAdapter) -> str:
        """Return why the engine cannot hold an adapter next to its weights, so that it must be merged; else empty."""

    async def load_adapter(
        self, job_id: str, version: int, adapter: StagedAdapter | None, *, keep_kv: bool = False
    ) -> list[str]:
        """Serve the requests of a job with the loaded weights and this adapter, None: with the weights alone.

        Requests of the job continue as in `load_weights`, those of other jobs as they are. `load_weights` drops all
        adapters.

        Returns:
            The names of the adapter's tensors whose bytes are not the published ones.

        """

    async def unload_adapter(self, job_id: str) -> None:
        """Drop what `load_adapter` has loaded for a job that has no request; ignored if there is nothing."""


class EngineFactory(Protocol):
    """Builds engines. Both methods block, and are called outside the event loop's thread."""

    def prepare(self) -> None:
        """Do the slow work that needs no model, such as imports.

        Raises:
            ConfigError: the device does not exist.

        """

    def build(self, config_json: str, tokenizer_json: str = "") -> Engine:
        """Return an engine without weights for the model of a Hugging Face `config.json`.

        Args:
            config_json: the model's configuration.
            tokenizer_json: its tokenizer in the format of the library tokenizers, without which the engine supports no
                grammars.

        Raises:
            UnsuitableWeights: the engine does not support this model, or not on this device.

        """


@dataclass(frozen=True, slots=True)
class Changes:
    """What of a version differs from the loaded weights."""

    names: Container[str]
    """The tensors."""
    words: ChangedWords | None = None
    """Their words that differ; None if those are too many, or unknown."""


class StagedAdapter(Protocol):
    """A LoRA adapter on this machine, its bytes verified: the tensor W becomes W + scaling * B @ A."""

    rank: int
    scaling: float

    @property
    def targets(self) -> Collection[str]:
        """The names of the model's tensors that it changes."""

    def factors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each target with A [rank, in] and B [out, rank], on the CPU in their published dtype. Reads files.

        Raises:
            Corrupt: a file is truncated or missing.

        """

    def factors_differing(self, loaded: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
        """Return the names of the adapter's tensors that `loaded` does not match bit for bit, as `factors` has them."""


class StagedWeights(Protocol):
    """One version of a job's weights on this machine, its bytes verified."""

    def unmerged(self) -> tuple[StagedWeights, StagedAdapter | None]:
        """Return the model and the adapter apart; a version without an adapter returns itself and None."""

    @property
    def config_json(self) -> str:
        """The model's Hugging Face `config.json`."""

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """Per tensor name, a value that identifies its bytes: equal values in two versions mean equal bytes."""

    @property
    def location(self) -> Mapping[str, Any]:
        """Where the bytes are, as plain data for an engine's own processes: see `shared.weights.cache`."""

    @property
    def parity_reference(self) -> ParityReference | None:
        """The trainer's log-probabilities of canary prompts under these weights; None if it published none."""

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors, or those with these names, on the CPU in their published dtype. Reads files.

        Raises:
            Corrupt: a file is truncated or missing.

        """

    def changed_words(self, since: StagedWeights, names: Container[str]) -> ChangedWords | None:
        """Return the words of these tensors that differ from an older version; None if they are too many.

        Verifies the bytes of both versions, and blocks for long.

        Raises:
            Corrupt: a file of one of them is damaged, truncated or missing.
            OSError: the file of changed words cannot be written.

        """

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that `loaded` does not match bit for bit. Blocks for long.

        A tensor loaded in a wider dtype matches if narrowing it gives the published bytes.
        """


@dataclass(frozen=True, slots=True)
class Membership:
    """One incarnation of this worker, as the manager has accepted it."""

    worker: str
    """Its id."""
    bus: Bus
    """Connected to Redis as this incarnation, which can access its own keys only."""
    weight_store_url: str
    store_credential: str = field(repr=False)
    """Credential for the weight store; the manager sends new ones."""
    manifest_key: str
    """The public key under which manifests are signed."""
    peer_key: str = field(repr=False)
    """Signs requests for weights to other workers."""


Join = Callable[[], Awaitable[Membership]]
"""Joins the manager as a new incarnation. Raises `ConfigError` if the manager refuses, and `Fatal` if it or Redis does
not answer within the limit."""


class WeightSource(Protocol):
    """Provides weights."""

    async def pull(self, job_id: str, version: int) -> StagedWeights:
        """Pull a version to this machine.

        Raises:
            NotFound: it does not exist, or has been deleted.
            BadSignature: the trainer has not signed it.
            UnsuitableWeights: its adapter is not a plain LoRA adapter of its model.
            Corrupt: the source sent damaged bytes twice.
            WaitTimedOut: the source was unavailable for too long.
            ConfigError: the source's URL is invalid, or the source forbids the download.
            Fatal: the cache's disk is full, or the source rejected the request for another reason.

        """

    async def tokenizer_json(self, job_id: str) -> str:
        """Return the tokenizer of a job's model, empty if none is known; always the same for a job."""

    async def image(self, digest: str, n_bytes: int) -> bytes:
        """Return an image that `Sampling.images` names; waits while the source is unavailable.

        Raises:
            NotFound: the source does not have it, or no longer.
            Corrupt: the source sent other bytes.

        """

    def verify_cache_again(self) -> None:
        """Verify the digests of all blobs on this machine again in the next pull, which fetches what is damaged."""

    def renew_access(self, credential: str) -> None:
        """Use a new credential, also in a pull under way."""


class NoticeSource(Protocol):
    """Announces preemptions of this machine. Each call is bounded to some seconds."""

    name: str

    async def is_available(self) -> bool:
        """Return True if the source exists on this machine."""

    async def poll(self) -> Notice | RebalanceRecommendation | None:
        """Return the current notice or recommendation, if any.

        Raises:
            Retryable: no answer, or one that cannot be parsed.

        """

    async def acknowledge(self, notice: Notice) -> None:
        """Confirm that everything has been handed off, so that the cloud may reclaim the machine.

        Raises:
            Retryable: no answer.

        """
