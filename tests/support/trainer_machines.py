"""Machines of a trainer: the trainer's side in this process, each machine as the process that a user starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.machines.registry import JobMachines, TrainerMachines
from rlboost.services.trainer.adapters.megatron.policy import MegatronPolicy
from rlboost.services.trainer.adapters.torch.policy import RanksPolicy, TorchPolicy
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.http.server import bind
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.tls import ServerCertificate
from tests.support.megatron_cpu import python_path

TOKEN = "a-token-for-tests"
TEMPERATURE = 0.8
_END_LIMIT_S = 60.0

MEGATRON: dict[str, Any] = {"backend": "megatron", "data_parallel": 2, "distributed_optimizer": True}
DENSE_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp4": {"data_parallel": 4},
    "hsdp2 x 2": {"data_parallel": 4, "fsdp_size": 2},
    "tp2 x dp2": {**MEGATRON, "tensor_parallel": 2, "sequence_parallel": True},
    "pp2 x dp2": {**MEGATRON, "pipeline_parallel": 2},
}
"""Settings of `trainer` for a dense model on two machines of two ranks each."""


class MachineProcess:
    """`rlboost trainer join` on this machine, or in a network namespace."""

    def __init__(
        self, url: str, name: str, log: Path, *, token: str = TOKEN, prefix: Sequence[str] = (), **env: str
    ) -> None:
        self._log = log
        arguments = [sys.executable, "-m", "rlboost", "trainer", "join", "--url", url, "--name", name]
        own = {"PYTHONPATH": python_path(), "RLBOOST_TOKEN": token, "OMP_NUM_THREADS": "1", **env}
        with log.open("ab") as output:
            self._process = subprocess.Popen([*prefix, *arguments], env={**os.environ, **own}, stderr=output)

    @property
    def pid(self) -> int:
        """The process that starts the ranks."""
        return self._process.pid

    def log(self) -> str:
        """Return all that it has printed."""
        return self._log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal; return the exit code."""
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        return self._process.wait(_END_LIMIT_S)


@asynccontextmanager
async def trainer_machines(
    host: str = "127.0.0.1", certificate: ServerCertificate | None = None
) -> AsyncIterator[tuple[TrainerMachines, str]]:
    """Accept machines; yield the trainer's side and its URL."""
    sock = bind(host, 0)
    sock.listen()  # who connects now is accepted when `serve` has started
    url = f"{'tls' if certificate else 'tcp'}://{host}:{sock.getsockname()[1]}"
    machines, stop = TrainerMachines(sock, TOKEN, certificate), asyncio.Event()
    serving = asyncio.create_task(machines.serve(stop), name="machines")
    try:
        yield machines, url
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def policy_on(
    machines: TrainerMachines, optimizer: OptimizerSpec, trainer: Mapping[str, Any], shrink_after_s: float = 0.0
) -> AsyncIterator[RanksPolicy]:
    """Yield a policy on machines that have been gathered, and close it."""
    spec = TrainerSpec.model_validate(trainer)
    gathered = JobMachines(machines, spec, Waits(), device="cpu", shrink_after_s=shrink_after_s)
    await gathered.gather()
    kind = MegatronPolicy if spec.backend == "megatron" else TorchPolicy
    settings = PolicySettings(optimizer=optimizer, temperature=TEMPERATURE)
    policy = kind(settings, Layout.of(spec), device="cpu", launcher=gathered)
    try:
        yield policy
    finally:
        await asyncio.to_thread(policy.close)
