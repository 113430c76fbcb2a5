"""The conversations of one step, where a job has an environment.

A turn is a request like any other; when it has come, the environment answers, and the answer goes into the same log
together with the request of the next turn. A trainer that was killed reads turns and answers there: nothing is
generated twice, and an environment is asked again only to bring it to where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from services.trainer.domain.conversation import Talk
from services.trainer.domain.plan import PlannedGroup, turn_ids
from services.trainer.domain.talk_collector import TalkCollector
from services.trainer.ports import Prompt
from services.trainer.ports_environment import Environments, Misbehaved, Opening, Reply, Speech
from shared import names
from shared.bus import Append, Op
from shared.columns import I32, ints, length, pack
from shared.environment import Said
from shared.errors import Fatal, Timeout
from shared.ids import SampleId, group_of
from shared.messages import GroupOpened, GroupRequested, TurnAnswered
from shared.reward import EnvironmentSpec

if TYPE_CHECKING:
    from services.trainer.intake import JobContext


class Conversations:
    """Opens conversations, and has each turn answered."""

    def __init__(self, job: JobContext, step: int, planned: Sequence[PlannedGroup]) -> None:
        """Lead those of `planned`, the groups of `step`."""
        spec, data, environments = job.spec, job.workshop.data, job.workshop.environments
        assert spec.environment is not None
        assert environments is not None
        assert data.speech is not None
        self._job = job
        self._step = step
        self._spec: EnvironmentSpec = spec.environment
        self._environments: Environments = environments
        self._speech: Speech = data.speech
        self._planned = {group.id: group for group in planned}
        self._ids = turn_ids(spec, len(data.evaluation))
        sizes = {group.id: group.n for group in planned}
        self.collector = TalkCollector(job.no, step, sizes, spec.elastic.max_staleness, self._ids)
        self._openings: dict[int, tuple[Said, Opening]] = {}
        """Group -> what it begins with: the prompt, and how the environment told it."""
        self._first: dict[int, GroupRequested] = {}
        """Group -> the request of its first turns."""
        self._refused: GroupOpened | None = None
        """The last that could not begin."""

    def add(self, group: PlannedGroup) -> None:
        """Lead those of one more group."""
        self._planned[group.id] = group
        self.collector.add(group.id, group.n)

    # --- beginning ---

    async def open(self, groups: Sequence[PlannedGroup]) -> dict[int, bytes]:
        """Return what each group begins with, an int32 column; those that cannot begin are dropped by the log.

        Raises:
            Fatal: their environments took too long.

        """
        # Each has a limit of its own; beside them a process may be busy with conversations of the steps before.
        limit_s = self._job.limit_s + self._spec.timeout_s * len(groups)
        because = f"{len(groups)} groups of step {self._step} begin"
        try:
            async with self._job.waits.on("the environment", because=because, limit_s=limit_s):
                opened = await asyncio.gather(*(self._open(group) for group in groups))
        except Timeout as error:
            raise Fatal(f"{error}: make reset of environment.function {self._spec.function} faster") from error
        stream = names.rollouts_finished(self._job.id)
        await self._job.link.bus.transact([Append(stream, message) for message, _ in opened])
        self._refused = next((message for message, _ in opened if message.reason), self._refused)
        return {message.group: tokens for message, tokens in opened if not message.reason}

    async def _open(self, group: PlannedGroup) -> tuple[GroupOpened, bytes]:
        row = self._row(group)
        try:
            opening = await self._environments.open(_columns(row), group.seed)
            prompt = row.given if opening.prompt is None else opening.prompt
            # The row's own tokens are those that its length was measured by.
            as_it_is = opening.prompt is None and not opening.tools
            tokens = row.tokens if as_it_is else pack(self._speech.opening(prompt, opening.tools), I32)
            self._check_length(length(tokens, I32))
        except Misbehaved as error:
            self.collector.expect(group.id, b"")
            return GroupOpened(group=group.id, prompt_digest=b"", reason=error.reason, detail=error.detail), b""
        self._openings[group.id] = prompt, opening
        digest = blake2b(tokens, digest_size=8).digest()
        self.collector.expect(group.id, digest)
        return GroupOpened(group=group.id, prompt_digest=digest), tokens

    def _check_length(self, n_tokens: int) -> None:
        most, longest = self._job.spec.sampling.max_tokens, self._speech.max_length
        if longest is not None and n_tokens + most > longest:
            raise Misbehaved(
                "too_long",
                f"{n_tokens} prompt tokens and sampling.max_tokens {most} do not fit the model's {longest} positions",
            )

    def begun(self, requests: Sequence[GroupRequested]) -> None:
        """Note the requests of groups' first turns, whether they are asked for now or later."""
        self._first |= {request.group: request for request in requests}

    def check_begun(self) -> None:
        """Refuse to go on when all groups were opened and none has begun.

        Raises:
            Fatal: why not.

        """
        if self._refused is not None and not self._first:
            raise Fatal(
                f"not one conversation of step {self._step} could begin ({self._refused.reason}: "
                f"{self._refused.detail}): mend environment.function {self._spec.function}"
            )

    def prompt_of(self, group: int) -> bytes:
        """Return what a group has begun with, an int32 column."""
        return self._first[group].prompt

    # --- going on ---

    def answer(self) -> None:
        """Have the turns answered that came and that no answer follows in the log."""
        for talk in self.collector.take_unanswered():
            name = f"answer-{SampleId.unpack(talk.sample)}-{len(talk.turns)}"
            self._job.scoring.create_task(self._answer(talk), name=name)

    def forget(self, group: int) -> None:
        """Let the environments of a dropped group go."""
        for member in range(self._planned[group].n):
            self._environments.forget(group + member)

    async def _answer(self, talk: Talk) -> None:
        number, turn, group = len(talk.turns), talk.turns[-1].sample, group_of(talk.sample)
        if not self.collector.is_open(group):
            return
        try:
            replies = await self._replies(talk)
            if len(talk.answers) >= number:
                return  # a predecessor's answer was behind
            if not self.collector.is_open(group):
                self._environments.forget(talk.sample)
                return
            answer = self._judge(talk, replies)
        except Misbehaved as error:
            if not self.collector.is_open(group):
                return
            answer = TurnAnswered(sample=turn, reason=error.reason, detail=error.detail)
        if answer.over:
            self._environments.forget(talk.sample)
        ops: list[Op] = [Append(names.rollouts_finished(self._job.id), answer)]
        if not answer.over and not answer.reason:
            ops.append(Append(names.rollouts_requested(self._job.id), self._next(talk, answer)))
        await self._job.link.bus.transact(ops)

    async def _replies(self, talk: Talk) -> list[Reply]:
        group, decode = self._planned[group_of(talk.sample)], self._job.workshop.data.decode
        texts = [decode(ints(turn.tokens), True) for turn in talk.turns]
        return await self._environments.hear(talk.sample, _columns(self._row(group)), group.seed, texts)

    def _judge(self, talk: Talk, replies: Sequence[Reply]) -> TurnAnswered:
        """Return what the last reply comes to; those before it must be what was answered before."""
        spec = self._job.spec
        first = len(talk.turns) - len(replies)
        for i, reply in enumerate(replies[:-1], first):
            before = talk.answers[i]
            if (pack(self._told(talk, i, reply), I32), reply.reward, reply.done) != (
                before.tokens,
                before.reward,
                False,
            ):
                raise Misbehaved("not_the_same", f"it was made anew, and answers turn {i} in another way than before")
        last = replies[-1]
        told = [] if last.done or not talk.turns[-1].tokens else self._told(talk, len(talk.turns) - 1, last)
        return talk.answered(
            told,
            last.reward,
            done=last.done,
            max_tokens=spec.sampling.max_tokens,
            max_turns=self._spec.max_turns,
        )

    def _told(self, talk: Talk, turn: int, reply: Reply) -> list[int]:
        prompt, opening = self._openings[group_of(talk.sample)]
        last = ints(talk.turns[turn].tokens)[-1]
        return self._speech.behind(prompt, last, reply.observation, opening.tools)

    def _next(self, talk: Talk, answer: TurnAnswered) -> GroupRequested:
        first, turns = self._first[group_of(talk.sample)], talk.turns
        behind = talk.completion + answer.tokens
        left = self._job.spec.sampling.max_tokens - length(behind, I32)
        spans = turns[-1].spans
        return first.model_copy(
            update={
                "group": self._ids[SampleId.unpack(talk.sample).is_eval].id_of(talk.sample, len(turns)),
                "n": 1,
                "prompt": first.prompt + behind,
                "sampling": first.sampling.model_copy(update={"max_tokens": left}),
                "near": spans[-1][0] if spans else "",
            }
        )

    def _row(self, group: PlannedGroup) -> Prompt:
        data = self._job.workshop.data
        return (data.evaluation if group.is_eval else data.train)[group.row]


def _columns(row: Prompt) -> dict[str, Any]:
    return {"prompt": row.given, **row.columns}
