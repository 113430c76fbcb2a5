"""`/v1/jobs/{job}/trainer` and below: the trainer of a job of kind `external`, outside of this system.

A trainer attaches to its job, which gives it the next epoch of the lease that trainers hold on jobs. Every later
request names the epoch, renews the lease, and is rejected once another trainer has attached. What the trainer service
writes to Redis is written here on behalf of the trainer, fenced by its epoch: the groups that it requests, and its
reports. It uploads weights to the weight store itself, with a credential of the same epoch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, TypeVar

import msgpack
import pydantic_core
from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rlboost.services.rollout_manager.api.leader import (
    OneJob,
    Routes,
    TheBus,
    TheManager,
    TheSettings,
    find_job,
    of_app,
)
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import Fenced
from rlboost.shared.http.access import STORE_CREDENTIAL_LIFE_S, Publishing, issue_publishing_credential
from rlboost.shared.http.guard import limits_body, principal_of, require_few_values
from rlboost.shared.http.problem import Problem, Responses, problems, success
from rlboost.shared.ids import MAX_GROUP_SIZE, MAX_GROUPS_PER_STEP, MAX_STEPS, SampleId
from rlboost.shared.job.fleet import MAX_STALENESS, MIN_TEMPERATURE, StopStrings
from rlboost.shared.job.spec import to_json
from rlboost.shared.messages import (
    GroupRequested,
    JobReport,
    JobState,
    SampleDropped,
    SampleFinished,
    Sampling,
    StepReport,
    TrainerStatus,
)
from rlboost.shared.messages.codec import MAX_REASON_CHARS, HourlyPrice, Seconds, unpacked
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import (
    START,
    Append,
    Bus,
    Delete,
    Fence,
    HashDelete,
    HashSet,
    Op,
    Renew,
    Trim,
    after,
    position,
)
from rlboost.shared.streams.fenced_lease import FencedLease
from rlboost.shared.validation import describe, parse_json
from rlboost.shared.wire import I32, floats, ints, pack, unpack

MSGPACK = "application/msgpack"
MAX_BODY_BYTES = 64 << 20
MAX_READS = 8
"""Concurrent reads of finished samples; each takes one of the bus's connections."""
MAX_COLUMNS_BYTES = 16 << 20
"""Tokens and log-probabilities of one answer, about; a quarter of it as JSON, which is three times as large."""
ENTRIES_PER_READ = 64
FUTURE_S = 60.0
"""A cursor, whose first part is the time of Redis in milliseconds, may be as much ahead of the manager's clock."""
BLOCK_S = 0.25
"""How long one read of finished samples waits."""
COMMIT_WAIT_S = 10.0
"""How long a request for groups of a version waits for the announcement of its commit."""
NAME_PREFIX = "external:"
"""Before the name of a trainer, so that no reserved worker of a trainer service of that name serves its jobs."""

ROUTES = Routes()
_ERRORS: Responses = problems(403, 404, 409, 422)
_TRAINER, _RELEASED, _COVERED = "trainer", "released", "covered"
"""Fields of `names.external_trainer`."""
_CURSOR = r"^\d{1,15}-\d{1,10}$"
_B = TypeVar("_B", bound=BaseModel)
Epoch = Annotated[int, Field(ge=1, description="of this trainer: what attaching returned")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class AttachBody(_Body):
    """A trainer that attaches to its job."""

    trainer: str = Field(
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="name of its process: one that attaches again under its name takes its own place",
    )
    lease_s: float = Field(30.0, ge=2, le=120, description="how long the trainer may be silent until it counts as gone")
    replace: bool = Field(
        False, description="attach also if another trainer is present, which is rejected from then on"
    )
    price_per_hour: HourlyPrice = Field(0.0, description="dollars for the trainer's machines, for the cost of the job")


class RenewBody(_Body):
    """A trainer that is alive."""

    epoch: Epoch
    phase: str = Field("training", min_length=1, max_length=40, description="what it does, shown to people")


class SamplingBody(_Body):
    """How samples are drawn. Log-probabilities are of the whole distribution at the temperature, or at 1 if it is 0."""

    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=1 << 31, description="0 = all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    max_tokens: int = Field(256, ge=1, lt=1 << 24)
    min_tokens: int = Field(0, ge=0, lt=1 << 24)
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = Field((), max_length=64)
    stop: StopStrings = Field((), description="strings that end a completion, with the token that completes one")

    def resolved(self) -> Sampling:
        """Return the sampling of a request, whose tokens are trained on."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            detail = f"sampling.temperature: should be 0 (greedy), or {MIN_TEMPERATURE} or more"
            raise Problem(422, "Invalid group", detail)
        return Sampling(**self.model_dump(), whole_logprobs=True)


def _column(given: Any) -> bytes:
    """Return token ids as an int32 column."""
    if isinstance(given, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in given):
        given = pack(given, I32)
    if not isinstance(given, bytes) or not given or len(given) % 4 or unpack(given, I32).min() < 0:
        raise ValueError("should be a list of token ids, or an int32 column of them, at least one")
    return given


class GroupBody(_Body):
    """A group of samples of one prompt. Its step and number name it: a repeated request is the same group."""

    step: int = Field(ge=0, lt=MAX_STEPS)
    number: int = Field(ge=0, lt=MAX_GROUPS_PER_STEP, description="within the step")
    prompt: Annotated[bytes, BeforeValidator(_column)] = Field(
        description="token ids: a list, or in msgpack also an int32 column"
    )
    n: int = Field(1, ge=1, le=MAX_GROUP_SIZE)
    sampling: SamplingBody = SamplingBody()
    version: int | None = Field(None, ge=0, description="newest weight version that may generate it; null = the newest")
    max_staleness: int = Field(0, ge=0, le=MAX_STALENESS, description="how many versions older its tokens may be")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the draws, together with the sample's own id")

    def digest(self) -> str:
        """Return a digest of all that determines its samples."""
        asked = [self.n, self.sampling.model_dump(mode="json"), self.version, self.max_staleness, self.seed]
        return blake2b(json.dumps(asked).encode() + self.prompt, digest_size=8).hexdigest()


class GroupsBody(_Body):
    """Groups to generate."""

    epoch: Epoch
    groups: tuple[GroupBody, ...] = Field(min_length=1, max_length=4096)
    vocab_size: int = Field(
        0, ge=0, lt=1 << 31, description="token ids of prompts are below it, and those of samples that count; 0 = any"
    )


class Checkpoint(_Body):
    """What a trainer has stored: it never asks again for earlier samples."""

    step: int = Field(ge=0, le=MAX_STEPS, description="groups of earlier steps are not requested again")
    cursor: str = Field(pattern=_CURSOR, description="finished samples up to it are not read again")


class StepBody(_Body):
    """A step that is complete."""

    epoch: Epoch
    step: int = Field(ge=0, lt=MAX_STEPS)
    metrics: dict[str, float] = Field({}, max_length=500)
    wait_s: Seconds = Field(0.0, description="how long it waited for samples")
    train_s: Seconds = Field(0.0, description="how long it trained")
    checkpoint: Checkpoint | None = None


class EndBody(_Body):
    """A job that ends."""

    epoch: Epoch
    error: str = Field("", max_length=10_000, description="why it failed; empty if it is complete")


# --- the trainer that is attached -------------------------------------------------------------------------------------


class ExternalTrainer(BaseModel):
    """The stored record of the trainer that attached last: a field of `names.external_trainer`."""

    model_config = ConfigDict(frozen=True)

    name: str
    epoch: int
    lease_s: float
    price_per_hour: float
    phase: str = "training"
    phase_since: float
    """Unix seconds."""

    def status(self, job: Job) -> str:
        """Return the value of its lease, which each renewal changes."""
        status = TrainerStatus(
            trainer=self.name,
            phase=self.phase,
            step=job.step,
            phase_since=self.phase_since,
            price_per_hour=self.price_per_hour,
            waiting=None,
            at=time.time(),
        )
        return status.model_dump_json()

    def report(self, job: Job, state: JobState, error: str = "") -> Op:
        """Return the operation that reports the job's state."""
        report = JobReport(job_id=job.id, state=state, step=job.step, error=error, trainer=NAME_PREFIX + self.name)
        return Append(names.JOB_REPORTS, report)


class HeldJob(NamedTuple):
    """The job in the path, and what Redis has of its trainer."""

    record: Job
    bus: Bus

    async def state(self, epoch: int) -> tuple[ExternalTrainer, Checkpoint]:
        """Return the trainer that attached last, and the newest checkpoint.

        The manager may not have applied the checkpoint's report yet.

        Raises:
            Problem: the trainer has another epoch.

        """
        fields = [_TRAINER, _RELEASED, _COVERED]
        text, released, covered = await self.bus.hash_some(names.external_trainer(self.record.id), fields)
        found = ExternalTrainer.model_validate_json(text) if text else None
        if found is None or found.epoch != epoch:
            raise self.superseded(epoch)
        step = max(self.record.checkpointed_step, int(covered or 0))
        return found, Checkpoint(step=step, cursor=released or START)

    async def trainer(self, epoch: int) -> ExternalTrainer:
        """Return the trainer that attached last; raises what `state` raises."""
        return (await self.state(epoch))[0]

    async def write(self, trainer: ExternalTrainer, ops: Sequence[Op] = ()) -> None:
        """Renew the trainer's lease and apply its operations, in one transaction; a job that was left alone runs again.

        Raises:
            Problem: another trainer has attached; nothing was written.

        """
        job = self.record
        is_left_alone = job.state == "paused" and job.newest_control != "pause"
        resumed = [trainer.report(job, "running")] if is_left_alone else []
        renewal = Renew(names.trainer_lease(job.id), trainer.status(job), trainer.lease_s)
        try:
            await self.bus.transact([renewal, *resumed, *ops], Fence(names.trainer_epoch(job.id), trainer.epoch))
        except Fenced as error:
            raise self.superseded(trainer.epoch) from error

    def superseded(self, epoch: int) -> Problem:
        """Return the error of a trainer that does not hold the job."""
        detail = f"the trainer of epoch {epoch} does not hold job {self.record.id}: another one has attached since"
        return Problem(409, "Superseded", detail)


async def _own_job(job: OneJob, request: Request, bus: TheBus) -> HeldJob:
    principal = principal_of(request)
    if principal.scope == "trainer" and principal.subject != job.id:
        raise Problem(403, "Forbidden", f"this token is for the trainer of job {principal.subject} only")
    if job.spec.kind != "external":
        detail = f"job {job.id} is of kind {job.spec.kind}: only jobs of kind external have a trainer of their own"
        raise Problem(409, "Not an external job", detail)
    return HeldJob(job, bus)


OwnJob = Annotated[HeldJob, Depends(_own_job)]
"""The external job in the path, which may have ended."""


async def _external_job(job: OwnJob) -> HeldJob:
    if job.record.ended:
        detail = f"job {job.record.id} has ended ({job.record.state}): create another one"
        raise Problem(409, "Job over", detail)
    return job


ExternalJob = Annotated[HeldJob, Depends(_external_job)]


@ROUTES("POST", "/jobs/{job_id}/trainer", "trainer", "external", status_code=201, responses=_ERRORS)
async def attach(job: ExternalJob, body: AttachBody, manager: TheManager, settings: TheSettings) -> dict[str, Any]:
    """Take the job as its trainer: return the epoch, the newest version, and how to publish weights."""
    record, bus = job
    lease = FencedLease(bus, names.trainer_lease(record.id), names.trainer_epoch(record.id), body.lease_s)
    trainer = ExternalTrainer(
        name=body.trainer,
        epoch=0,
        lease_s=body.lease_s,
        price_per_hour=body.price_per_hour,
        phase_since=time.time(),
    )
    holder = await lease.holder()
    present = TrainerStatus.model_validate_json(holder).trainer if holder else ""
    replacing = holder if body.replace or present == body.trainer else None
    if not await lease.acquire(trainer.status(record), replacing=replacing):
        detail = (
            f"job {record.id} has a trainer, {present}: end it and try again once its lease has run out, or attach "
            "with replace, after which its requests are rejected"
        )
        raise Problem(409, "Job has a trainer", detail, headers={"Retry-After": "5"})
    trainer = trainer.model_copy(update={"epoch": lease.epoch})
    is_paused = record.newest_control == "pause"
    stored = HashSet(names.external_trainer(record.id), {_TRAINER: trainer.model_dump_json()})
    await job.write(trainer, [stored, trainer.report(record, "paused" if is_paused else "running")])
    _, checkpoint = await job.state(trainer.epoch)
    return {
        "epoch": trainer.epoch,
        "version": manager.world.jobs.committed_version(record.id),
        "step": record.step,
        "spec": json.loads(to_json(record.spec)),
        "checkpoint": checkpoint.model_dump(),
        **_publishing(record, trainer, settings),
    }


def _publishing(job: Job, trainer: ExternalTrainer, settings: Settings) -> dict[str, Any]:
    """Return what a trainer needs to publish weights."""
    token = settings.token.get_secret_value()
    return {
        "weight_store_url": settings.weight_store_url,
        "store_credential": issue_publishing_credential(token, Publishing(job.id, trainer.epoch), time.time()),
        "credential_expires_s": STORE_CREDENTIAL_LIFE_S,
        "state": job.state,
    }


@ROUTES("PUT", "/jobs/{job_id}/trainer", "trainer", "external", responses=_ERRORS)
async def renew(job: ExternalJob, body: RenewBody, settings: TheSettings) -> dict[str, Any]:
    """Renew the trainer's lease; return a new credential to publish weights, and the job's state."""
    trainer = await job.trainer(body.epoch)
    ops: list[Op] = []
    if body.phase != trainer.phase:
        trainer = trainer.model_copy(update={"phase": body.phase, "phase_since": time.time()})
        ops.append(HashSet(names.external_trainer(job.record.id), {_TRAINER: trainer.model_dump_json()}))
    await job.write(trainer, ops)
    return _publishing(job.record, trainer, settings)


@ROUTES("DELETE", "/jobs/{job_id}/trainer", "trainer", "external", status_code=204, responses=_ERRORS)
async def detach(job: ExternalJob, epoch: Annotated[int, Query(ge=1)]) -> None:
    """Give the job up, so that another trainer can attach at once; it stays as it is."""
    trainer = await job.trainer(epoch)
    await job.write(trainer, [Delete(names.trainer_lease(job.record.id))])


@ROUTES("POST", "/jobs/{job_id}/end", "trainer", "external", status_code=202, responses=_ERRORS)
async def end(job: OwnJob, body: EndBody, manager: TheManager) -> dict[str, Any]:
    """End the job, as complete or with an error; the same again is no error."""
    job_id = job.record.id
    state: JobState = "failed" if body.error else "completed"
    if job.record.state != state:
        await _external_job(job)
        try:
            trainer = await job.trainer(body.epoch)
            await job.write(trainer, [trainer.report(job.record, state, body.error)])
        except Problem:
            # Once the manager has applied an earlier call, no trainer holds the job.
            if find_job(manager.world.jobs, job_id).state != state:
                raise
    return {"id": job_id, "state": state}


# --- samples ----------------------------------------------------------------------------------------------------------


@ROUTES("POST", "/jobs/{job_id}/groups", "trainer", "external", status_code=202, responses=_ERRORS)
@limits_body(lambda: MAX_BODY_BYTES)
async def request_groups(job: ExternalJob, request: Request, manager: TheManager) -> dict[str, Any]:
    """Request groups of samples, as JSON or msgpack (`GroupsBody`).

    The same group again is no error; another one of its step and number is.
    """
    body = await _parsed(request, GroupsBody)
    record = job.record
    trainer, checkpoint = await job.state(body.epoch)
    if record.newest_control == "pause" and record.state == "paused":
        detail = f"job {record.id} is paused: 'rlboost resume {record.id}' or POST /v1/jobs/{record.id}/resume"
        raise Problem(409, "Paused", detail)
    newest = await _committed(manager, record, max(group.version or 0 for group in body.groups))
    requests = [_request(record, group, newest, checkpoint.step, body.vocab_size) for group in body.groups]
    ops: list[Op] = [HashSet(names.external_groups(record.id), await _new_digests(job, body.groups))]
    await job.write(trainer, [*ops, *(Append(names.rollouts_requested(record.id), each) for each in requests)])
    return {"accepted": len(requests), "version": newest}


async def _new_digests(job: HeldJob, groups: Sequence[GroupBody]) -> dict[str, str]:
    """Return what each group asks for, as a digest by step and number.

    Raises:
        Problem: one was requested before and asked for something else.

    """
    asked = {f"{group.step}/{group.number}": group.digest() for group in groups}
    stored = await job.bus.hash_some(names.external_groups(job.record.id), list(asked))
    for (name, digest), before in zip(asked.items(), stored, strict=True):
        if before not in {None, digest}:
            step, _, number = name.partition("/")
            detail = (
                f"group {number} of step {step} was requested with another prompt, n, sampling, version, staleness or "
                "seed: a trainer that is started again asks for the same, or begins with a new version or another job"
            )
            raise Problem(409, "Another group", detail)
    return asked


def _request(job: Job, group: GroupBody, newest: int, covered: int, vocab_size: int) -> GroupRequested:
    if vocab_size and (highest := int(unpack(group.prompt, I32).max())) >= vocab_size:
        detail = f"the prompt of group {group.number}: token id {highest} is outside the model's 0..{vocab_size - 1}"
        raise Problem(422, "Invalid group", detail)
    if group.step < covered:
        detail = f"groups of step {group.step} were generated: a checkpoint covers all before {covered}"
        raise Problem(409, "Checkpointed", detail)
    return GroupRequested(
        job_id=job.id,
        group=SampleId(job.no, False, group.step, group.number, 0).pack(),
        n=group.n,
        prompt=group.prompt,
        sampling=group.sampling.resolved(),
        version=newest if group.version is None else group.version,
        seed=group.seed,
        max_staleness=group.max_staleness,
        vocab_size=vocab_size,
    )


async def _committed(manager: Manager, job: Job, version: int) -> int:
    """Return the newest version, waiting for the announcement of the commit of `version`.

    Raises:
        Problem: there is no such version.

    """
    limit = time.monotonic() + COMMIT_WAIT_S
    while (newest := manager.world.jobs.committed_version(job.id)) < version:
        if time.monotonic() > limit:
            has = f"its newest is {newest}" if newest >= 0 else "it has none"
            detail = f"version {version} of job {job.id} is not published: {has}. Publish it first"
            raise Problem(409, "No such version", detail)
        await asyncio.sleep(0.02)
    return newest


@ROUTES("GET", "/jobs/{job_id}/finished", "trainer", "external", responses=_ERRORS | success(MSGPACK))
async def finished(
    job: ExternalJob,
    request: Request,
    reads: Annotated[asyncio.Semaphore, of_app("external_reads")],
    epoch: Annotated[int, Query(ge=1)],
    after_cursor: Annotated[str, Query(alias="after", pattern=_CURSOR)] = START,
    limit: Annotated[int, Query(ge=1, le=4096)] = 512,
    wait_s: Annotated[float, Query(ge=0, le=60)] = 30.0,
) -> Response:
    """Return finished samples after a cursor, waiting for the first: as JSON, or as columns in msgpack by `Accept`."""
    record, bus = job
    trainer, checkpoint = await job.state(epoch)
    released = checkpoint.cursor
    if START != after_cursor != released and position(after_cursor) < position(released):
        detail = f"samples up to {released} were released by a checkpoint: read on from there"
        raise Problem(409, "Released", detail)
    stream, cursor = names.rollouts_finished(record.id), max(after_cursor, released, key=position)
    is_packed = MSGPACK in request.headers.get("Accept", "")
    until, found, left = time.monotonic() + wait_s, list[dict[str, Any]](), MAX_COLUMNS_BYTES // (1 if is_packed else 4)
    await job.write(trainer)
    while True:
        async with reads:
            count = min(limit - len(found), ENTRIES_PER_READ)
            entries = await bus.read({stream: cursor}, count=count, block_s=0.0 if found else BLOCK_S)
        for entry in entries:
            cursor = entry.id
            if isinstance(entry.message, SampleFinished | SampleDropped):
                found.append(_sample(entry.message))
                left -= len(found[-1].get("tokens", b"")) + len(found[-1].get("logprobs", b""))
        is_full = len(found) >= limit or left <= 0
        if is_full or (found and not entries):
            break
        if not found and (time.monotonic() >= until or await request.is_disconnected()):
            break
    encode = msgpack.packb if is_packed else _as_json
    content = await asyncio.to_thread(encode, {"cursor": cursor, "samples": found})
    return Response(content, media_type=MSGPACK if is_packed else "application/json")


def _sample(message: SampleFinished | SampleDropped) -> dict[str, Any]:
    sample = SampleId.unpack(message.sample)
    named = {"step": sample.step, "number": sample.group, "member": sample.member, "group_done": message.group_done}
    if isinstance(message, SampleDropped):
        return {**named, "dropped": message.reason}
    return {
        **named,
        "tokens": message.tokens,
        "logprobs": message.logprobs,
        "finish": message.finish,
        "spans": [{"worker": worker, "version": version, "tokens": n} for worker, version, n in message.spans],
        "attempts": message.attempts,
    }


def _as_json(answer: dict[str, Any]) -> bytes:
    """Return JSON, with the columns as lists."""
    for sample in answer["samples"]:
        if "tokens" in sample:
            sample |= {"tokens": ints(sample["tokens"]), "logprobs": floats(sample["logprobs"])}
    return pydantic_core.to_json(answer)  # a sixth of the time that `json` takes for floats


@ROUTES("POST", "/jobs/{job_id}/steps", "trainer", "external", status_code=202, responses=_ERRORS)
async def complete_step(job: ExternalJob, body: StepBody) -> dict[str, Any]:
    """Report a step as complete, with its metrics; a checkpoint releases the samples before it."""
    trainer, before = await job.state(body.epoch)
    record, checkpoint = job.record, body.checkpoint
    report = StepReport(
        job_id=record.id,
        step=body.step,
        metrics=body.metrics,
        checkpointed_step=checkpoint.step if checkpoint else 0,
        wait_s=body.wait_s,
        train_s=body.train_s,
    )
    ops: list[Op] = [Append(names.JOB_REPORTS, report)]
    if checkpoint:
        ops += await _release(job, before, checkpoint)
    await job.write(trainer, ops)
    return {"step": body.step}


async def _release(job: HeldJob, before: Checkpoint, checkpoint: Checkpoint) -> list[Op]:
    """Return what removes the samples and requests that a checkpoint covers; what one before covers stays released."""
    if position(checkpoint.cursor)[0] / 1000 > time.time() + FUTURE_S:
        raise Problem(422, "Invalid cursor", f"checkpoint.cursor: no answer of `finished` had {checkpoint.cursor}")
    cursor = max(checkpoint.cursor, before.cursor, key=position)
    step = max(checkpoint.step, before.step)
    groups = await job.bus.hash_all(names.external_groups(job.record.id))
    covered = tuple(name for name in groups if int(name.partition("/")[0]) < step)
    return [
        Trim(names.rollouts_finished(job.record.id), after(cursor)),
        HashSet(names.external_trainer(job.record.id), {_RELEASED: cursor, _COVERED: str(step)}),
        *([HashDelete(names.external_groups(job.record.id), covered)] if covered else []),
    ]


async def _parsed(request: Request, kind: type[_B]) -> _B:
    """Return a body in JSON or msgpack, parsed in a thread, since it may be large.

    Raises:
        Problem: 422, it is invalid.

    """
    body, is_msgpack = await request.body(), request.headers.get("Content-Type", "").startswith(MSGPACK)

    def parse() -> _B:
        if is_msgpack:
            return kind.model_validate(unpacked(body))
        require_few_values(body)
        return kind.model_validate(parse_json(body))

    try:
        return await asyncio.to_thread(parse)
    except ValidationError as error:
        raise Problem(422, "Invalid request", "; ".join(describe(error, kind, "the body"))) from error
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        form = "msgpack" if is_msgpack else "JSON"
        detail = f"the body cannot be read as {form}: {error}"[:MAX_REASON_CHARS]
        raise Problem(422, "Invalid request", detail) from error
