"""Machines that join a trainer: authentication, and a policy whose ranks are on two of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from rlboost.services.trainer import build
from rlboost.services.trainer.adapters.machines import link
from rlboost.services.trainer.adapters.machines.link import MACHINE, Link
from rlboost.services.trainer.adapters.machines.registry import JobMachines, RankSession, TrainerMachines
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.services.trainer.settings import Settings
from rlboost.shared.errors import ConfigError, Retryable
from rlboost.shared.job.training import OptimizerSpec, TrainerSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.tls import ServerCertificate
from rlboost.shared.wire import F32
from tests.support import rank_policies
from tests.support.certificates import make_certificates
from tests.support.eventually import eventually
from tests.support.losses import clipped_loss
from tests.support.trainer_machines import TEMPERATURE, TOKEN, MachineProcess, policy_on, trainer_machines
from tests.support.training_rows import rows

OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.1, grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(6, seed=1), rows(3, seed=2)]
FSDP = {"data_parallel": 2, "nodes": 2, "min_nodes": 1}
Trainer = tuple[TrainerMachines, str]
Join = Callable[..., Awaitable[Link]]


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    async with trainer_machines() as made:
        yield made


@pytest.fixture
async def links() -> AsyncIterator[list[Link]]:
    """Links to close after the test."""
    opened: list[Link] = []
    yield opened
    for each in opened:
        each.close()


@pytest.fixture
def join(links: list[Link]) -> Join:
    async def connect(url: str, name: str, token: str = TOKEN, session: str = MACHINE) -> Link:
        links.append(await link.connect(url, token, session, {"name": name, "address": "", "port": 1, "rank": 0}))
        return links[-1]

    return connect


async def present(machines: TrainerMachines, n: int) -> None:
    await eventually(lambda: len(machines.idle) == n)


# --- who may join ---


async def test_machine_with_another_token_is_rejected(trainer: Trainer, join: Join, links: list[Link]) -> None:
    machines, url = trainer
    with pytest.raises(ConfigError, match="another token"):
        await join(url, "a", token="wrong")
    reader, writer = await asyncio.open_connection(*link.parse_url(url)[:2])
    links.append(stranger := Link(reader, writer))
    await stranger.send({"nonce": "0", "session": MACHINE})
    await stranger.receive()
    await stranger.send({"proof": "0", "name": "a", "address": "", "port": 1})
    await stranger.until_closed()
    assert machines.idle == []


async def test_machine_joins_over_tls_only_with_a_trusted_certificate(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_certificates(tmp_path / "tls")
    async with trainer_machines(certificate=ServerCertificate(str(files.certificate), str(files.key))) as trainer:
        machines, url = trainer
        with pytest.raises(ConfigError, match="RLBOOST_TLS_CA"):
            await join(url, "a")
        with pytest.raises(Retryable, match="cannot be reached"):
            await join(url.replace("tls", "tcp"), "a")
        monkeypatch.setenv("RLBOOST_TLS_CA", str(files.ca))
        await join(url, "a")
        await present(machines, 1)


async def test_rank_connects_once_with_its_session_key(trainer: Trainer, join: Join) -> None:
    machines, url = trainer
    first = await join(url, "a")
    await present(machines, 1)
    session = RankSession(machines.idle, ranks_per_machine=1)
    with pytest.raises(Retryable):  # not assigned yet
        await join(url, "", session.key, session.id)
    await machines.assign(session, "fsdp", "cpu")
    assert (await first.receive())["key"] == session.key
    with pytest.raises(ConfigError, match="another token"):
        await join(url, "", TOKEN, session.id)
    rank = await join(url, "", session.key, session.id)
    await session.connected.wait()
    again = await join(url, "", session.key, session.id)
    await again.until_closed()
    machines.end(session)
    session.channels[0].close()
    await rank.until_closed()
    await first.until_closed()


# --- how many are needed ---


async def test_gather_names_missing_machines_and_takes_fewer_in_time(trainer: Trainer, join: Join) -> None:
    machines, url = trainer
    waits, spec = Waits(), TrainerSpec(data_parallel=4, nodes=2, min_nodes=1)
    both = JobMachines(machines, spec, waits, device="cpu", shrink_after_s=3600.0)
    gathering = asyncio.create_task(both.gather())
    await eventually(lambda: [wait.subject for wait in waits.current()] == ["2 of 2 trainer machines"])
    await join(url, "b")
    await eventually(lambda: [wait.subject for wait in waits.current()] == ["1 of 2 trainer machines"])
    one = JobMachines(machines, spec, waits, device="cpu", shrink_after_s=0.0)
    await one.gather()
    assert (one.layout.data, one.layout.n_ranks) == (2, 2)
    await join(url, "a")
    await gathering
    assert (both.layout.data, both.local_rank(3)) == (4, 1)


# --- training ---


def learn(policy: PolicyEngine) -> list[float]:
    sums = policy.accumulate(BATCHES, LOSS)
    return [sums["divisor"], policy.step(1e-3)]


def values(policy: PolicyEngine) -> np.ndarray:
    return np.concatenate([np.frombuffer(bytes(shard.data), F32) for shard in policy.export_shards()])


@pytest.mark.long
async def test_ranks_on_two_machines_survive_a_killed_agent(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "tls")
    certificate = ServerCertificate(str(files.certificate), str(files.key))
    model, checkpoint = rank_policies.write(tmp_path / "model", "qwen3"), tmp_path / "checkpoint"
    checkpoint.mkdir()
    one = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, temperature=TEMPERATURE), device="cpu")
    one.load_hf(model)
    expected = [learn(one) for _ in range(2)]
    async with trainer_machines(certificate=certificate) as (machines, url):
        agents = {name: MachineProcess(url, name, tmp_path / f"{name}.log", **files.client) for name in ("a", "b")}
        try:
            async with policy_on(machines, OPTIMIZER, FSDP, shrink_after_s=600.0) as policy:
                await asyncio.to_thread(policy.load_hf, model)
                assert await asyncio.to_thread(learn, policy) == pytest.approx(expected[0], rel=1e-4)
                await asyncio.to_thread(lambda: policy.snapshot()(checkpoint))
                agents["b"].stop(signal.SIGKILL)
                with pytest.raises(Retryable, match=r"lost with machine b \(127\.0\.0\.1\) during|have ended"):
                    await asyncio.to_thread(lambda: [learn(policy) for _ in range(1000)])
            # The other machine has killed its rank and joins again.
            await eventually(lambda: [machine.name for machine in machines.idle] == ["a"])
            async with policy_on(machines, OPTIMIZER, FSDP) as policy:
                await asyncio.to_thread(policy.load_hf, model)
                await asyncio.to_thread(policy.load, checkpoint)
                assert await asyncio.to_thread(learn, policy) == pytest.approx(expected[1], rel=1e-4)
                np.testing.assert_allclose(await asyncio.to_thread(values, policy), values(one), rtol=0, atol=1e-4)
            assert await asyncio.to_thread(agents["a"].stop) == 0
        finally:
            for agent in agents.values():
                agent.stop(signal.SIGKILL)


def test_job_on_several_machines_is_refused_on_a_device_of_several_trainers() -> None:
    config = Settings(shared_device="gpu")
    with pytest.raises(ConfigError, match=r"trainer.nodes is 2, but this trainer shares its device gpu .* set .* to 1"):
        build._machines(config, Waits(), None, TrainerSpec(data_parallel=2, nodes=2))
    assert build._machines(config, Waits(), None, TrainerSpec(data_parallel=2)) is None
