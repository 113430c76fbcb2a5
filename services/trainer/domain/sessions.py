"""Sessions of agents: each sample is a tree of calls of the model, and becomes one or more sequences to train on.

A call is a turn, which continues an earlier one or begins a branch. A sample has one row for each turn that no other
continues; a turn that several rows share is trained in the first of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlboost.services.trainer.domain.advantages import total
from rlboost.services.trainer.domain.conversations import Conversation, Interval, Row
from rlboost.services.trainer.domain.groups import GroupOutcome, StepCollector
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import (
    Message,
    SampleDropped,
    SampleFinished,
    SessionEnded,
    SessionRewarded,
    TurnAnswered,
    TurnOpened,
)
from rlboost.shared.wire import I32, U8, length, pack

NO_CALL = "agent_made_no_call"
"""The reason of a sample whose agent has no turn."""
UNKNOWN_ANSWER = "agent_rewarded_unknown_answer"
"""The reason of a sample whose agent rewards an answer that it has not got."""


@dataclass(slots=True)
class Node:
    """One turn of a session."""

    opened: TurnOpened
    """Its newest record."""
    generation: Interval
    """From when this record was written until its last token was there."""
    turn: SampleFinished | None = None


@dataclass(slots=True)
class Branches(Conversation):
    """A session that has ended: its turns in the order of their calls."""

    nodes: dict[int, Node] = field(default_factory=dict)
    """Turn -> its node, parents first."""

    def rows(self, prompt: bytes) -> list[Row]:
        """See `Conversation.rows`; a session has its own prompts."""
        del prompt
        found, trained = list[Row](), set[int]()
        for path in self._paths():
            found.append(self._row(path, trained))
            trained.update(path)
        return found

    def row_rewards(self, whole: float) -> list[float]:
        """Return the reward of each row: its own, or else that of the session, with what functions add to either.

        Args:
            whole: the session's reward, and what functions add to it.

        """
        of_rows = [
            next((self.rewards[turn] for turn in reversed(path) if turn in self.rewards), self.reward)
            for path in self._paths()
        ]
        return [total((whole, -self.reward, reward)) for reward in of_rows]

    def _paths(self) -> Iterator[list[int]]:
        """Yield the turns of each row, in the order of its last one."""
        continued = {node.opened.parent for node in self.nodes.values()}
        for leaf in self.nodes:
            if leaf in continued:
                continue
            path = [leaf]
            while (parent := self.nodes[path[-1]].opened.parent) in self.nodes:
                path.append(parent)
            yield path[::-1]

    def _row(self, path: Sequence[int], trained: Collection[int]) -> Row:
        completion, mask, logprobs = list[bytes](), list[bytes](), list[bytes]()
        for place, turn in enumerate(path):
            node = self.nodes[turn]
            assert node.turn is not None, "only finished turns are in it"
            if place:
                completion.append(node.opened.tokens)
                mask.append(bytes(length(node.opened.tokens, I32)))
            n_tokens = length(node.turn.tokens, I32)
            completion.append(node.turn.tokens)
            mask.append(bytes(n_tokens) if turn in trained else pack([1] * n_tokens, U8))
            logprobs.append(b"" if turn in trained else node.turn.logprobs)
        return Row(self.nodes[path[0]].opened.tokens, b"".join(completion), b"".join(mask), b"".join(logprobs))


@dataclass(slots=True)
class Session:
    """A session so far."""

    sample: int
    """The sample of the group that it is."""
    id: int
    nodes: dict[int, Node] = field(default_factory=dict)
    """Turn -> its node, in the order in which they were first opened."""
    rewarded: SessionRewarded | None = None
    """How the host of a remote agent has ended it."""
    end: SessionEnded | None = None
    ended_at: float = 0.0
    """When `end` was written, in Unix seconds."""

    @property
    def is_complete(self) -> bool:
        """Return True if the session has ended by itself, and all its turns."""
        has_ended = self.end is not None and not self.end.reason
        return has_ended and all(node.turn is not None for node in self._of_last_start().values())

    def open(self, message: TurnOpened, at: float = 0.0) -> None:
        """Add a turn, or open it again for a later start of the agent; `at` is the time, in Unix seconds."""
        if self.end is None:
            now = Interval(at, at)
            node = self.nodes.setdefault(message.sample, Node(message, now))
            node.opened, node.generation = message, now

    def result(self) -> Branches | None:
        """Return the session as a conversation, None without a turn, or if one continues a turn that is not known."""
        assert self.end is not None, "the session has not ended"
        nodes = self._of_last_start()
        if not nodes or any(node.opened.parent and node.opened.parent not in nodes for node in nodes.values()):
            return None
        turns = [node.turn for node in nodes.values() if node.turn is not None]
        read = [*(node.opened.tokens for node in list(nodes.values())[1:]), b""]
        answers = [TurnAnswered(sample=turn.sample, tokens=tokens) for turn, tokens in zip(turns, read, strict=True)]
        ended = {"reward": self.end.reward, "cost": self.end.cost, "over": self.end.over}
        answers[-1] = answers[-1].model_copy(update=ended)
        prompt = next(iter(nodes.values())).opened.tokens
        generation = [node.generation for node in nodes.values()]
        began_at = min(self.ended_at - self.end.duration_s, min(generation).start)
        lifetime = Interval(began_at, max(self.ended_at, *(turn.end for turn in generation)))
        rewards = dict(self.end.rewards)
        return Branches(self.sample, turns, answers, self.id, prompt, lifetime, generation, rewards, nodes)

    @property
    def unknown_answers(self) -> list[int]:
        """Return the turns that its agent rewards and has not got."""
        known = self._of_last_start()
        return [turn for turn, _ in self.end.rewards if turn not in known] if self.end is not None else []

    def _of_last_start(self) -> dict[int, Node]:
        start = self.end.start if self.end is not None else ""
        return {turn: node for turn, node in self.nodes.items() if node.opened.start == start}


class SessionCollector(StepCollector):
    """Collects one step's groups, whose samples are sessions; the ids of a session's turns begin with turn 1."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sessions: dict[int, Session] = {}
        """Sample -> its session, once something is known of it."""
        self._begun_again: list[int] = []
        """Samples whose session begins again, and is not started yet."""
        self._rewarded: list[Session] = []
        self._unusable: list[tuple[Session, str, str]] = []

    def apply(self, message: Message, at: float = 0.0) -> GroupOutcome | None:
        self._now = at
        match message:
            case TurnOpened():
                self._open_turn(message)
                return None
            case SampleFinished():
                return self._finish_turn(message)
            case SampleDropped():
                return self._drop_turn(message)
            case SessionRewarded():
                self._reward_session(message)
                return None
            case SessionEnded():
                return self._end_session(message)
            case _:
                return super().apply(message, at)

    def session(self, sample: int) -> Session:
        """Return what is known of a sample's session."""
        return self._sessions.setdefault(sample, Session(sample, sample))

    def is_awaited(self, session: Session) -> bool:
        """Return True if a session is the one of its sample and has not ended, and its group is open."""
        sample = session.sample
        is_open = self.is_open(group_of(sample)) and sample not in self._seen
        return is_open and session.end is None and self.session(sample) is session

    def take_begun_again(self) -> list[int]:
        """Return the samples whose session begins again, each once."""
        begun_again, self._begun_again = self._begun_again, []
        return begun_again

    def take_rewarded(self) -> list[Session]:
        """Return the sessions that hosts of remote agents have ended, each once."""
        rewarded, self._rewarded = self._rewarded, []
        return rewarded

    def take_unusable(self) -> list[tuple[Session, str, str]]:
        """Return the sessions that ended by themselves and are lost, each once: with the reason, and for people."""
        unusable, self._unusable = self._unusable, []
        return unusable

    def _open_turn(self, message: TurnOpened) -> None:
        sample, first, _ = self._turn_of(message.sample)
        if self._is_late(sample):
            return
        self._check_requested(sample)
        session = self._sessions.setdefault(sample, Session(sample, first))
        if session.id == first:
            session.open(message, self._now)

    def _finish_turn(self, turn: SampleFinished) -> GroupOutcome | None:
        sample, first, _ = self._turn_of(turn.sample)
        if self._is_late(sample):
            self.duplicates += 1
            return None
        self._check_requested(sample)
        session = self._sessions.get(sample)
        if session is not None and session.end is not None and turn.sample not in session.nodes:
            return None  # its agent did not wait for it
        if session is None or (session.id == first and turn.sample not in session.nodes):
            raise Unprocessable(f"received turn {SampleId.unpack(turn.sample)}, which no call of its agent opened")
        if session.id != first or session.nodes[turn.sample].turn is not None:
            self.duplicates += 1
            return None
        if invalid := self._error_of(turn):
            return self.drop(group_of(sample), "generation", invalid)
        node = session.nodes[turn.sample]
        node.turn, node.generation = turn, node.generation._replace(end=self._now)
        return self._completed_session(session)

    def _drop_turn(self, message: SampleDropped) -> GroupOutcome | None:
        sample, first, _ = self._turn_of(message.sample)
        session = self._sessions.get(sample)
        if session is None or session.id != first or session.nodes.pop(message.sample, None) is None:
            return None
        return self._completed_session(session)

    def _reward_session(self, message: SessionRewarded) -> None:
        session = self._named(message.session)
        if session.id == message.session and session.rewarded is None and session.end is None:
            session.rewarded = message
            self._rewarded.append(session)

    def _named(self, first: int) -> Session:
        """Return the session of a sample, which begins with this id unless another one has replaced it."""
        group = first if self._turns is None else self._turns.of(first).group_of(first)
        sample = self._replacements.get(group, {}).get(first) or first
        return self._sessions.setdefault(sample, Session(sample, first))

    def _end_session(self, message: SessionEnded) -> GroupOutcome | None:
        first = message.session
        session = self._named(first)
        sample = session.sample
        if session.id != first or session.end is not None:
            return None  # a repetition
        session.end, session.ended_at = message, self._now
        if not message.reason:
            return self._completed_session(session)
        self.lost[message.reason] += 1
        if message.replaced_by:
            self.n_begun_again += 1
            self._replacements.setdefault(group_of(sample), {})[message.replaced_by] = sample
            self._sessions[sample] = Session(sample, message.replaced_by)
            self._begun_again.append(sample)
            return None
        return self._lose(sample, message.reason, message.detail)

    def _completed_session(self, session: Session) -> GroupOutcome | None:
        if not session.is_complete:
            return None
        if unknown := session.unknown_answers:
            detail = (
                f"its agent rewards cmpl-{unknown[0]:016x}, which is no answer of its session: give ids that it got"
            )
            return self._lose_ended(session, UNKNOWN_ANSWER, detail)
        if (result := session.result()) is not None:
            self._conversations[session.sample] = result
            return self._add_sample(result.as_sample())
        return self._lose_ended(session, NO_CALL, "no turn of its session is left")

    def _lose_ended(self, session: Session, reason: str, detail: str) -> GroupOutcome | None:
        if session.sample not in self._seen and not self._is_late(session.sample):
            self.lost[reason] += 1
            self._unusable.append((session, reason, detail))
        return self._lose(session.sample, reason, detail)
