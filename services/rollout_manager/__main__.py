"""`python -m rlboost.services.rollout_manager`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import socket
import sys
from functools import partial

import structlog

from rlboost.services.rollout_manager.access import RedisWorkerUsers, WorkerIdentities
from rlboost.services.rollout_manager.adapters.aws import Aws
from rlboost.services.rollout_manager.adapters.model_folders import ModelFolders
from rlboost.services.rollout_manager.adapters.prometheus import WorldCollector
from rlboost.services.rollout_manager.adapters.providers import Kubernetes, ShellCommand
from rlboost.services.rollout_manager.adapters.text import TextProcesses, load_model_files
from rlboost.services.rollout_manager.api.jobs import add_page, build, control
from rlboost.services.rollout_manager.fleet_loops import FleetScaler, StoreCredentials
from rlboost.services.rollout_manager.leadership import LeaderConnection, manager_record
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.ports import FleetProvider
from rlboost.services.rollout_manager.serving.routes import add_openai_routes, error_format
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.http import server
from rlboost.shared.process.lifecycle import run_service, supervise
from rlboost.shared.process.system import collect_garbage_rarely
from rlboost.shared.redis.bus import RedisBus, connect
from rlboost.shared.redis.durability import CLUSTER, durability, refusal
from rlboost.shared.streams.job_logs import log_sender

log = structlog.get_logger(__name__)


async def main(config: Settings, stop: asyncio.Event) -> None:
    """Run the manager until the stop."""
    certificate, prices = config.certificate, config.prices
    sock = server.bind(config.host, config.port)
    bus = await connect(config.redis_url, "rollout_manager")
    await _check_durability(bus, config)
    # Clients have connections of their own: however many there are, the manager's loop gets one.
    clients_bus = await connect(config.redis_url, "rollout_manager_api")
    host, port = sock.getsockname()[:2]
    record = manager_record(host, port, socket.gethostname(), config.public_url, tls=certificate is not None)
    identities = WorkerIdentities(bus, await _worker_users(bus, config))
    leader = LeaderConnection()
    manager = Manager(
        bus,
        lease_s=config.lease_s,
        redis_limit_s=config.redis_limit_s,
        record=record.signed(config.token.get_secret_value()),
        leader_lease_s=config.leader_lease_s,
        identities=identities,
        leader_watch=leader,
        prices=prices,
        stall_limit_s=config.stall_limit_s,
        stop_trainer=partial(control, action="cancel", token=config.token.get_secret_value()),
    )
    WorldCollector(lambda: manager.leads, lambda: manager.world).register()
    providers = _providers(config)
    scaler = FleetScaler(manager, clients_bus, config, providers)
    credentials = StoreCredentials(manager, config.token.get_secret_value())
    text = TextProcesses()
    folders = ModelFolders()
    routes = partial(add_openai_routes, find_model_folder=folders, load_model_files=load_model_files, text=text)
    app = build(manager, clients_bus, config, [routes], error_format, scaler, folders)
    add_page(app)
    collect_garbage_rarely()
    try:
        http = server.server_loop(app, sock, certificate)
        logs = log_sender(clients_bus, "manager", lambda: [job.id for job in manager.world.jobs.active()])
        loops = {"manage": manager.run, "credentials": credentials.run, "http": http, "logs": logs}
        await supervise(loops | {"scale": scaler.run_decisions, "provider": scaler.run_requests}, stop)
    finally:
        await text.close()
        for provider in providers.values():
            await provider.close()
        await leader.close()
        await clients_bus.close()
        await bus.close()


async def _check_durability(bus: RedisBus, config: Settings) -> None:
    """Check that Redis keeps what it acknowledges.

    Raises:
        ConfigError: it does not, and the setting does not accept that.

    """
    found = await durability(bus)
    if found.is_cluster:
        raise ConfigError(f"Redis at {bus.address}: {CLUSTER}")
    if found.losses and config.redis_durability == "required":
        raise ConfigError(refusal(found.losses, bus.address))
    for text in (*found.losses, *found.warnings):
        log.warning("redis_not_durable", reason=text)


def _providers(config: Settings) -> dict[str, FleetProvider]:
    """Return what starts the workers of each kind."""
    found: dict[str, FleetProvider] = {}
    machines = {pool.kind: pool.aws for pool in config.pools if pool.aws and config.provider_of(pool) == "aws"}
    aws = Aws(machines, config.aws_system, config.aws_user_data) if machines else None
    for pool in config.pools:
        match config.provider_of(pool):
            case "command":
                found[pool.kind] = ShellCommand(pool.command or config.provider_command)
            case "kubernetes":
                found[pool.kind] = Kubernetes.of_pod(config.kubernetes_namespace)
            case "aws" if aws is not None:
                found[pool.kind] = aws
            case _:
                pass
    return found


async def _worker_users(bus: RedisBus, config: Settings) -> RedisWorkerUsers | None:
    if config.worker_redis_users == "off":
        log.warning("worker_redis_users_off", reason="every worker gets the manager's Redis URL: trust all workers")
        return None
    users = RedisWorkerUsers(bus)
    await users.check()
    return users


if __name__ == "__main__":
    sys.exit(run_service("rollout_manager", Settings, main))
