"""Check a run's guarantees from its record."""

from __future__ import annotations

from dataclasses import dataclass

from rlboost.report.record import Record

STEPS_TO_LEARN = 8
"""In fewer steps accuracy rises by less than its noise."""


@dataclass(frozen=True)
class Check:
    """One guarantee; `detail` gives the counts."""

    guarantee: str
    held: bool
    detail: str


def checks(record: Record) -> list[Check]:
    """Return the checks that apply to this run, most important first."""
    found = [_completed(record)]
    if record.settings.steps >= STEPS_TO_LEARN:
        found.append(_learned(record))
    found += [_samples(record), _duplicates(record), _tokens(record)]
    if record.settings.chaos:
        found += [_preemptions(record), _joins(record)]
    return found


def _completed(record: Record) -> Check:
    state = str(record.job.get("state", "never created"))
    error = record.job.get("error")
    return Check("The job completed", state == "completed", f"{state}: {error}" if error else state)


def _learned(record: Record) -> Check:
    goal = record.settings.goal
    promise = "Held-out accuracy rose" + (f" to {goal:.0%} or more" if goal else "")
    accuracy = record.accuracy
    if len(accuracy) < 2:
        return Check(promise, False, f"evaluated {len(accuracy)} times")
    first, last = accuracy[0][1], accuracy[-1][1]
    return Check(promise, last > first and last >= (goal or 0.0), f"from {first:.1%} to {last:.1%}")


def _samples(record: Record) -> Check:
    audit = record.audit
    dropped = sum(audit.get("dropped", {}).values())
    requested, delivered, in_flight = (audit.get(name, 0) for name in ("requested", "delivered", "in_flight"))
    detail = f"{requested:,} requested = {delivered:,} delivered + {dropped:,} dropped"
    if in_flight:
        detail += f" + {in_flight:,} in flight"
    held = requested > 0 and requested == delivered + dropped and in_flight == 0
    return Check("Every sample was delivered, or dropped for a stated reason", held, detail)


def _duplicates(record: Record) -> Check:
    twice = int(sum(row.get("samples/duplicates", 0) for row in record.steps))
    return Check("No sample was delivered twice", twice == 0, f"the trainer saw {twice:,} duplicates")


def _tokens(record: Record) -> Check:
    audit = record.audit
    again = sum(audit.get("tokens_regenerated", {}).values())
    generated = audit.get("tokens_generated", 0)
    delivered = audit.get("tokens_delivered", 0) + audit.get("serving", {}).get("tokens_delivered", 0)
    detail = f"{generated:,} generated = {delivered:,} delivered + {again:,} regenerated"
    return Check("Every token is accounted for", generated == delivered + again and generated > 0, detail)


def _preemptions(record: Record) -> Check:
    counted = record.audit.get("preemptions", {})
    without, given = counted.get("without_notice", 0), counted.get("with_notice", 0)
    kills, notices = record.applied("kill"), record.applied("notice")
    scheduled_kills, scheduled_notices = record.scheduled("kill"), record.scheduled("notice")
    held = kills == scheduled_kills and notices == scheduled_notices and without >= kills and given >= notices
    detail = (
        f"{kills} of {scheduled_kills} by SIGKILL without notice, {notices} of {scheduled_notices} with notice; "
        f"the manager counted {without} and {given}"
    )
    return Check("Every scheduled preemption took place, and was noticed", held, detail)


def _joins(record: Record) -> Check:
    applied, scheduled = record.applied("join"), record.scheduled("join")
    return Check("Every scheduled join took place", applied == scheduled, f"{applied} of {scheduled}")
