"""A fleet of spot workers for a trainer of your own.

    with Fleet("http://manager:8700", token, job="sums", model="Qwen/Qwen3-0.6B") as fleet:
        for step in range(100):
            fleet.publish(model)
            for group in fleet.generate(prompts, n=8, max_tokens=512):
                batch.add(group)
            update(model, batch)
            fleet.checkpointed({"loss": loss})

`Fleet` blocks, `AsyncFleet` is the same with `async` and `await`. A trainer that is started again with the same job
gets the same samples for the same calls of `generate` in a step, without generating them again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgpack

from rlboost.client import Attachment, Client, ClientError, Superseded
from rlboost.publishing import Versions, weights_of
from rlboost.shared.errors import ConfigError, Conflict
from rlboost.shared.ids import new_token
from rlboost.shared.streams.bus import position
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.wire import I32, floats, ints, pack

__all__ = ["AsyncFleet", "Fleet", "Group", "Sample", "Superseded"]

T = TypeVar("T")

LEASE_S = 30.0
_CLOSE_S = 5.0
"""How long a trainer that ends tries to tell the manager."""
_POLL_S = 0.5
_CANCEL_S = 0.1
_MSGPACK = "application/msgpack"
_WAIT_S = 20.0
"""How long one request waits for the next sample."""
_GROUPS_PER_REQUEST = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    tokens: list[int]
    """With its stop token when there is one."""
    logprobs: list[float]
    """Of each token, in nats, under the weights that generated it and the sampling temperature."""
    finish: str
    """`stop`, or `length` for a completion that was cut off."""
    spans: list[tuple[str, int, int]]
    """(worker, weight version, number of tokens), in order."""
    attempts: int
    """Times that it was placed on a worker."""


@dataclass(slots=True)
class Group:
    """The completions of one prompt."""

    index: int
    """Of its prompt among those of the call."""
    samples: list[Sample]
    """In the order of their ids."""
    dropped: list[str]
    """Why samples are missing; one text each."""


@dataclass(slots=True)
class _Open:
    """A group that is being generated; by member."""

    n: int = 0
    """0: it was not requested since this trainer attached."""
    samples: dict[int, Sample] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    read_after: str = ""
    """A position before its first sample; empty before that was read."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def check_done(self) -> None:
        if self.n and len(self.samples) + len(self.dropped) >= self.n:
            self.done.set()


class AsyncFleet:
    """The trainer of one job of kind `external`.

    Args:
        url: of the manager, without `/v1`.
        token: the system's, or one of scope `job`; or of scope `trainer` for a job that exists.
        job: name of the job, which is created if there is none, or its id.
        model: folder or Hugging Face id, whose tokenizer and template the endpoint uses; to create the job.
        trainer: this trainer's name: another one of this name is replaced; by default a unique one.
        resume: whether a trainer that has the newest version's weights continues that version, with its samples.
        replace: attach also if another trainer is attached, which then fails with `Superseded`.
        deltas: publish lossless deltas, which costs host memory for one copy of the model.
        retry_for_s: how long to retry while the manager or the weight store is unavailable.
        price_per_hour: dollars for this trainer's machines, which count in the job's cost.
        lease_s: how long this trainer may be silent until another may attach.
        spec: further keys of the job file, such as `elastic` and `pause_after_s`, to create the job.

    """

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        url: str,
        token: str,
        *,
        job: str,
        model: str = "",
        trainer: str = "",
        resume: bool = True,
        replace: bool = False,
        deltas: bool = False,
        retry_for_s: float = 300.0,
        price_per_hour: float = 0.0,
        lease_s: float = LEASE_S,
        **spec: Any,
    ) -> None:
        """Connect when it is entered."""
        self._client = Client(url, token, retry_for_s=retry_for_s, read_timeout_s=_WAIT_S + 20.0)
        self._renewing = Client(url, token, retry_for_s=_CLOSE_S, read_timeout_s=_CLOSE_S)
        self._job, self._spec = job, {"kind": "external", "name": job, "model": model, **spec}
        self._options: dict[str, Any] = {
            "trainer": trainer or f"{socket.gethostname()[:40].strip('.-_') or 'trainer'}-{new_token()}",
            "replace": replace,
            "price_per_hour": price_per_hour,
            "lease_s": lease_s,
        }
        self._publishing: dict[str, Any] = {"resume": resume, "deltas": deltas, "limit_s": retry_for_s}
        self._open: defaultdict[tuple[int, int], _Open] = defaultdict(_Open)
        """(step, number) -> the group."""
        self._numbers: defaultdict[int, int] = defaultdict(int)
        """Step -> groups that were requested."""
        self._reading: asyncio.Task[None] | None = None
        self._attachment: Attachment | None = None
        self._store: StoreClient | None = None
        self._versions: Versions | None = None

    # --- attaching ---

    async def __aenter__(self) -> Self:
        """Attach to the job; create it if there is none."""
        try:
            self._attachment = await asyncio.to_thread(self._attach)
            await self._begin(self._at.attached)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _begin(self, attached: Mapping[str, Any]) -> None:
        _check_same(self._spec, attached["spec"])
        self._cursor: str = attached["checkpoint"]["cursor"]
        self._checkpointed: int = attached["checkpoint"]["step"]
        self._store = StoreClient(attached["weight_store_url"], self._at.access)
        self._versions = Versions(self._store, self.job_id, **self._publishing)
        await self._versions.load()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Leave the job as it is; another trainer can attach at once."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._store is not None:
            await self._store.close()
        if self._attachment is not None:
            await asyncio.to_thread(self._attachment.close)
        self._client.close()
        self._renewing.close()

    def _attach(self) -> Attachment:
        try:
            return self._attach_to(self._job)  # a token of scope `trainer` may do nothing else
        except ClientError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
        try:
            named = [job for job in self._client.jobs.list() if job["name"] == self._job]
        except ClientError as error:
            if error.status != httpx.codes.FORBIDDEN:
                raise
            raise ConfigError(f"there is no job of the id {self._job!r}: give the id that the token is for") from error
        found = [job["id"] for job in named if job["kind"] == "external" and not job["finished_at"]]
        if not found:
            if not self._spec["model"]:
                raise ConfigError(f"there is no external job {self._job!r}: give model, with which it is created")
            # Trainers that find the same jobs create one.
            found = [self._client.jobs.create(self._spec, f"external-{self._job}-{len(named)}")["id"]]
        return self._attach_to(found[-1])

    def _attach_to(self, job_id: str) -> Attachment:
        """Attach to a job, as soon as the lease of a trainer that has died has run out."""
        limit = time.monotonic() + self._options["lease_s"] + _CLOSE_S
        while True:
            try:
                return Attachment(self._client, self._renewing, job_id, self._options)
            except ClientError as error:
                if error.title == "Superseded":  # another process of this name has attached meanwhile
                    raise Superseded(error.detail) from error
                if error.title != "Job has a trainer" or time.monotonic() > limit:
                    raise
            time.sleep(_POLL_S)

    @property
    def _at(self) -> Attachment:
        return _attached(self._attachment)

    @property
    def job_id(self) -> str:
        """Id of the job, with which a successor finds it."""
        return self._at.job_id

    # --- weights ---

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return _attached(self._versions).newest

    @property
    def is_adapter(self) -> bool:
        """Return True if the newest version is an adapter on a model."""
        return _attached(self._versions).is_adapter

    @property
    def dtype(self) -> str:
        """Of most of the model's bytes that were published last, such as `bfloat16`; empty before."""
        return _attached(self._versions).dtype

    async def publish(
        self, weights: Any, *, config: Mapping[str, Any] | str | Path | None = None, if_changed: bool = False
    ) -> int:
        """Publish weights as the next version, and return its number; workers pull it from then on.

        The first time after it was attached, a trainer that has the newest version's weights publishes nothing and gets
        its number: one that was started again continues its step.

        Args:
            weights: a `torch.nn.Module`, a mapping of Hugging Face names to tensors, or a folder with safetensors. They
                must not change until this returns. Of a module with a LoRA adapter (PEFT) the first version is the
                frozen model, and the adapter a later one; of one that is sharded give `publishing.gathered(module)`.
            config: the model's Hugging Face configuration: a mapping, or a folder with `config.json`. By default that
                of the module or folder, or that of the version before.
            if_changed: publish nothing each time that the weights and `config` are those of the newest version.

        Raises:
            Superseded: another trainer holds the job.
            Conflict, Fatal: the weight store rejects the version, such as one with other tensors than the one before.
            ConfigError: the configuration is not known, or it has an adapter that workers cannot merge.

        """
        given = await asyncio.to_thread(weights_of, weights, config)
        with self._at.phase("publishing"):
            try:
                return await _attached(self._versions).publish(given, if_changed=if_changed)
            except Conflict:
                await asyncio.to_thread(self._at.renew)  # which says so if another trainer has the job
                raise

    # --- samples ---

    async def generate(  # noqa: PLR0913 - by keyword
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        stop: str | Sequence[str] = (),
        max_staleness: int = 0,
        seed: int = 0,
        step: int | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Yield a group of `n` completions of each prompt, in the order in which they are complete.

        Args:
            prompts: token ids of each.
            n: completions of each.
            max_tokens: most tokens of a completion.
            temperature: of sampling; 0 is greedy.
            top_p: of sampling; log-probabilities stay those of the whole distribution, here and with the next three.
            top_k: sample from this many of the most likely tokens; 0: from all.
            min_p: sample from the tokens that are at least this fraction as likely as the most likely one.
            min_tokens: sample no token of `stop_token_ids` before this many tokens.
            stop_token_ids: tokens that end a completion.
            stop: strings (or one) that do, with the token that completes one in its text.
            max_staleness: how many versions older than the newest a token's may be.
            seed: of the draws.
            step: to which the groups belong; by default the newest version. The calls of a step are known by their
                order: a trainer that repeats them gets the same samples.

        Raises:
            Superseded: another trainer has attached, or the job has ended.
            ClientError: a request is rejected.

        """
        step = self.version if step is None else step
        limits = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "min_tokens": min_tokens, "max_tokens": max_tokens}
        ends = {"stop_token_ids": list(stop_token_ids), "stop": [stop] if isinstance(stop, str) else list(stop)}
        sampling = {"temperature": temperature, **limits, **ends}
        first = self._numbers[step]
        self._numbers[step] += len(prompts)
        groups = [
            {
                "step": step,
                "number": first + i,
                "prompt": pack(prompt, I32),
                "n": n,
                "sampling": sampling,
                "version": self.version,
                "max_staleness": max_staleness,
                "seed": seed,
            }
            for i, prompt in enumerate(prompts)
        ]
        try:
            for at in range(0, len(groups), _GROUPS_PER_REQUEST):
                await self._request(groups[at : at + _GROUPS_PER_REQUEST])
        except BaseException:
            if self._numbers[step] == first + len(prompts):
                self._numbers[step] = first  # a call that is repeated is the same one
            raise
        for i in range(len(prompts)):
            group = self._open[step, first + i]
            group.n = n
            group.check_done()
        async for index in self._completed(step, first, len(prompts)):
            group = self._open[step, first + index]
            samples, dropped = dict(sorted(group.samples.items())), dict(sorted(group.dropped.items()))
            group.samples, group.dropped = {}, {}
            yield Group(index, list(samples.values()), list(dropped.values()))

    async def _request(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Request groups; wait for a resume while the job is paused."""
        vocab_size = _attached(self._versions).vocab_size
        content = msgpack.packb({"epoch": self._at.epoch, "groups": groups, "vocab_size": vocab_size})
        while True:
            try:
                await self._call("POST", "groups", content=content, headers={"Content-Type": _MSGPACK})
            except ClientError as error:
                if error.title != "Paused":
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                return

    async def _completed(self, step: int, first: int, n: int) -> AsyncIterator[int]:
        """Yield the indexes of groups as they are complete."""
        waiting = {
            asyncio.create_task(self._open[step, first + i].done.wait(), name=f"group-{step}-{first + i}"): i
            for i in range(n)
        }
        try:
            with self._at.phase("generating"):
                while waiting:
                    reading = self._ensure_reading()
                    await asyncio.wait([*waiting, reading], return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in waiting if task.done()]:
                        yield waiting.pop(task)
                    if reading.done() and waiting:
                        reading.result()  # its error
        finally:
            for task in waiting:
                task.cancel()

    def _ensure_reading(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="finished-samples")
        return self._reading

    async def _read(self) -> None:
        """Read finished samples while a requested group is incomplete."""
        while any(group.n and not group.done.is_set() for group in self._open.values()):
            query = {"epoch": self._at.epoch, "after": self._cursor, "wait_s": _WAIT_S, "limit": 4096}
            answer = msgpack.unpackb(
                (await self._call("GET", "finished", params=query, headers={"Accept": _MSGPACK})).content
            )
            for one in answer["samples"]:
                self._add(one)
            self._cursor = answer["cursor"]

    def _add(self, one: Mapping[str, Any]) -> None:
        if one["step"] < self._checkpointed:
            return
        group = self._open[one["step"], one["number"]]
        group.read_after = group.read_after or self._cursor
        if "dropped" in one:
            group.dropped[one["member"]] = one["dropped"]
        else:
            spans = [(span["worker"], span["version"], span["tokens"]) for span in one["spans"]]
            group.samples[one["member"]] = Sample(
                ints(one["tokens"]), floats(one["logprobs"]), one["finish"], spans, one["attempts"]
            )
        group.check_done()

    # --- steps ---

    async def complete_step(self, metrics: Mapping[str, float] | None = None, *, step: int | None = None) -> None:
        """Report a step as complete, with metrics for the job's page; by default that of the newest version."""
        body = {"step": self.version if step is None else step, "metrics": dict(metrics or {})}
        await self._call("POST", "steps", body)

    async def checkpointed(self, metrics: Mapping[str, float] | None = None, *, step: int | None = None) -> None:
        """Report a step as complete, and release the samples of this and earlier steps: your checkpoint needs none.

        Args:
            metrics: for the job's page.
            step: as in `generate`: by default the newest version.

        """
        step = self.version if step is None else step
        later = [group.read_after for (of, _), group in self._open.items() if of > step and group.read_after]
        cursor = min([self._cursor, *later], key=position)
        body = {"step": step, "metrics": dict(metrics or {}), "checkpoint": {"step": step + 1, "cursor": cursor}}
        await self._call("POST", "steps", body)
        self._checkpointed = max(self._checkpointed, step + 1)
        for key in [key for key in self._open if key[0] <= step]:
            del self._open[key]
        for of in [of for of in self._numbers if of <= step]:
            del self._numbers[of]

    async def end(self, error: str = "") -> None:
        """End the job: as complete, or as failed with an error."""
        await self._call("POST", "end", {"error": error})

    async def _call(self, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(self._at.call, *arguments, **options)


class Fleet:
    """`AsyncFleet` with methods that block: its arguments, attributes and methods.

    Of a trainer with several processes, the one of rank 0 attaches. In the others `open`, `checkpointed`,
    `complete_step`, `end` and `close` do nothing, and the rest is rejected.

    Args:
        url: of the manager, without `/v1`.
        token: as in `AsyncFleet`.
        rank: of this process in its trainer; by default the variable `RANK`, which torchrun and `accelerate launch`
            set.
        options: further arguments of `AsyncFleet`.

    """

    def __init__(self, url: str, token: str, *, rank: int | None = None, **options: Any) -> None:
        """Connect when it is entered, or with `open`."""
        self.rank = int(os.environ.get("RANK") or 0) if rank is None else rank
        self._async = None if self.rank else AsyncFleet(url, token, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)

    @property
    def _fleet(self) -> AsyncFleet:
        """Return the fleet of a process that may use it."""
        if self._async is None:
            raise ConfigError(
                f"this is the process of rank {self.rank}, and that of rank 0 has the fleet: publish and generate "
                "there, or give rank=0 if this process is a trainer of its own"
            )
        return self._async

    def open(self) -> Self:
        """Attach to the job."""
        if self.rank:
            return self
        self._thread.start()
        try:
            self._run(self._fleet.__aenter__())
        except BaseException:
            self._end_loop()
            raise
        return self

    def close(self) -> None:
        """Leave the job as it is; another trainer can attach at once."""
        if self.rank:
            self._loop.close()
            return
        try:
            self._run(self._fleet.__aexit__(None, None, None))
        finally:
            self._end_loop()

    def __enter__(self) -> Self:
        """Attach to the job."""
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the job as it is."""
        self.close()

    @property
    def job_id(self) -> str:
        """Id of the job."""
        return self._fleet.job_id

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return self._fleet.version

    def publish(self, weights: Any, **options: Any) -> int:
        """See `AsyncFleet.publish`."""
        return self._run(self._fleet.publish(weights, **options))

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[Group]:
        """See `AsyncFleet.generate`."""
        groups = self._fleet.generate(prompts, **options)

        async def following() -> Group | None:
            return await anext(groups, None)

        try:
            while (group := self._run(following())) is not None:
                yield group
        finally:
            if not self._loop.is_closed():
                self._run(groups.aclose())

    def complete_step(self, metrics: Mapping[str, float] | None = None, *, step: int | None = None) -> None:
        """See `AsyncFleet.complete_step`."""
        if not self.rank:
            self._run(self._fleet.complete_step(metrics, step=step))

    def checkpointed(self, metrics: Mapping[str, float] | None = None, *, step: int | None = None) -> None:
        """See `AsyncFleet.checkpointed`."""
        if not self.rank:
            self._run(self._fleet.checkpointed(metrics, step=step))

    def end(self, error: str = "") -> None:
        """See `AsyncFleet.end`."""
        if not self.rank:
            self._run(self._fleet.end(error))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():  # an interrupt: what it has begun ends before anything else does
                asyncio.run_coroutine_threadsafe(asyncio.sleep(_CANCEL_S), self._loop).result()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _attached(found: T | None) -> T:
    if found is None:
        raise ConfigError("the fleet is not attached to a job: use it in a 'with' block")
    return found


def _check_same(given: Mapping[str, Any], stored: Mapping[str, Any], path: str = "") -> None:
    """Check that a job has what its trainer asks for.

    Raises:
        ConfigError: naming the first difference.

    """
    for name, value in given.items():
        known = stored.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            _check_same(value, known, f"{path}{name}.")
        elif value != known and path + name != "name" and not (path + name == "model" and not value):
            raise ConfigError(
                f"{path}{name}: the job exists and has {known!r}, not {value!r}: give the same, or another job"
            )
