"""Job files for tests."""

from __future__ import annotations

from typing import Any

from rlboost.shared.job.data import Rows
from rlboost.shared.job.fleet import HeldOutSet
from rlboost.shared.job.spec import RlJob, parse


def job_file(**changes: Any) -> dict[str, Any]:
    """Return a minimal job file as a mapping, with whole sections replaced; None removes a key."""
    raw = {"model": "m", "data": {"train": "t.jsonl"}, "reward": {"function": "m:f"}, "steps": 9, **changes}
    return {name: value for name, value in raw.items() if value is not None}


def parse_rl(raw: object) -> RlJob:
    """Return the parsed job file of a job of kind rl."""
    parsed = parse(raw)
    assert isinstance(parsed, RlJob)
    return parsed


def job(**changes: Any) -> RlJob:
    """Return the parsed job of `job_file`."""
    return parse_rl(job_file(**changes))


def held_out(**changes: Any) -> HeldOutSet:
    """Return the rows of `data.eval` as a set, with fields replaced."""
    return HeldOutSet("", Rows("data.eval", "e.jsonl", "test", None, "prompt"))._replace(**changes)


def with_teacher(**algorithm: Any) -> dict[str, Any]:
    """Return a section `algorithm`, with a teacher if its preset needs one."""
    return {"teacher": {"model": "larger"}, **algorithm} if algorithm.get("name") == "distill" else algorithm
