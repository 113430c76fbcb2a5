"""Runs ranks of a trainer on another machine: what `rlboost trainer join` starts.

It is `python -m rlboost.services.trainer.adapters.machines.agent`.

Consumes: assignments from the trainer, one per connection.
Produces: the ranks of this machine, which torchrun starts and watches; they connect to the trainer themselves.
Waits for: the trainer; an assignment; the end of the ranks or of the connection.
Ends when: the stop is set, or the trainer has been unreachable for too long.

torchrun's rendezvous is static, as the trainer decides which machines take part. Its c10d rendezvous would decide that
again, and unpickles what any process in the network sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from typing import Any, ClassVar

import psutil
import structlog
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rlboost.services.trainer.adapters.machines.link import KEY_VARIABLE, MACHINE, Link, connect
from rlboost.services.trainer.adapters.torch.ranks import rank_environment
from rlboost.shared.errors import Retryable, WaitTimedOut
from rlboost.shared.process.lifecycle import run_service, supervise, until_stop
from rlboost.shared.settings import ServiceSettings

log = structlog.get_logger(__name__)

# --- Settings of a machine that runs ranks of a trainer on another one ------------------------------------------------


class MachineSettings(ServiceSettings):
    """Environment prefix `RLBOOST_MACHINE_`."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_MACHINE_")
    prefix: ClassVar[str] = "RLBOOST_MACHINE_"

    url: str = Field(
        "tcp://127.0.0.1:8702", description="the trainer: tcp://HOST:PORT, or tls:// if it has a certificate"
    )
    name: str = Field("", description="name that orders the ranks and appears in messages; if empty, the host name")
    address: str = Field(
        "",
        description="address at which the trainer's other machines reach this one; if empty, the one that the "
        "trainer sees",
    )
    outage_limit_s: float = Field(600.0, gt=0, description="exit after the trainer has been unreachable for this time")

    @property
    def machine_name(self) -> str:
        """Return the name, or the host's."""
        return self.name or socket.gethostname()


# --- The agent of a machine -------------------------------------------------------------------------------------------


_RETRY_S = 1.0
_EXIT_LIMIT_S = 15.0
"""Time from SIGTERM until torchrun is killed; the ranks have exited by then, as their connections are closed."""


class Agent:
    """Joins a trainer again and again."""

    def __init__(self, config: MachineSettings) -> None:
        self._config = config

    async def run(self, stop: asyncio.Event) -> None:
        """Run ranks until the stop.

        Raises:
            ConfigError: the trainer has another token, or its URL is invalid.
            WaitTimedOut: the trainer was unreachable for too long.

        """
        while not stop.is_set():
            if (link := await self._join(stop)) is None:
                return
            stopping = asyncio.create_task(stop.wait(), name="stop")
            serving = asyncio.create_task(self._serve(link, stopping), name="assignment")
            try:
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                link.close()
                await serving
            finally:
                stopping.cancel()
            await until_stop(stop, _RETRY_S)

    async def _join(self, stop: asyncio.Event) -> Link | None:
        """Connect to the trainer; return None after the stop."""
        limit = time.monotonic() + self._config.outage_limit_s
        hello = {"name": self._config.machine_name, "address": self._config.address, "port": _free_port()}
        unreachable = False
        while True:
            try:
                link = await connect(self._config.url, self._config.token.get_secret_value(), MACHINE, hello)
            except Retryable as error:
                if time.monotonic() > limit:
                    raise WaitTimedOut(
                        f"waited {self._config.outage_limit_s:.0f} s for the trainer: {error}"
                    ) from error
                if not unreachable:
                    unreachable = True
                    log.warning("trainer_unreachable", reason=str(error))
                if await until_stop(stop, _RETRY_S):
                    return None
            else:
                log.info("trainer_joined", url=self._config.url, name=self._config.machine_name)
                return link

    async def _serve(self, link: Link, stopping: asyncio.Task[bool]) -> None:
        try:
            assignment = await link.receive()
        except (EOFError, OSError, ValueError):
            return  # the trainer has ended
        log.info("ranks_started", ranks=assignment["ranks"], node=assignment["node"], nodes=assignment["n_nodes"])
        process = await self._torchrun(assignment, self._config.address or link.local_address)
        ended = asyncio.create_task(process.wait(), name="torchrun")
        closed = asyncio.create_task(link.until_closed(), name="closed")
        try:
            await asyncio.wait({ended, closed, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.close()
            closed.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait({ended}, timeout=_EXIT_LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            log.info("ranks_ended", code=await ended)

    async def _torchrun(self, assignment: dict[str, Any], address: str) -> Process:
        environment = rank_environment(assignment["device"], interface_of(address))
        environment[KEY_VARIABLE] = assignment["key"]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={assignment['n_nodes']}",
            f"--node-rank={assignment['node']}",
            f"--nproc-per-node={assignment['ranks']}",
            f"--master-addr={assignment['address']}",
            f"--master-port={assignment['port']}",
            "--module",
            "rlboost.services.trainer.adapters.torch.rank",
            assignment["kind"],
            self._config.url,
            assignment["session"],
            stdin=DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # a keyboard interrupt is for this process
            env={name: value for name, value in environment.items() if name not in _TORCHRUN_VARIABLES},
        )


_TORCHRUN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK"})
"""Schedulers may set them for programs of their own."""


def interface_of(address: str) -> str:
    """Return the name of the network interface with an address; empty if there is none."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if address in {each.address for each in addresses}), "")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


async def main(config: MachineSettings, stop: asyncio.Event) -> None:
    """Run ranks until the stop."""
    await supervise({"assignments": Agent(config).run}, stop, grace_s=20.0)


if __name__ == "__main__":
    sys.exit(run_service("machine", MachineSettings, main))
