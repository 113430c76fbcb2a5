"""Effects translate to bus operations."""

from __future__ import annotations

from rlboost.services.rollout_manager.domain.effects import bookkeeping, forget_job, forget_worker, operations
from rlboost.shared.messages import Dismissed, Suspend
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, HashSet
from tests.support.memory_bus import MemoryBus


async def test_of_a_forgotten_worker_s_commands_only_the_dismissal_is_kept() -> None:
    bus = MemoryBus()
    commands = names.worker_commands("w")
    await bus.transact([Append(commands, Suspend(step=i)) for i in range(3)])
    (*_, last) = await bus.read({commands: START})
    await bus.transact(operations([forget_worker("w")]))
    (kept,) = await bus.read({commands: START})
    assert isinstance(kept.message, Dismissed)
    assert await bus.read({commands: last.id}) == [kept], "who has read all before finds it"


async def test_the_cursor_of_a_stream_that_is_over_is_removed() -> None:
    bus = MemoryBus()
    await bus.transact([HashSet(names.MANAGER_CURSORS, {"a": "1-0", "b": "1-0"})])
    await bus.transact(bookkeeping({"a": "2-0"}, {}, closed_streams=["b"]))
    assert await bus.hash_all(names.MANAGER_CURSORS) == {"a": "2-0"}


async def test_forget_job_removes_the_cursor_that_a_killed_manager_left() -> None:
    """The turn after the job's end removes it, unless the manager is killed before that turn's commit."""
    bus = MemoryBus()
    await bus.transact([HashSet(names.MANAGER_CURSORS, {names.rollouts_requested("j"): "1-0", "b": "1-0"})])
    await bus.transact(operations([forget_job("j")]))
    assert await bus.hash_all(names.MANAGER_CURSORS) == {"b": "1-0"}
