"""Asks the judges of a job about its completions, and reads their verdicts.

A judge is a model that workers serve as a job of its own (`models` of the job file). A question about a completion
is a sample of that job, whose id follows from the step, the group, the completion and the try. A trainer that resumes
after a kill asks the same again, and reads from `rollouts.finished` of the serving job what was answered before.

Consumes: complete groups (`verdicts`); the `rollouts.finished` of the serving jobs (`read`).
Produces: a `GroupRequested` per question in `rollouts.requested` of the serving job.
Waits for: answers, in `read`, up to `Job.limit_s` after the last entry of the job or of its judges.
Ends when: the job does; a completion has a verdict, or its tries are over.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from rlboost.services.trainer.domain.plan import JudgeIds, PlannedGroup
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.samples import RewardBatch, Verdict
from rlboost.services.trainer.ports.storage import ChatTokenizer, OtherModel
from rlboost.shared.errors import ConfigError, Fatal, WaitTimedOut
from rlboost.shared.ids import JOB_SHIFT, step_of
from rlboost.shared.job.reward import JudgeSpec, question
from rlboost.shared.messages import GroupRequested, SampleDropped, SampleFinished, Sampling
from rlboost.shared.messages.codec import Span
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, Bus, Entry, Op, Trim

log = structlog.get_logger(__name__)

MAX_JUDGING_S = 30 * 24 * 3600.0
"""Limit on the wait for a group's score where judges take part: `Judges.read` limits the time between two answers."""
_MAX_ENTRIES = 512
_BLOCK_S = 1.0
_Answer = SampleFinished | SampleDropped


@dataclass(frozen=True, slots=True)
class _Judge:
    """One part of the reward."""

    part: str
    """Its name; empty if it is the only one."""
    number: int
    """Among the judges of the job."""
    spec: JudgeSpec
    model: OtherModel
    chat: ChatTokenizer
    job_no: int
    """Of the serving job."""


class Judges:
    """The judges of one job."""

    def __init__(self, job: Job, judges: Sequence[_Judge], ids: JudgeIds) -> None:
        """Ask nothing yet; `load` finds the arguments."""
        self._job = job
        self._judges = judges
        self._ids = ids
        self._cursors = {names.rollouts_finished(judge.model.job_id): START for judge in judges}
        self._read: dict[str, deque[tuple[str, int]]] = {stream: deque() for stream in self._cursors}
        """Stream -> (entry, its step) of what was read and is not trimmed."""
        self._answers: dict[int, _Answer] = {}
        """Question -> its answer, read before it was asked in this process."""
        self._asked: dict[int, asyncio.Future[_Answer]] = {}
        self._is_asked = asyncio.Event()
        self._tokenizing = asyncio.Lock()
        self._has_progressed = False

    @classmethod
    async def load(cls, job: Job) -> Judges:
        """Return the judges of a job, whose serving jobs the manager has created with it.

        Raises:
            Fatal: one of these is unknown.

        """
        spec, found = job.generating_spec, []
        for number, part in enumerate(spec.judges):
            assert part.judge is not None
            model = job.resources.models[part.judge.model]
            assert model.chat is not None, "built without the judge's tokenizer"
            serving = model.job_id
            record = await job.bus.retry(lambda bus: bus.hash_get(names.JOBS, serving))  # noqa: B023 - awaited at once
            if record is None:
                raise Fatal(f"there is no job {serving}, which serves the judge: create the job again")
            found.append(_Judge(part.name, number, part.judge, model, model.chat, int(json.loads(record)["no"])))
        return cls(job, found, JudgeIds.of(spec, job.resources.data.n_evaluation))

    def on_progress(self) -> None:
        """Note that the job got a sample: a worker that generates these may be the judge's next."""
        self._has_progressed = True

    def trims(self, step: int) -> list[Op]:
        """Return the trims of answers that are no longer needed, once the steps before `step` are not."""
        self._answers = {asked: answer for asked, answer in self._answers.items() if step_of(asked) >= step}
        ops: list[Op] = []
        for stream, entries in self._read.items():
            done = ""
            while entries and entries[0][1] < step:
                done, _ = entries.popleft()
            if done:
                ops.append(Trim(stream, done))
        return ops

    # --- ask ---

    async def verdicts(self, step: int, planned: PlannedGroup, batch: RewardBatch) -> dict[str, tuple[Verdict, ...]]:
        """Return what each judge says of a complete group: part of the reward -> a verdict per completion."""
        members = range(len(batch.completions))
        found = await asyncio.gather(
            *(self._verdict(judge, step, planned, member, batch) for judge in self._judges for member in members)
        )
        n = len(members)
        return {judge.part: tuple(found[i * n : (i + 1) * n]) for i, judge in enumerate(self._judges)}

    async def _verdict(
        self, judge: _Judge, step: int, planned: PlannedGroup, member: int, batch: RewardBatch
    ) -> Verdict:
        spec, serving, answer = judge.spec, judge.model.job_id, ""
        spans: Sequence[Span] = ()
        columns = {name: values[member] for name, values in batch.columns.items()}
        try:
            text = question(spec.prompt, batch.prompts[member], batch.completions[member], columns)
            async with self._tokenizing:
                prompt = await asyncio.to_thread(judge.chat.question, text, spec.max_tokens)
        except ConfigError as error:
            return Verdict(serving, None, "", (), 0, str(error))
        except KeyError as error:
            return Verdict(serving, None, "", (), 0, f"its row has no column {error}")
        for attempt in range(spec.tries):
            group = self._ids.group(judge.job_no, planned, judge.number, member, attempt)
            request = GroupRequested(
                job_id=serving,
                group=group,
                n=1,
                prompt=prompt,
                sampling=Sampling(
                    temperature=spec.temperature,
                    max_tokens=spec.max_tokens,
                    stop_token_ids=judge.chat.stop_token_ids,
                    batch_invariant=self._job.spec.trainer.deterministic,
                ),
                # Any version may judge, and the older step comes first.
                version=step,
                max_staleness=step,
                # A sample is drawn by the sum of this and its id, which has the number of the serving job.
                seed=(planned.seed - (judge.job_no << JOB_SHIFT)) & 0x7FFF_FFFF_FFFF_FFFF,
                vocab_size=judge.chat.vocab_size,
            )
            end = await self._answer(request)
            if isinstance(end, SampleDropped):
                return Verdict(serving, None, answer, (), attempt + 1, f"its question was dropped: {end.reason}")
            answer, spans = judge.chat.decode(end.tokens), end.spans
            if (reward := spec.reward_in(answer)) is not None:
                return Verdict(serving, reward, answer, spans, attempt + 1)
        problem = "its answer has no verdict that judge.parse finds"
        return Verdict(serving, None, answer, spans, spec.tries, problem)

    async def _answer(self, request: GroupRequested) -> _Answer:
        """Return the answer to a question, which may have been asked by an earlier process."""
        if (known := self._answers.pop(request.group, None)) is not None:
            return known
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._asked[request.group] = future
        try:
            await self._job.bus.transact([Append(names.rollouts_requested(request.job_id), request)])
            self._is_asked.set()
            return await future
        finally:
            del self._asked[request.group]

    # --- read ---

    async def read(self) -> None:
        """Read answers until cancelled.

        Raises:
            Fatal: questions are asked, and for `Job.limit_s` neither the job nor a judge got an entry.

        """
        while True:
            if not self._asked:
                self._is_asked.clear()
                await self._is_asked.wait()
            judges = sorted({judge.model.job_id for judge in self._judges})
            subject, waits, limit_s = f"verdicts of {', '.join(judges)}", self._job.waits, self._job.limit_s
            because = "completions wait to be judged"
            try:
                async with waits.on(subject, because=because, limit_s=limit_s, progress=self._progress, kind="rewards"):
                    await self._next()
            except WaitTimedOut as error:
                if not self._job.unpaused.is_set():
                    continue
                advice = f"'rlboost worker list' and 'rlboost status {judges[0]}' show whether a worker can serve it"
                raise Fatal(f"{error}, {self._progress()}: {advice}") from error

    def _progress(self) -> str:
        return f"{len(self._asked):,} asked and not answered"

    async def _next(self) -> None:
        """Read until there are entries of a judge, or the job has got one."""
        self._has_progressed = False
        while not self._has_progressed:
            entries = await self._job.bus.retry(self._entries)
            for entry in entries:
                self._take(entry)
            if entries:
                return

    async def _entries(self, bus: Bus) -> list[Entry]:
        return await bus.read(self._cursors, count=_MAX_ENTRIES, block_s=_BLOCK_S)

    def _take(self, entry: Entry) -> None:
        self._cursors[entry.stream] = entry.id
        if not isinstance(entry.message, SampleFinished | SampleDropped):
            log.warning("finished_entry_skipped", stream=entry.stream, entry=entry.id, reason="no answer of a judge")
            return
        self._read[entry.stream].append((entry.id, step_of(entry.message.sample)))
        future = self._asked.get(entry.message.sample)
        if future is None:
            self._answers[entry.message.sample] = entry.message
        elif not future.done():
            future.set_result(entry.message)
