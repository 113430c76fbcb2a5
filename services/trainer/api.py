"""The trainer's HTTP interface: health routes only."""

from __future__ import annotations

from fastapi import FastAPI

from rlboost.services.trainer.app import Trainer
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import create_app
from rlboost.shared.process.waiting import Waits


def create(trainer: Trainer, token: str, waits: Waits) -> FastAPI:
    """Return the app."""
    return create_app(
        "RLBoost trainer", guard=Guard.of_token(token), not_ready_reason=trainer.not_ready_reason, waits=waits
    )
