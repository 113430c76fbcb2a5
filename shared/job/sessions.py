"""Trainable sessions: the API key that makes an agent's calls part of a sample, and what Redis has of each session.

A trainer opens a session for a sample and gives its agent the manager's URL and a key. Each call of the agent with that
key is a turn of the sample: the manager requests it under an id that follows from the session, and stores it with the
session once it is finished. The hash `names.session` has the record under `SESSION`, each turn that was called for
under `names.session_opened`, and each one that has ended under `names.session_finished`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from rlboost.shared.http.access import is_valid_signature, sign
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import Sampling
from rlboost.shared.streams import names

SESSION = "session"
TASK = "task"
"""Field of a session: what the host of a remote agent gets (`SessionTask`)."""
LEASED = "leased"
"""Field of a session: the start of its agent that a host runs; calls of earlier ones are refused."""
REWARDED = "rewarded"
"""Field of a session: how its host has ended it (a `SessionRewarded` as JSON); further calls are refused."""
KEY_PREFIX = "sk-rlboost-session-"
_ANSWER = re.compile(r"(?:cmpl-|resp_|msg_)([0-9a-f]{16})")
_KEY = re.compile(re.escape(KEY_PREFIX) + r"(.+-[0-9a-f]{1,16})-([0-9a-f]{64})(?:\.([0-9A-Za-z]{1,32}))?")


class SessionRecord(BaseModel):
    """One session, as its trainer opened it."""

    model_config = ConfigDict(frozen=True)

    sample: int
    """Its id: the packed id of a sample, or of the first turn that would replace it."""
    version: int
    """The weight version that trains on it."""
    max_staleness: int = 0
    first: int
    """Group number of its first turn."""
    stride: int
    """Distance of the group numbers of its turns."""
    max_turns: int
    """Of one start of its agent."""
    n_ids: int
    """Of turns of all starts."""
    seed: int
    """Of its turns; a turn is drawn by the sum of this and its id."""
    sampling: Sampling
    """Of its turns; `max_tokens` is the most of one turn."""
    vocab_size: int = 0
    max_tokens: int = 0
    """Of one start of its agent, generated in all its turns; 0 for no limit."""
    is_over: bool = False
    """True once its agent has ended: further calls are refused."""

    def turn_id(self, number: int) -> int:
        """Return the packed id of a turn, counted from 0."""
        return SampleId.unpack(self.sample)._replace(group=self.first + number * self.stride, member=0).pack()


class SessionTask(BaseModel):
    """What the host of a remote agent gets with its session."""

    model_config = ConfigDict(frozen=True)

    row: dict[str, Any]
    """The data row, with the prompt under `prompt`."""
    arguments: dict[str, Any] = {}
    """Further arguments of the agent."""
    sample: str
    """Name of the sample, as in events and on the page."""
    step: int
    is_eval: bool
    timeout_s: float


class Offer(BaseModel):
    """A session that hosts may take, and the host that has taken it last."""

    model_config = ConfigDict(frozen=True)

    start: str = ""
    """Name of the start of its agent; empty before the first."""
    until: float = 0.0
    """When its lease ends, unless the host renews it (Unix seconds)."""
    expires_at: float = 0.0
    """When the session's time is over (Unix seconds)."""
    n_starts: int = 0


class SessionId(NamedTuple):
    """Names one session of a job."""

    job_id: str
    sample: int
    start: str = ""
    """Which start of its agent: one that is started again, after a crash, repeats its calls."""

    @property
    def redis_key(self) -> str:
        """Return the key of the session's hash."""
        return names.session(self.job_id, self.sample)

    @property
    def subject(self) -> str:
        """Return the session as text, without the start."""
        return f"{self.job_id}-{self.sample:x}"

    @classmethod
    def parse(cls, text: str) -> SessionId:
        """Invert `str`."""
        subject, _, start = text.rpartition(".")
        job_id, _, sample = subject.rpartition("-")
        return cls(job_id, int(sample, 16), start)

    def __str__(self) -> str:
        """Return the session as text."""
        return f"{self.subject}.{self.start}"


def session_key(token: str, session: SessionId) -> str:
    """Return the API key of a session, which the system's token signs."""
    return f"{KEY_PREFIX}{session.subject}-{sign(token, 'session', session.subject)}"


def key_of_start(key: str, start: str) -> str:
    """Return a session's key for one start of its agent; `start` has letters and digits."""
    return f"{key}.{start}"


def session_of_key(token: str, key: str) -> SessionId | None:
    """Return the session that a key belongs to, None if it is no valid key."""
    if (found := _KEY.fullmatch(key)) is None:
        return None
    subject, signature, start = found.groups(default="")
    if not is_valid_signature(signature, token, "session", subject):
        return None
    return SessionId.parse(f"{subject}.{start}")


def turn_of_answer(answer: str) -> int:
    """Return the packed id of the turn that an answer is; raises ValueError if it is not the `id` of an answer."""
    if (found := _ANSWER.fullmatch(answer)) is None:
        raise ValueError(f"{answer!r} is not an answer's id: give the `id` of a chat completion, response or message")
    return int(found[1], 16)
