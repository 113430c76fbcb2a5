"""Signatures of job commands, so that a trainer runs only what a manager with the system's token has accepted.

A job's functions run with the trainer's rights, and any client that can write to Redis can append a command. The
signature covers every field. It does not prevent that a signed command is appended again: commands are idempotent.
"""

from __future__ import annotations

import json

from rlboost.shared.http.access import is_valid_signature, sign
from rlboost.shared.messages import JobCommand


def signed(command: JobCommand, token: str) -> JobCommand:
    """Return the command with a signature under the system's token."""
    return command.model_copy(update={"signature": sign(token, "job-command", _subject(command))})


def is_signed(command: JobCommand, token: str) -> bool:
    """Return True if the command has a valid signature."""
    return is_valid_signature(command.signature, token, "job-command", _subject(command))


def _subject(command: JobCommand) -> str:
    return json.dumps([command.command_id, command.action, command.job_id, command.job_no, command.spec_json])
