"""Asks judges, reward models and the teacher of a job about its completions, and reads what they answer.

Each is a model that workers serve as a job of its own (`models` of the job file). A question about a completion is a
sample of that job, whose id follows from the step, the group, the completion and the try. A trainer that resumes after
a kill asks the same again, and reads from `rollouts.finished` of the serving job what was answered before.

Consumes: complete groups (`Judges.verdicts`), whole samples (`Teacher.ask`); the `rollouts.finished` of the serving
jobs (`Questions.read`).
Produces: a `GroupRequested` per question in `rollouts.requested` of the serving job.
Waits for: answers, in `Questions.read`, up to `Job.limit_s` after the last entry of the job or of its other models.
Ends when: the job does; a completion has a verdict or its log-probabilities, its tries are over, or it was dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from rlboost.services.trainer.domain.conversations import Row
from rlboost.services.trainer.domain.groups import WholeGroup
from rlboost.services.trainer.domain.plan import OtherModelIds, PlannedGroup
from rlboost.services.trainer.job.job import Job, job_record
from rlboost.services.trainer.ports.samples import RewardBatch, Verdict
from rlboost.services.trainer.ports.storage import OtherModel
from rlboost.shared.errors import ConfigError, Fatal, WaitTimedOut
from rlboost.shared.ids import JOB_SHIFT, SampleId, group_of, step_of
from rlboost.shared.job.reward import JudgeSpec, question
from rlboost.shared.messages import GroupRequested, SampleDropped, SampleFinished, Sampling
from rlboost.shared.messages.codec import Span
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, Bus, Entry, Op, ReadSize, Trim
from rlboost.shared.wire import length

log = structlog.get_logger(__name__)

MAX_JUDGING_S = 30 * 24 * 3600.0
"""Limit on the wait for a group's score where other models take part: `Questions.read` limits the time between two
answers."""
_MAX_ENTRIES = 512
_BLOCK_S = 1.0
_Answer = SampleFinished | SampleDropped


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of the reward, which a judge or a reward model gives."""

    name: str
    """Empty if it is the only one."""
    number: int
    """Among those that models on workers give."""
    model: OtherModel
    job_no: int
    """Of the serving job."""
    judge: JudgeSpec | None
    """None: a reward model gives it."""


class OtherModels:
    """The models of a job that score its completions."""

    def __init__(self, questions: Questions, judges: Judges | None, teacher: Teacher | None) -> None:
        """Ask nothing yet; `load` finds the arguments."""
        self.questions = questions
        self.judges = judges
        self.teacher = teacher

    @classmethod
    async def load(cls, job: Job) -> OtherModels | None:
        """Return them, whose serving jobs the manager has created with the job; None if no model scores.

        Raises:
            Fatal: one of these jobs is unknown.

        """
        spec, serving = job.generating_spec, dict[str, int]()
        asked = [*(part.source for part in spec.served_parts), spec.served_teacher]
        if not any(asked):
            return None
        for name in dict.fromkeys(filter(None, asked)):
            job_id = job.resources.models[name].job_id
            if (record := await job_record(job.bus, job_id)) is None:
                raise Fatal(f"there is no job {job_id}, which serves models.{name}: create the job again")
            serving[job_id] = int(record["no"])
        questions, ids = Questions(job, serving), OtherModelIds.of(spec, job.resources.data.n_evaluation)
        judges = Judges(job, questions, ids) if spec.served_parts else None
        return cls(questions, judges, Teacher(job, questions, ids) if spec.served_teacher else None)


class Questions:
    """What the models of a job are asked, and what they answer."""

    def __init__(self, job: Job, serving: Mapping[str, int]) -> None:
        """Ask nothing yet.

        Args:
            job: the job.
            serving: id of each job that serves one of the models -> its number.

        """
        self._job = job
        self.serving = serving
        self._cursors = {names.rollouts_finished(job_id): START for job_id in serving}
        self._size = ReadSize(_MAX_ENTRIES)
        self._read: dict[str, deque[tuple[str, int]]] = {stream: deque() for stream in self._cursors}
        """Stream -> (entry, its step) of what was read and is not trimmed."""
        self._answers: dict[int, _Answer] = {}
        """Question -> its answer, read before it was asked in this process."""
        self._asked: dict[int, asyncio.Future[_Answer]] = {}
        self._is_asked = asyncio.Event()
        self._has_progressed = False
        spec = job.generating_spec
        has_judges = any(part.judge for part in spec.served_parts)
        kinds = {"verdicts": has_judges, "scores": spec.served_reward_models, "log-probabilities": spec.served_teacher}
        self._what = " and ".join(kind for kind, is_asked in kinds.items() if is_asked)
        self._because = f"completions wait to be {'judged' if has_judges else 'scored'}"

    def on_progress(self) -> None:
        """Note that the job got a sample: a worker that generates these may serve another model next."""
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

    async def answer(self, request: GroupRequested) -> _Answer:
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
            Fatal: questions are asked, and for `Job.limit_s` neither the job nor a model got an entry.

        """
        while True:
            if not self._asked:
                self._is_asked.clear()
                await self._is_asked.wait()
            models, waits, limit_s = sorted(self.serving), self._job.waits, self._job.limit_s
            subject, because = f"{self._what} of {', '.join(models)}", self._because
            try:
                async with waits.on(subject, because=because, limit_s=limit_s, progress=self._progress, kind="rewards"):
                    await self._next()
            except WaitTimedOut as error:
                if not self._job.unpaused.is_set():
                    continue
                advice = f"'rlboost worker list' and 'rlboost status {models[0]}' show whether a worker can serve it"
                raise Fatal(f"{error}, {self._progress()}: {advice}") from error

    def _progress(self) -> str:
        return f"{len(self._asked):,} asked and not answered"

    async def _next(self) -> None:
        """Read until there are entries of a model, or the job has got one."""
        self._has_progressed = False
        while not self._has_progressed:
            entries = await self._job.bus.retry(self._entries)
            for entry in entries:
                self._take(entry)
            if entries:
                return

    async def _entries(self, bus: Bus) -> list[Entry]:
        entries = await bus.read(self._cursors, count=self._size.count, block_s=_BLOCK_S)
        self._size.update(entries)
        return entries

    def _take(self, entry: Entry) -> None:
        self._cursors[entry.stream] = entry.id
        if not isinstance(entry.message, SampleFinished | SampleDropped):
            log.warning("finished_entry_skipped", stream=entry.stream, entry=entry.id, reason="no answer of a model")
            return
        self._read[entry.stream].append((entry.id, step_of(entry.message.sample)))
        future = self._asked.get(entry.message.sample)
        if future is None:
            self._answers[entry.message.sample] = entry.message
        elif not future.done():
            future.set_result(entry.message)


class Judges:
    """The judges and reward models of one job."""

    def __init__(self, job: Job, questions: Questions, ids: OtherModelIds) -> None:
        """Ask nothing yet."""
        self._job = job
        self._questions = questions
        self._ids = ids
        self._tokenizing = asyncio.Lock()
        self._parts = []
        for number, part in enumerate(job.generating_spec.served_parts):
            model = job.resources.models[part.source]
            self._parts.append(_Part(part.name, number, model, questions.serving[model.job_id], part.judge))

    async def verdicts(self, step: int, planned: PlannedGroup, batch: RewardBatch) -> dict[str, tuple[Verdict, ...]]:
        """Return what each model says of a complete group: part of the reward -> a verdict per completion."""
        members = range(len(batch.completions))
        found = await asyncio.gather(
            *(
                self._score(part, step, planned, member, batch)
                if part.judge is None
                else self._verdict(part, part.judge, step, planned, member, batch)
                for part in self._parts
                for member in members
            )
        )
        n = len(members)
        return {part.name: tuple(found[i * n : (i + 1) * n]) for i, part in enumerate(self._parts)}

    async def _verdict(
        self, part: _Part, spec: JudgeSpec, step: int, planned: PlannedGroup, member: int, batch: RewardBatch
    ) -> Verdict:
        serving, chat, answer = part.model.job_id, part.model.chat, ""
        assert chat is not None, "built without the judge's tokenizer"
        spans: Sequence[Span] = ()
        try:
            text = question(spec.prompt, batch.prompts[member], batch.completions[member], _columns(batch, member))
            async with self._tokenizing:
                prompt = await asyncio.to_thread(chat.question, text, spec.max_tokens)
        except ConfigError as error:
            return Verdict(serving, None, "", (), 0, str(error))
        except KeyError as error:
            return Verdict(serving, None, "", (), 0, f"its row has no column {error}")
        for attempt in range(spec.tries):
            request = GroupRequested(
                job_id=serving,
                group=self._ids.group(part.job_no, planned, part.number, member, attempt),
                n=1,
                prompt=prompt,
                sampling=Sampling(
                    temperature=spec.temperature,
                    max_tokens=spec.max_tokens,
                    stop_token_ids=chat.stop_token_ids,
                    batch_invariant=self._job.spec.trainer.deterministic,
                ),
                # Any version may judge, and the older step comes first.
                version=step,
                max_staleness=step,
                # A sample is drawn by the sum of this and its id, which has the number of the serving job.
                seed=(planned.seed - (part.job_no << JOB_SHIFT)) & 0x7FFF_FFFF_FFFF_FFFF,
                vocab_size=chat.vocab_size,
            )
            end = await self._questions.answer(request)
            if isinstance(end, SampleDropped):
                return Verdict(serving, None, answer, (), attempt + 1, f"its question was dropped: {end.reason}")
            answer, spans = chat.decode(end.tokens), end.spans
            if (reward := await asyncio.to_thread(spec.reward_in, answer)) is not None:  # it may take a second
                return Verdict(serving, reward, answer, spans, attempt + 1)
        problem = "its answer has no verdict that judge.parse finds"
        return Verdict(serving, None, answer, spans, spec.tries, problem)

    async def _score(self, part: _Part, step: int, planned: PlannedGroup, member: int, batch: RewardBatch) -> Verdict:
        serving, scores = part.model.job_id, part.model.scores
        assert scores is not None, "built without the reward model's tokenizer"
        shown = batch.prompts[member], batch.completions[member], _columns(batch, member)
        try:
            async with self._tokenizing:
                conversation = await asyncio.to_thread(scores.conversation, *shown)
        except ConfigError as error:
            return Verdict(serving, None, "", (), 0, str(error))
        request = _scored(
            serving,
            self._ids.group(part.job_no, planned, part.number, member, 0),
            (conversation, scores.forced),
            step,
            scores.vocab_size,
            batch_invariant=self._job.spec.trainer.deterministic,
        )
        end = await self._questions.answer(request)
        if isinstance(end, SampleDropped):
            return Verdict(serving, None, "", (), 1, f"no worker can score it: {end.reason}")
        if length(end.logprobs) != 1 or (reward := scores.score(end.logprobs)) is None:
            return Verdict(serving, None, "", end.spans, 1, "its score is missing, or too large to tell")
        return Verdict(serving, reward, "", end.spans, 1)


def _columns(batch: RewardBatch, member: int) -> dict[str, Any]:
    return {name: values[member] for name, values in batch.columns.items()}


def _scored(
    serving: str,
    group: int,
    row: tuple[bytes, bytes],
    step: int,
    vocab_size: int,
    *,
    temperature: float = 1.0,
    batch_invariant: bool,
) -> GroupRequested:
    """Return the request for the log-probabilities of a row: prompt and completion."""
    prompt, completion = row
    return GroupRequested(
        job_id=serving,
        group=group,
        n=1,
        prompt=prompt,
        sampling=Sampling(
            temperature=temperature,
            max_tokens=length(completion),
            whole_logprobs=True,
            forced=completion,
            batch_invariant=batch_invariant,
        ),
        # Any version may score, and the older step comes first.
        version=step,
        max_staleness=step,
        seed=0,
        vocab_size=vocab_size,
    )


class Teacher:
    """The teacher of one job: its log-probabilities of what the job's model generates."""

    def __init__(self, job: Job, questions: Questions, ids: OtherModelIds) -> None:
        """Ask nothing yet."""
        self._job = job
        self._questions = questions
        self._ids = ids
        self._serving = job.resources.models[job.generating_spec.served_teacher].job_id
        self._asked: dict[int, list[asyncio.Task[tuple[Row, _Answer]]]] = {}
        """Sample -> its rows that are being scored."""

    def ask(
        self, step: int, planned: PlannedGroup, sample: SampleFinished, rows: Sequence[Row], tasks: asyncio.TaskGroup
    ) -> None:
        """Have the rows of a sample of a training group scored, in `tasks`."""
        member = SampleId.unpack(sample.sample).member
        scored = [row for row in rows if row.completion]
        asked = [self._request(step, planned, member, number, row) for number, row in enumerate(scored)]
        self._asked[sample.sample] = [
            tasks.create_task(self._answer(request, row), name=f"teach-{request.group}")
            for request, row in zip(asked, scored, strict=True)
        ]

    async def columns(self, group: WholeGroup) -> tuple[dict[tuple[bytes, bytes], bytes], str]:
        """Return the `ScoredGroup.taught` of a group whose samples were asked about, or why there is none."""
        found, problem = dict[tuple[bytes, bytes], bytes](), ""
        for sample in group.samples:
            for task in self._asked.pop(sample.sample):
                row, answer = await task
                if isinstance(answer, SampleDropped):
                    problem = f"{self._serving} cannot score a completion: {answer.reason}"
                elif answer.tokens != row.completion:
                    problem = f"a worker of {self._serving} has scored another completion"
                elif length(answer.logprobs) != length(answer.tokens):
                    problem = f"a worker of {self._serving} has not scored each token of a completion"
                else:
                    found[row.prompt, row.completion] = answer.logprobs
        return found, problem

    def release(self, group: int) -> None:
        """Wait no more for what was asked about a group."""
        for sample in [sample for sample in self._asked if group_of(sample) == group]:
            for task in self._asked.pop(sample):
                task.cancel()

    async def _answer(self, request: GroupRequested, row: Row) -> tuple[Row, _Answer]:
        return row, await self._questions.answer(request)

    def _request(self, step: int, planned: PlannedGroup, member: int, number: int, row: Row) -> GroupRequested:
        spec, job_no = self._job.generating_spec, self._questions.serving[self._serving]
        return _scored(
            self._serving,
            self._ids.group(job_no, planned, self._ids.n_judges - 1, member, number),
            (row.prompt, row.completion),
            step,
            self._job.resources.data.vocab_size,
            temperature=spec.sampling.temperature,
            batch_invariant=spec.trainer.deterministic,
        )
