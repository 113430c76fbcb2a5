"""What a cloud says about the future of this machine, read from the cloud's own documents.

A notice: the machine will be taken away. Advice: that is likelier than usual, and nobody has decided it. Where a
document says that the machine goes and only the time cannot be read, it is a notice all the same.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel, to_pascal

from shared.errors import Retryable

EVERY_S = 1.0
"""How often a source is asked. Azure's guide says once a second, Amazon's every 5 s; leads of 11 s were seen."""
_BACK_OFF = 4
"""A source that does not answer is asked this many times less often at most."""
_SAY_AGAIN_S = 60.0
_SHOWN = 80
"""Characters of an unreadable answer that are shown."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Word that this machine will be taken away."""

    reason: str
    lead_s: float | None = None
    """Seconds until it is gone; None = nobody said."""
    event_id: str = ""
    """What it is acknowledged by, where its cloud wants that."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Word that this machine is likelier than others to be taken away soon."""

    reason: str


class Patience:
    """How long to wait before a source is asked again, and when to say that it does not answer.

    A source that fails, whether for a second or for hours, or every second time, gets one line a minute at most.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._said_at = -math.inf
        self._said = False

    def failed(self, now_s: float) -> bool:
        """Note a failure; tell whether to say so."""
        self._failures += 1
        if self._said or now_s - self._said_at < _SAY_AGAIN_S:
            return False
        self._said, self._said_at = True, now_s
        return True

    def answered(self) -> bool:
        """Note an answer; tell whether to say so, because the opposite was said."""
        said, self._said, self._failures = self._said, False, 0
        return said

    def wait_s(self, every_s: float) -> float:
        """Return how long after one call the next one begins."""
        return every_s * min(1 << min(self._failures, 10), _BACK_OFF)


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
        Retryable: it is none; a web page, say.

    """
    token = body.strip()
    if not re.fullmatch(r"[\x21-\x7e]{1,1024}", token):
        raise _unreadable("a session token", body)
    return token


def aws_notice(body: str, now_s: float) -> Notice:
    """Read `spot/instance-action`, which is there only when the instance is to be stopped, hibernated or terminated.

    Args:
        body: the document.
        now_s: Unix seconds.

    """
    document = _parse(_InstanceAction, body, "an instance action")
    return Notice(f"aws: {document.action}", _until(_iso_8601(document.time), now_s))


def aws_advice(body: str) -> Advice:
    """Read `events/recommendations/rebalance`, which is there only when such a recommendation is."""
    return Advice(f"aws: rebalance recommendation of {_parse(_Rebalance, body, 'a recommendation').notice_time}")


# --- Google -----------------------------------------------------------------------------------------------------------
# https://cloud.google.com/compute/docs/instances/create-use-preemptible


def gcp_notice(body: str) -> Notice | None:
    """Read `instance/preempted`. It does not tell when: the lead is 30 s at most, unless the machine was given more."""
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
"""Events after which this machine is no more. After the others (Freeze, Reboot, Redeploy) it is there again."""


def azure_machine(body: str) -> str:
    """Read `instance/compute`: the name by which events mean this machine."""
    return _parse(_Compute, body, "an Azure machine").name


def azure_notice(body: str, machine: str, now_s: float) -> Notice | None:
    """Read `scheduledevents`. All machines of a scale set or availability set see the events of each other.

    Args:
        body: the document.
        machine: this machine's name.
        now_s: Unix seconds.

    """
    for event in _parse(_ScheduledEvents, body, "scheduled events").events:
        ours = machine.casefold() in (resource.casefold() for resource in event.resources)
        if ours and event.event_type in _AZURE_ENDS:
            lead_s = 0.0 if event.event_status == "Started" else _until(_rfc_1123(event.not_before or ""), now_s)
            return Notice(f"azure: {event.event_type}", lead_s, event.event_id)
    return None


# --- a file -----------------------------------------------------------------------------------------------------------


def file_notice(path: str, content: str) -> Notice:
    """Return the notice that a file is by being there; a number in it is the seconds left."""
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
    return Retryable(f"not {what}: {body[:_SHOWN]!r}")


def _until(then: datetime | None, now_s: float) -> float | None:
    return None if then is None else max(0.0, round(then.timestamp() - now_s, 1))


def _iso_8601(text: str) -> datetime | None:
    try:
        return _in_utc(datetime.fromisoformat(text))
    except ValueError:
        return None


def _rfc_1123(text: str) -> datetime | None:
    try:
        return _in_utc(parsedate_to_datetime(text))
    except ValueError:
        return None


def _in_utc(time: datetime) -> datetime:
    """Take a time without a zone as UTC, which is what these clouds mean."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)
