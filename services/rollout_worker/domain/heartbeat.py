"""Builds a worker's heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlboost.services.rollout_worker.domain.load import EngineStats, Load
from rlboost.services.rollout_worker.domain.session import Session
from rlboost.shared.messages import Wait, WorkerHeartbeat


def build_heartbeat(
    session: Session,
    stats: EngineStats,
    load: Load,
    *,
    capabilities: Mapping[str, Any],
    last_command: str,
    waiting: Wait | None,
    at: float,
) -> WorkerHeartbeat:
    """Return the heartbeat of an incarnation.

    Args:
        session: the incarnation's session.
        stats: the engine's statistics.
        load: measured now.
        capabilities: the fields that describe the engine; empty before there is one.
        last_command: entry id of the last command that the session has taken.
        waiting: the oldest wait.
        at: seconds since the epoch.

    """
    job_id, version = session.serving or ("", -1)
    return WorkerHeartbeat(
        worker=session.worker,
        state=session.state,
        job_id=job_id,
        version=version,
        # The engine removes aborted requests at its next step; they are not held any more.
        running=min(stats.running, len(session.held)),
        pending=stats.pending + session.n_awaiting_weights,
        tokens_per_s=load.tokens_per_s,
        update_s=load.update_s,
        at=at,
        resident_bytes=load.memory.resident_bytes,
        device_used_bytes=load.memory.device_used_bytes,
        device_total_bytes=load.memory.device_total_bytes,
        command_digest=session.command_digest(),
        last_command=last_command,
        waiting=waiting,
        batch=load.batch,
        step_s=load.step_s,
        update_pause_s=load.update_pause_s,
        **capabilities,
    )
