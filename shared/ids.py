"""Structured ids: a sample's id is five numbers packed into 64 bits, so that a token frame holds it as a column.

Ids are derived, not random: a restarted trainer that requests a step again requests the same samples, and the manager
recognizes them.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple, Self

_MEMBER_BITS = 8
_GROUP_BITS = 16
_STEP_BITS = 23
_EVAL_BITS = 1
_JOB_BITS = 16

MAX_GROUP_SIZE = 1 << _MEMBER_BITS
MAX_GROUPS_PER_STEP = 1 << _GROUP_BITS
MAX_STEPS = 1 << (_STEP_BITS - 1)
"""Steps of a job. Higher step numbers are used for requests of clients, which belong to no step."""
MAX_REQUESTS = MAX_STEPS * MAX_GROUPS_PER_STEP
"""Distinct requests of clients per job."""
MAX_JOBS = 1 << _JOB_BITS
JOB_SHIFT = _EVAL_BITS + _STEP_BITS + _GROUP_BITS + _MEMBER_BITS
"""Shifting a packed id right by this leaves the job's number."""

JOB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""A job's id is a folder's name and a part of URLs."""


class SampleId(NamedTuple):
    """A sample: job number, evaluation or training, step, group within the step, member of the group."""

    job: int
    is_eval: bool
    step: int
    group: int
    member: int

    def pack(self) -> int:
        """Return the id as an unsigned 64-bit integer; sorting by it sorts by (job, kind, step, group, member)."""
        limits = (MAX_JOBS, 2, 1 << _STEP_BITS, MAX_GROUPS_PER_STEP, MAX_GROUP_SIZE)
        for name, value, limit in zip(self._fields, self, limits, strict=True):
            if not 0 <= value < limit:
                raise ValueError(f"sample id: {name} = {value} is outside 0..{limit - 1}")
        packed = self.job
        packed = packed << _EVAL_BITS | self.is_eval
        packed = packed << _STEP_BITS | self.step
        packed = packed << _GROUP_BITS | self.group
        return packed << _MEMBER_BITS | self.member

    @classmethod
    def unpack(cls, packed: int) -> Self:
        """Invert `pack`."""
        member = packed & (MAX_GROUP_SIZE - 1)
        packed >>= _MEMBER_BITS
        group = packed & (MAX_GROUPS_PER_STEP - 1)
        packed >>= _GROUP_BITS
        step = packed & ((1 << _STEP_BITS) - 1)
        packed >>= _STEP_BITS
        return cls(packed >> _EVAL_BITS, bool(packed & 1), step, group, member)

    def __str__(self) -> str:
        """Return `job/step/group/member`, with `e` before an evaluation's step."""
        return f"{self.job}/{'e' if self.is_eval else ''}{self.step}/{self.group}/{self.member}"


class WeightsRef(NamedTuple):
    """Names a job's weights of one version."""

    job_id: str
    version: int

    def __str__(self) -> str:
        """Return the text for logs and error messages."""
        return f"version {self.version} of job {self.job_id}"


def group_of(sample: int) -> int:
    """Return the group's id: the packed id of its sample 0."""
    return sample & ~(MAX_GROUP_SIZE - 1)


def job_of(sample: int) -> int:
    """Return the job number in a packed sample or group id."""
    return sample >> JOB_SHIFT


def within_job(sample: int) -> int:
    """Return a packed id without the job's number: equal for the same sample of another job."""
    return sample & ((1 << JOB_SHIFT) - 1)


def step_of(sample: int) -> int:
    """Return the step in a packed sample or group id."""
    return sample >> (_GROUP_BITS + _MEMBER_BITS) & ((1 << _STEP_BITS) - 1)


def request_group(job: int, number: int) -> int:
    """Return the group id of a client's request, numbered below `MAX_REQUESTS`."""
    step, group = divmod(number, MAX_GROUPS_PER_STEP)
    return SampleId(job, False, MAX_STEPS + step, group, 0).pack()


def is_served(sample: int) -> bool:
    """Return True if a packed sample or group id belongs to a client's request rather than to the trainer."""
    return bool(sample >> (_GROUP_BITS + _MEMBER_BITS) & MAX_STEPS)


def worker_name(worker_id: str) -> str:
    """Return a worker's name, which all its incarnations share: the id without the random suffix."""
    return worker_id.rpartition("-")[0] or worker_id


def new_token(n_bytes: int = 4) -> str:
    """Return a random hexadecimal suffix for ids of worker incarnations, jobs and commands."""
    return secrets.token_hex(n_bytes)
