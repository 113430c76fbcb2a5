"""The loop that reads the manager's commands and executes the effects that the session decides.

Consumes: the incarnation's command stream, in order.
Produces: calls of the engine, weight updates, new incarnations, dead letters.
Waits for: the next command (`Bus.read`); a suspension also waits for the engine to pause and for Redis to accept a
    flush. A weight update runs in the background (`weight_updates`), and has its own effects executed here.
Ends when: cancelled, by the shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import assert_never

import structlog

from rlboost.services.rollout_worker.domain.effects import (
    AbortRequests,
    CancelPull,
    DeadLetterCommand,
    DrainWorker,
    Effect,
    EngineEffect,
    PullWeights,
    Rejoin,
    ReleaseRequests,
    ReleaseUnstarted,
    RenewAccess,
    ResumeEngine,
    SubmitSamples,
    SuspendEngine,
)
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.domain.session import Session
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.manager_connection import RETRY_INTERVAL_S, ManagerConnection
from rlboost.services.rollout_worker.startup_timer import StartupTimer
from rlboost.services.rollout_worker.weight_updates import WeightUpdates
from rlboost.shared.errors import BusUnavailable, CredentialRejected
from rlboost.shared.messages import Assignment
from rlboost.shared.streams import names
from rlboost.shared.streams.entries import Entry
from rlboost.shared.wire.columns import ints

log = structlog.get_logger(__name__)

_BLOCK_S = 1.0


def _decide(session: Session, entry: Entry) -> list[Effect]:
    """Return what to do about a command; one that fails unexpectedly is dead-lettered, and the session replaced."""
    try:
        return session.on_command(entry.message)
    except Exception as error:
        log.exception("command_failed", command=entry.message.tag, entry=entry.id)
        reason = f"{entry.message.tag} cannot be executed: {error!r}"
        return [DeadLetterCommand(reason), Rejoin(reason)]


class CommandLoop:
    """Executes the manager's commands.

    Args:
        connection: provides the commands; its session decides.
        generator: the engine.
        updates: replaces the engine's weights.
        startup: times the first version and the first assignment.
        executing: held from a decision of the session to the end of its effects, here and by `weight_updates`.
        on_drain: called with the reason when the manager drains the worker.
        on_state_changed: called when the next heartbeat should not wait.

    """

    def __init__(
        self,
        connection: ManagerConnection,
        generator: Generator,
        updates: WeightUpdates,
        startup: StartupTimer,
        executing: asyncio.Lock,
        *,
        on_drain: Callable[[str], None],
        on_state_changed: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._generator = generator
        self._updates = updates
        self._startup = startup
        self._executing = executing
        self._on_drain = on_drain
        self._on_state_changed = on_state_changed

    async def run(self) -> None:
        """Read and execute commands until cancelled."""
        while True:
            incarnation = self._connection.incarnation
            stream = names.worker_commands(incarnation.worker)
            try:
                entries = await incarnation.bus.read({stream: incarnation.cursor}, block_s=_BLOCK_S)
            except BusUnavailable as error:
                log.warning("redis_unavailable", error=str(error), during="read commands")
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            for entry in entries:
                async with self._executing:
                    if incarnation is not self._connection.incarnation:
                        break
                    incarnation.cursor = entry.id
                    log.debug("command_received", command=entry.message.tag)
                    try:
                        await self.execute(_decide(incarnation.session, entry), entry)
                    except CredentialRejected as error:
                        await self._rejoin(str(error), is_rejected=True)

    async def execute(self, effects: Sequence[Effect], entry: Entry | None = None) -> None:
        """Execute what the session has decided, about the command in `entry` if there is one."""
        for effect in effects:
            match effect:
                case PullWeights():
                    self._startup.end("version")
                    await self._updates.start(effect)
                case CancelPull():
                    await self._updates.cancel()
                case DrainWorker(reason):
                    self._on_drain(reason)
                case RenewAccess(credential):
                    self._updates.renew_access(credential)
                case Rejoin(reason):
                    await self._rejoin(reason)
                case DeadLetterCommand(reason):
                    if entry is not None:
                        await self._connection.retry_until_ok(
                            "dead-letter a command", lambda: self._connection.dead_letter(entry, reason)
                        )
                case _:
                    await self._execute_on_engine(effect)
        if self._connection.state_changed:
            self._on_state_changed()

    async def _execute_on_engine(self, effect: EngineEffect) -> None:
        match effect:
            case SubmitSamples(samples):
                self._startup.end("assignment")
                self._generator.submit([_request(sample) for sample in samples])
            case AbortRequests(keys):
                self._generator.abort(keys)
            case ReleaseRequests(keys):
                self._generator.release(keys)
            case ReleaseUnstarted(samples):
                self._connection.release_unstarted(samples)
            case SuspendEngine(keys):
                await self._generator.pause("suspended")
                try:
                    await self._connection.retry_until_ok("flush before the suspension", self._connection.flush)
                finally:
                    self._generator.abort(keys)  # the session has dropped them already
                self._connection.session.on_engine_suspended()
            case ResumeEngine():
                await self._generator.resume("suspended")
            case _:
                assert_never(effect)

    async def rejoin_rejected(self, reason: str) -> None:
        """Join again because Redis no longer accepts this incarnation."""
        async with self._executing:
            await self._rejoin(reason, is_rejected=True)

    async def _rejoin(self, reason: str, *, is_rejected: bool = False) -> None:
        await self._updates.cancel()
        self._generator.abort(list(self._connection.session.held.items()))
        try:
            await self._connection.rejoin(reason, is_rejected=is_rejected)
        except CredentialRejected as error:
            await self._connection.rejoin(str(error), is_rejected=True)
        await self._generator.resume("suspended")


def _request(assignment: Assignment) -> Request:
    return Request(
        sample=assignment.sample,
        attempt=assignment.attempt,
        prompt=ints(assignment.prompt),
        tokens=ints(assignment.tokens),
        sampling=assignment.sampling,
        seed=assignment.seed,
    )
