"""A worker's loops on an in-memory bus, with a fake engine and fake weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlboost.services.rollout_worker.app import WorkerApp, WorkerOptions
from rlboost.services.rollout_worker.domain.load import KvCapacity, Memory
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.manager_connection import ManagerConnection, WorkerIdentity
from rlboost.services.rollout_worker.ports import Changes, Membership, StagedAdapter, StagedWeights
from rlboost.shared.errors import BusUnavailable, CredentialRejected
from rlboost.shared.messages import TokenFrame
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams.bus import Append, Fence, Op
from rlboost.shared.streams.names import worker_reports
from tests.support.memory_bus import MemoryBus
from tests.support.worker_fakes import FakeEngine, FakeEngineFactory, FakeStagedWeights, FakeWeights
from tests.support.worker_manager import JOB, WorkerManager, at_once


class SlowToLoad(FakeEngine):
    """Loads weights only when it may."""

    def __init__(self, capacity: KvCapacity | None = None, max_adapters: int = 0) -> None:
        max_len = capacity.max_len if capacity else 1 << 17
        super().__init__(4, max_len=max_len, interval_s=0.001, capacity=capacity, max_adapters=max_adapters)
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.hangs = False
        self.loads = 0
        self.kept_kv: list[bool] = []
        """Of each suspension and each load, whether the cache was to be kept."""

    def tick(self) -> bool:
        return not self.hangs and super().tick()

    async def load_weights(
        self, version: int, weights: StagedWeights, changes: Changes | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        self.loads += 1
        self.kept_kv.append(keep_kv)
        await self.may_load.wait()
        return await super().load_weights(version, weights, changes)

    async def load_adapter(
        self, job_id: str, version: int, adapter: StagedAdapter | None, *, keep_kv: bool = False
    ) -> list[str]:
        wrong = await super().load_adapter(job_id, version, adapter, keep_kv=keep_kv)
        await self.may_load.wait()  # and is verified
        return wrong

    async def suspend(self, *, keep_kv: bool = False) -> None:
        self.kept_kv.append(keep_kv)
        await super().suspend(keep_kv=keep_kv)


class Rig(MemoryBus):
    """One worker with everything around it. As a bus it can refuse and delay writes to the log."""

    def __init__(
        self,
        grace_s: float = 5.0,
        finish_limit_s: float = 20.0,
        *,
        drain_on_rebalance: bool = False,
        parity_limit_s: float = 20.0,
        capacity: KvCapacity | None = None,
        max_adapters: int = 0,
    ) -> None:
        super().__init__()
        self.may_join = asyncio.Event()
        self.may_join.set()
        self.rejected = ""
        """The worker whose user Redis does not know."""
        self.factory = FakeEngineFactory(lambda: SlowToLoad(capacity, max_adapters))
        self.weights = FakeWeights()
        self.weights.versions = {(JOB, version): FakeStagedWeights() for version in range(3)}
        self.manager = WorkerManager(self)
        self.stop = asyncio.Event()
        self.waits = Waits()
        self.generator = Generator(self.factory, parity_limit_s=parity_limit_s)
        identity = WorkerIdentity("preemptible", "fake", 4, 0.5, "here", 1, trainer="t")
        first, memory = at_once(self.manager.accept()), Memory(1, 2, 3)
        self.connection = ManagerConnection(
            first, self._join, self.generator, identity, 0.5, self.waits, lambda: memory
        )
        options = WorkerOptions(0.002, 0.02, grace_s, finish_limit_s, drain_on_rebalance)
        self.worker = WorkerApp(
            self.stop,
            self.connection,
            self.generator,
            self.weights,
            options,
            self.waits,
        )
        self.log_refuses = False
        self.sent_twice = 0

    async def _join(self) -> Membership:
        await self.may_join.wait()
        return await self.manager.accept()

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        if self.rejected and any(isinstance(op, Append) and op.stream == worker_reports(self.rejected) for op in ops):
            raise CredentialRejected("no such user")
        if any(isinstance(op, Append) and isinstance(op.message, TokenFrame) for op in ops):
            if self.log_refuses:
                raise BusUnavailable("the log refuses")
            if self.sent_twice:
                self.sent_twice -= 1
                self.lose_next_reply = True
        await super().transact(ops, fence)

    @property
    def engine(self) -> SlowToLoad:
        assert isinstance(self.factory.engine, SlowToLoad)
        return self.factory.engine
