"""The ranks of one job on the machines that have joined its trainer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from rlboost.services.trainer.adapters.machines.registry import RankSession, TrainerMachines, describe
from rlboost.services.trainer.adapters.ranks.layout import Layout
from rlboost.shared.errors import Retryable, WaitTimedOut
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.process.waiting import Waits

_GATHER_LIMIT_S = 24 * 3600.0
_START_LIMIT_S = 600.0


class JobMachines:
    """Waits for the job's machines and starts its ranks there: a `Machines`, and a `Launcher` of ranks.

    `gather` runs on the event loop that creates this object; the calls of a `Launcher` are made by another thread.
    """

    init_method = "env://"
    pids: tuple[int, ...] = ()

    def __init__(
        self, machines: TrainerMachines, spec: TrainerSpec, waits: Waits, *, device: str, shrink_after_s: float
    ) -> None:
        """Bind to the machines of a trainer.

        Args:
            machines: the machines that have joined.
            spec: the job file's section `trainer`.
            waits: registry of waits.
            device: the device type of the ranks.
            shrink_after_s: how long to wait for all machines when fewer are enough.

        """
        self._machines = machines
        self._spec = spec
        self._waits = waits
        self._device = device
        self._shrink_after_s = shrink_after_s
        self._session: RankSession | None = None

    async def gather(self) -> None:
        """See `Machines.gather`."""
        self._loop = asyncio.get_running_loop()
        began = time.monotonic()
        while len(self._machines.idle) < self._needed(time.monotonic() - began):
            present, n_nodes = len(self._machines.idle), self._spec.nodes
            self._machines.changed.clear()
            wait = self._waits.on(
                f"{n_nodes - present} of {n_nodes} trainer machines",
                because="run 'rlboost trainer join' on each",
                limit_s=began + _GATHER_LIMIT_S - time.monotonic(),
            )
            async with wait:
                if present >= self._spec.fewest_nodes:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(began + self._shrink_after_s - time.monotonic()):
                            await self._machines.changed.wait()
                else:
                    await self._machines.changed.wait()
        self._session = RankSession(self._machines.idle[: self._spec.nodes], self._spec.n_ranks // self._spec.nodes)

    def _needed(self, waited_s: float) -> int:
        return self._spec.fewest_nodes if waited_s >= self._shrink_after_s else self._spec.nodes

    @property
    def layout(self) -> Layout:
        """See `Launcher.layout`; on fewer machines there are fewer data-parallel replicas."""
        full = Layout.of(self._spec)
        return full._replace(data=full.data * len(self._gathered.machines) // self._spec.nodes)

    def local_rank(self, rank: int) -> int:
        """See `Launcher.local_rank`."""
        return rank % self._gathered.ranks_per_machine

    def start(self, kind: str) -> list[socket.socket]:
        """See `Launcher.start`."""
        return asyncio.run_coroutine_threadsafe(self._start(kind), self._loop).result()

    async def _start(self, kind: str) -> list[socket.socket]:
        session = self._gathered
        because = f"{session.n_ranks} processes start on {len(session.machines)} machines"
        ending = {asyncio.ensure_future(event.wait()) for event in (session.connected, session.ended)}
        try:
            async with self._waits.on("the trainer's ranks", because=because, limit_s=_START_LIMIT_S):
                await self._machines.assign(session, kind, self._device)
                await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        except OSError as error:
            raise Retryable(f"a machine of the trainer was lost: {error}") from error
        except WaitTimedOut as error:
            missing = [rank for rank in range(session.n_ranks) if rank not in session.channels]
            where = describe(session, missing)
            raise WaitTimedOut(f"ranks {missing} of the trainer did not start: see the output of {where}") from error
        finally:
            for wait in ending:
                wait.cancel()
        if session.ended.is_set():
            raise Retryable(f"machine {session.lost} of the trainer was lost while its ranks started")
        return [session.channels[rank] for rank in range(session.n_ranks)]

    def kill(self) -> None:
        """See `Launcher.kill`: the session ends, and its machines kill the ranks."""
        if self._session is not None:
            with contextlib.suppress(RuntimeError):  # the trainer has stopped, and with it the session
                self._loop.call_soon_threadsafe(self._machines.end, self._session)

    def close(self) -> None:
        """See `Launcher.close`."""
        self.kill()
        if self._session is not None:
            for channel in self._session.channels.values():
                channel.close()

    def describe_end(self, rank: int) -> str:
        """See `Launcher.describe_end`."""
        session = self._gathered
        if session.lost:
            return f"was lost with machine {session.lost}"
        return f"on machine {session.machine_of(rank)} ended"

    @property
    def _gathered(self) -> RankSession:
        assert self._session is not None, "gather first"
        return self._session
