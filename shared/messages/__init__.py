"""All messages on the wire, frozen and tagged. `shared.messages.codec` encodes them.

Rules, each held by `tests/unit/shared/test_messages.py` and the golden bytes in `tests/golden`:

- a message is a map `{"t": tag, field: value, ...}`; the tag names the class;
- a field may be added with a default, and removed if no release of the same protocol reads it; no field is renamed or
  retyped;
- a reader ignores unknown fields, so an older service can read a newer message;
- columns with one entry per token or sample are bytes (`shared.wire`), never lists;
- a value that no service sends, such as a negative count or an infinite rate, does not decode.

Times are Unix seconds, durations seconds, sizes bytes.
"""

from __future__ import annotations

from rlboost.shared.messages.fields import Message, Role, class_of, message, registered
from rlboost.shared.messages.jobs import (
    ENDED,
    ENDED_JOB_RETENTION_S,
    DeadLetter,
    Event,
    JobCommand,
    JobReport,
    JobState,
    StepReport,
    TrainerStatus,
    WeightsCommitted,
)
from rlboost.shared.messages.requests import (
    EngineProfile,
    FinishReason,
    GroupOpened,
    GroupRequested,
    SampleDropped,
    SampleFinished,
    Sampling,
    SeedingEnded,
    SeedingReopened,
    SessionEnded,
    TurnAnswered,
    TurnOpened,
)
from rlboost.shared.messages.token_log import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_RELEASED,
    FINISH_STOP,
    Admitted,
    Closed,
    Placed,
    Restated,
    SampleFailed,
    TokenFrame,
)
from rlboost.shared.messages.workers import (
    Assign,
    Assignment,
    Dismissed,
    Drain,
    InFlightPolicy,
    PreemptionNotice,
    Release,
    Resume,
    Revoke,
    StoreCredential,
    Suspend,
    UseVersion,
    Wait,
    WaitKind,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLog,
    WorkerState,
    public_wait,
)

__all__ = [
    "ENDED",
    "ENDED_JOB_RETENTION_S",
    "FINISH_LENGTH",
    "FINISH_NONE",
    "FINISH_RELEASED",
    "FINISH_STOP",
    "Admitted",
    "Assign",
    "Assignment",
    "Closed",
    "DeadLetter",
    "Dismissed",
    "Drain",
    "EngineProfile",
    "Event",
    "FinishReason",
    "GroupOpened",
    "GroupRequested",
    "InFlightPolicy",
    "JobCommand",
    "JobReport",
    "JobState",
    "Message",
    "Placed",
    "PreemptionNotice",
    "Release",
    "Restated",
    "Resume",
    "Revoke",
    "Role",
    "SampleDropped",
    "SampleFailed",
    "SampleFinished",
    "Sampling",
    "SeedingEnded",
    "SeedingReopened",
    "SessionEnded",
    "StepReport",
    "StoreCredential",
    "Suspend",
    "TokenFrame",
    "TrainerStatus",
    "TurnAnswered",
    "TurnOpened",
    "UseVersion",
    "Wait",
    "WaitKind",
    "WeightsCommitted",
    "WorkerEvent",
    "WorkerHeartbeat",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerLog",
    "WorkerState",
    "class_of",
    "message",
    "public_wait",
    "registered",
]
