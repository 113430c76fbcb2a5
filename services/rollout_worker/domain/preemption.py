"""Parses the documents in which clouds announce preemptions, and those that name a machine's region.

A `Notice` says that this machine will be reclaimed, a `RebalanceRecommendation` that it is at elevated risk. A document
that announces a preemption counts as a notice even if its time cannot be parsed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel, to_pascal

from rlboost.shared.errors import Retryable

POLL_INTERVAL_S = 1.0
"""How often a source is polled. Azure recommends 1 s, Amazon 5 s; lead times as short as 11 s have been observed."""
_MAX_BACKOFF = 4
"""A source that does not answer is polled at most this many times less often."""
_LOG_INTERVAL_S = 60.0
_MAX_SHOWN = 80
"""Characters of an unparsable answer in the error message."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Announces that this machine will be preempted."""

    reason: str
    lead_s: float | None = None
    """Seconds until it is gone; None = unknown."""
    event_id: str = ""
    """Id for the acknowledgment; empty if the cloud expects none."""


@dataclass(frozen=True, slots=True)
class RebalanceRecommendation:
    """Announces that this machine is at elevated risk of preemption."""

    reason: str


class SourceBackoff:
    """How long to wait before a source is polled again, and when to log that it does not answer.

    A failing source is logged at most once a minute, even if it fails for hours or every second time.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._logged_at = -math.inf
        self._logged = False

    def on_failure(self, now_s: float) -> bool:
        """Record a failure; return True if it is to be logged."""
        self._failures += 1
        if self._logged or now_s - self._logged_at < _LOG_INTERVAL_S:
            return False
        self._logged, self._logged_at = True, now_s
        return True

    def on_answer(self) -> bool:
        """Record an answer; return True if the recovery is to be logged, because a failure was."""
        logged, self._logged, self._failures = self._logged, False, 0
        return logged

    def wait_s(self, poll_interval_s: float) -> float:
        """Return the time from the start of one call to the start of the next."""
        return poll_interval_s * min(1 << min(self._failures, 10), _MAX_BACKOFF)


# --- Amazon -----------------------------------------------------------------------------------------------------------
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html


class _InstanceAction(BaseModel):
    action: str
    time: str = ""


class _Rebalance(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)

    notice_time: str


def aws_token(body: str) -> str:
    """Return the session token that every other request needs.

    Raises:
        Retryable: the body is not a token, but for example a web page.

    """
    token = body.strip()
    if not re.fullmatch(r"[\w.~+/=-]{1,1024}", token, re.ASCII):  # `token68` of RFC 7235
        raise _unreadable("a session token", body)
    return token


def aws_notice(body: str, now_s: float) -> Notice:
    """Parse `spot/instance-action`, which exists only if the instance is to be stopped, hibernated or terminated.

    Args:
        body: the document.
        now_s: Unix seconds.

    """
    document = _parse(_InstanceAction, body, "an instance action")
    return Notice(f"aws: {document.action}", _until(datetime.fromisoformat, document.time, now_s))


def aws_rebalance_recommendation(body: str) -> RebalanceRecommendation:
    """Parse `events/recommendations/rebalance`, which exists only while there is a recommendation."""
    return RebalanceRecommendation(
        f"aws: rebalance recommendation of {_parse(_Rebalance, body, 'a recommendation').notice_time}"
    )


# --- Google -----------------------------------------------------------------------------------------------------------
# https://cloud.google.com/compute/docs/instances/create-use-preemptible


def gcp_notice(body: str) -> Notice | None:
    """Parse `instance/preempted`. It has no time: the lead is at most 30 s, unless the machine was given more."""
    match body.strip().upper():
        case "TRUE":
            return Notice("gcp: preempted")
        case "FALSE":
            return None
    raise _unreadable("TRUE or FALSE", body)


# --- Azure ------------------------------------------------------------------------------------------------------------
# https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events


class _Compute(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)

    name: str
    az_environment: str
    location: str = ""


class _ScheduledEvent(BaseModel):
    model_config = ConfigDict(alias_generator=to_pascal)

    event_id: str = ""
    event_type: str = ""
    event_status: str = ""
    resources: list[str] = []
    not_before: str | None = None


class _ScheduledEvents(BaseModel):
    model_config = ConfigDict(alias_generator=to_pascal)

    events: list[_ScheduledEvent]


_AZURE_ENDS = {"Preempt", "Terminate"}
"""Events that end this machine. After the others (Freeze, Reboot, Redeploy) it comes back."""


def azure_machine(body: str) -> str:
    """Parse `instance/compute`; return the name that events use for this machine."""
    return _parse(_Compute, body, "an Azure machine").name


def azure_notice(body: str, machine: str, now_s: float) -> Notice | None:
    """Parse `scheduledevents`. The machines of a scale set or availability set see the events of all of them.

    Args:
        body: the document.
        machine: this machine's name.
        now_s: Unix seconds.

    """
    for event in _parse(_ScheduledEvents, body, "scheduled events").events:
        ours = machine.casefold() in (resource.casefold() for resource in event.resources)
        if ours and event.event_type in _AZURE_ENDS:
            is_due = event.event_status == "Started"
            lead_s = 0.0 if is_due else _until(parsedate_to_datetime, event.not_before or "", now_s)
            return Notice(f"azure: {event.event_type}", lead_s, event.event_id)
    return None


# --- regions ----------------------------------------------------------------------------------------------------------


def aws_region(body: str) -> str:
    """Parse `placement/region`."""
    return _region(body.strip(), body)


def gcp_region(body: str) -> str:
    """Parse `instance/zone`, such as `projects/12/zones/us-central1-a`."""
    return _region(body.strip().rpartition("/")[2].rpartition("-")[0], body)


def azure_region(body: str) -> str:
    """Parse `instance/compute`."""
    return _region(_parse(_Compute, body, "an Azure machine").location, body)


def _region(name: str, body: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]{1,64}", name):
        raise _unreadable("a region", body)
    return name


# --- a file -----------------------------------------------------------------------------------------------------------


def file_notice(path: str, content: str) -> Notice:
    """Return the notice of a notice file; a number in it is the lead time in seconds."""
    try:
        lead_s = float(content)
    except ValueError:
        lead_s = math.nan
    return Notice(f"file: {path}", lead_s if math.isfinite(lead_s) and lead_s >= 0 else None)


# --- helpers ----------------------------------------------------------------------------------------------------------

D = TypeVar("D", bound=BaseModel)


def _parse(kind: type[D], body: str, what: str) -> D:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _unreadable(what, body) from error


def _unreadable(what: str, body: str) -> Retryable:
    return Retryable(f"not {what}: {body[:_MAX_SHOWN]!r}")


def _until(parse: Callable[[str], datetime], text: str, now_s: float) -> float | None:
    """Return the seconds until a time, None if it cannot be parsed; without a zone it is UTC, as these clouds mean."""
    try:
        then = parse(text)
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0.0, round(then.timestamp() - now_s, 1))
