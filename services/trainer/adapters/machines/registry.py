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
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from rlboost.services.trainer.adapters.machines.link import MACHINE, Link, accept, server_context
from rlboost.shared.ids import new_token
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
