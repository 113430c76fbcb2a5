"""The trainer's side of its machines: accepts them, gives them assignments, and connects their ranks.

Consumes: connections to `RLBOOST_TRAINER_MACHINES_PORT`, of machines and, during a session, of their ranks.
Produces: the present machines, and one socket per rank of a session.
Waits for: connections.
Ends when: the trainer stops. A session ends when a machine of it is lost, or when its job ends.

A machine gets one assignment per connection. When the session ends, the trainer closes the connection; the machine
kills its ranks and connects again. So neither side has to agree with the other about what has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from rlboost.services.trainer.adapters.machines.link import MACHINE, Link, accept, server_context
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.shared.errors import Retryable, WaitTimedOut
from rlboost.shared.ids import new_token
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.tls import ServerCertificate

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class TrainerMachine:
    """A machine that has joined."""

    name: str
    address: str
    """The address at which the ranks of other machines reach it."""
    port: int
    """A free port there, for the rendezvous of the ranks."""
    link: Link
    session: RankSession | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(eq=False)
class RankSession:
    """The ranks of one start of a job. Rank 0 is the first one of the first machine."""

    machines: Sequence[TrainerMachine]
    ranks_per_machine: int
    id: str = field(default_factory=new_token)
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    """The key with which the ranks authenticate; they do not have the system's token."""
    lost: str = ""
    """The machine that was lost, if one was."""

    def __post_init__(self) -> None:
        self.ended = asyncio.Event()
        self.channels: dict[int, socket.socket] = {}
        """Rank -> the trainer's end of its connection."""
        self.connected = asyncio.Event()
        """Set once every rank has connected."""

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return len(self.machines) * self.ranks_per_machine

    def machine_of(self, rank: int) -> TrainerMachine:
        """Return the machine of a rank."""
        return self.machines[rank // self.ranks_per_machine]

    def add(self, rank: int) -> socket.socket:
        """Add a rank that has connected; return the end of its socket pair to relay to.

        Raises:
            ValueError: there is no such rank, or it has connected before.

        """
        if rank not in range(self.n_ranks) or rank in self.channels or self.ended.is_set():
            raise ValueError(f"no rank {rank}")
        self.channels[rank], theirs = socket.socketpair()
        if len(self.channels) == self.n_ranks:
            self.connected.set()
        return theirs


class TrainerMachines:
    """The machines that have joined this trainer."""

    def __init__(self, sock: socket.socket, token: str, certificate: ServerCertificate | None = None) -> None:
        """Hold no machines; `serve` accepts them.

        Args:
            sock: bound.
            token: the system's.
            certificate: to accept TLS only.

        """
        self._sock = sock
        self._token = token
        self._tls = server_context(certificate)
        self._machines: list[TrainerMachine] = []
        self._sessions: dict[str, RankSession] = {}
        self.changed = asyncio.Event()
        """Set when a machine joins or is lost; a waiter clears it before it waits."""

    async def serve(self, stop: asyncio.Event) -> None:
        """Accept connections until the stop."""
        async with asyncio.TaskGroup() as connections:

            def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = connections.create_task(self._connection(reader, writer), name="trainer-machine")
                serving.add(task)
                task.add_done_callback(serving.discard)

            serving: set[asyncio.Task[None]] = set()
            server = await asyncio.start_server(start, sock=self._sock, ssl=self._tls)
            try:
                await stop.wait()
            finally:
                server.close()
                for task in serving:
                    task.cancel()

    @property
    def idle(self) -> list[TrainerMachine]:
        """The present machines without an assignment, by name."""
        return sorted((m for m in self._machines if m.session is None), key=lambda machine: machine.name)

    async def assign(self, session: RankSession, kind: str, device: str) -> None:
        """Have the machines of a session start its ranks.

        Raises:
            OSError: one was lost just now.

        """
        self._sessions[session.id] = session
        for machine in session.machines:
            machine.session = session
        first = session.machines[0]
        for node, machine in enumerate(session.machines):
            await machine.link.send(
                {
                    "session": session.id,
                    "key": session.key,
                    "kind": kind,
                    "device": device,
                    "node": node,
                    "n_nodes": len(session.machines),
                    "ranks": session.ranks_per_machine,
                    "address": first.address,
                    "port": first.port,
                }
            )

    def end(self, session: RankSession) -> None:
        """End a session: its machines kill its ranks and join again."""
        self._sessions.pop(session.id, None)
        session.ended.set()
        for machine in session.machines:
            machine.link.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ["unknown"])[0])
        try:
            link = Link(reader, writer)
            name, hello = await accept(link, self._key)
            if name == MACHINE:
                await self._machine(
                    TrainerMachine(str(hello["name"]), str(hello["address"]) or address, int(hello["port"]), link)
                )
            else:
                await self._rank(link, self._sessions[name], int(hello["rank"]))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            log.warning("machine_rejected", address=address, reason=str(error) or type(error).__name__)
        finally:
            writer.transport.abort()

    def _key(self, session: str) -> str:
        if session == MACHINE:
            return self._token
        return self._sessions[session].key if session in self._sessions else ""

    async def _machine(self, machine: TrainerMachine) -> None:
        self._machines.append(machine)
        self.changed.set()
        log.info("machine_joined", machine=machine.name, address=machine.address)
        try:
            await machine.link.until_closed()
        finally:
            self._machines.remove(machine)
            self.changed.set()
            if machine.session is not None and not machine.session.ended.is_set():
                log.warning("machine_lost", machine=machine.name, address=machine.address)
                machine.session.lost = str(machine)
                self.end(machine.session)

    async def _rank(self, link: Link, session: RankSession, rank: int) -> None:
        relaying = asyncio.create_task(link.relay(session.add(rank)), name=f"rank-{rank}")
        ended = asyncio.create_task(session.ended.wait(), name="session-ended")
        try:
            await asyncio.wait({relaying, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (relaying, ended):
                task.cancel()
            await asyncio.wait({relaying})


def describe(session: RankSession, ranks: Sequence[int]) -> str:
    """Return the machines of ranks, for a message."""
    return ", ".join(sorted({str(session.machine_of(rank)) for rank in ranks}))


# --- The ranks of one job on the machines that have joined its trainer ------------------------------------------------


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
        return rank % self._gathered.ranks_per_machine

    def start(self, kind: str) -> list[socket.socket]:
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
        self.kill()
        if self._session is not None:
            for channel in self._session.channels.values():
                channel.close()

    def describe_end(self, rank: int) -> str:
        session = self._gathered
        if session.lost:
            return f"was lost with machine {session.lost}"
        return f"on machine {session.machine_of(rank)} ended"

    @property
    def _gathered(self) -> RankSession:
        assert self._session is not None, "gather first"
        return self._session
