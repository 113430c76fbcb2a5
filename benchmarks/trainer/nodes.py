"""The trainer's ranks on two nodes: processor time against one process, and bytes on the wire."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.trainer import work
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.plan import TrainingRow, pack, select
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.shared.job.training import OptimizerSpec
from tests.support.losses import clipped_loss
from tests.support.network_namespaces import HOST_LINK, Namespace, network
from tests.support.trainer_machines import DENSE_LAYOUTS, TEMPERATURE, MachineProcess, policy_on, trainer_machines

RATE = 1e-5
OPTIMIZER = OptimizerSpec(lr=RATE)
LOSS = clipped_loss(0.2, 0.28)


def compare(case: work.Case, n_rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one row per layout: medians over updates of all of the case's rows."""
    rows = [row for group in work.groups(case) for row in group]
    batches = select(rows, pack(rows, case.micro_batch_tokens))
    with tempfile.TemporaryDirectory() as folder, _nodes() as (host, namespaces):
        model = work.write_model(case, Path(folder) / "model")
        one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, temperature=TEMPERATURE), device="cpu")
        for name, layout in DENSE_LAYOUTS.items():
            one.load_hf(model)  # again, without the updates so far
            n_bytes = 4 * sum(parameter.numel() for parameter in one.rank.module.parameters())
            found = asyncio.run(_rounds(layout, n_rounds, one, model, batches, host, namespaces))
            row = {key: round(median(values), 3) for key, values in found.items() if values}
            if "between_nodes_mb" in row:
                row["between_nodes_over_model"] = round(row["between_nodes_mb"] * 1e6 / n_bytes, 2)
            yield {
                "benchmark": "trainer.nodes",
                "layout": name,
                "namespaces": bool(namespaces),
                "model_mb": round(n_bytes / 1e6, 1),
                "tokens": sum(row.n_tokens for row in rows),
                "micro_batches": len(batches),
                **row,
            }


async def _rounds(
    layout: dict[str, Any],
    n_rounds: int,
    one: PolicyEngine,
    model: Path,
    batches: Sequence[Sequence[TrainingRow]],
    host: str,
    namespaces: Sequence[Namespace],
) -> dict[str, list[float]]:
    """Update in one process and on the nodes, in turn; the first round warms up."""
    found: dict[str, list[float]] = {}
    prefixes = [namespace.prefix for namespace in namespaces] or [(), ()]
    with tempfile.TemporaryDirectory() as folder:
        async with trainer_machines(host) as (machines, url):
            agents = [
                MachineProcess(url, f"node-{i}", Path(folder) / f"{i}.log", prefix=prefix)
                for i, prefix in enumerate(prefixes)
            ]
            try:
                async with policy_on(machines, OPTIMIZER, {**layout, "nodes": 2}) as policy:
                    await asyncio.to_thread(policy.load_hf, model)
                    for number in range(n_rounds + 1):
                        one_s, norm = _one(one, batches)
                        before = _counters(agents, namespaces)
                        other = await asyncio.to_thread(_update, policy, batches)
                        spent = {key: after - before[key] for key, after in _counters(agents, namespaces).items()}
                        assert abs(norm - other) < 0.02 * norm, f"not the same work: norms are {norm} and {other}"
                        if number:
                            spent |= {"one_process_cpu_s": one_s, "cpu_efficiency": one_s / spent["nodes_cpu_s"]}
                            for key, value in spent.items():
                                found.setdefault(key, []).append(value)
            finally:
                for agent in agents:
                    agent.stop(signal.SIGKILL)
    return found


def _one(policy: PolicyEngine, batches: Sequence[Sequence[TrainingRow]]) -> tuple[float, float]:
    """Return the processor seconds of an update, and the gradient's norm."""
    began = time.process_time()
    norm = _update(policy, batches)
    return time.process_time() - began, norm


def _update(policy: PolicyEngine, batches: Sequence[Sequence[TrainingRow]]) -> float:
    policy.accumulate(batches, LOSS)
    return policy.step(RATE)


def _counters(agents: Sequence[MachineProcess], namespaces: Sequence[Namespace]) -> dict[str, float]:
    """Return processor seconds of trainer and ranks, and MB that the nodes have sent each other and the trainer."""
    processes = [child for agent in agents for child in psutil.Process(agent.pid).children(recursive=True)]
    counters = {"nodes_cpu_s": time.process_time() + sum(_cpu_s(process) for process in processes)}
    if namespaces:
        to_trainer = float(Path(f"/sys/class/net/{HOST_LINK}/statistics/rx_bytes").read_text())
        sent = sum(namespace.sent_bytes() for namespace in namespaces)
        counters |= {"between_nodes_mb": (sent - to_trainer) / 1e6, "to_trainer_mb": to_trainer / 1e6}
    return counters


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _nodes() -> Iterator[tuple[str, list[Namespace]]]:
    """Yield the trainer's address and two namespaces; without root none, and the nodes are on loopback."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield "127.0.0.1", []
        return
    with network(2) as made:
        yield made
