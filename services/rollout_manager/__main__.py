"""`python -m rlboost.services.rollout_manager`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import socket
import sys
from functools import partial

import structlog

from rlboost.services.rollout_manager.access.identities import WorkerIdentities
from rlboost.services.rollout_manager.adapters.kubernetes import Kubernetes
from rlboost.services.rollout_manager.adapters.leader_connection import LeaderConnection
from rlboost.services.rollout_manager.adapters.model_files import load_model_files
from rlboost.services.rollout_manager.adapters.prometheus import WorldCollector
from rlboost.services.rollout_manager.adapters.redis_users import RedisWorkerUsers
from rlboost.services.rollout_manager.adapters.shell_command import ShellCommand
from rlboost.services.rollout_manager.api import build
from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.fleet_scaler import FleetScaler
from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.openai.errors import openai_error_format
from rlboost.services.rollout_manager.openai.routes import add_openai_routes
from rlboost.services.rollout_manager.page.routes import add_page
from rlboost.services.rollout_manager.ports import FleetProvider
from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_manager.store_credentials import StoreCredentials
from rlboost.shared.http import server
from rlboost.shared.process.garbage_collection import collect_garbage_rarely
from rlboost.shared.process.lifecycle import run_service, supervise
from rlboost.shared.redis.bus import RedisBus, connect
from rlboost.shared.streams.job_logs import log_sender

log = structlog.get_logger(__name__)


async def main(config: Settings, stop: asyncio.Event) -> None:
    """Run the manager until the stop."""
    collect_garbage_rarely()
    certificate, prices = config.certificate, config.prices
    sock = server.bind(config.host, config.port)
    bus = await connect(config.redis_url, "rollout_manager")
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
    )
    WorldCollector(manager).register()
    provider = _provider(config)
    scaler = FleetScaler(manager, clients_bus, config, provider)
    credentials = StoreCredentials(manager, config.token.get_secret_value())
    routes = partial(add_openai_routes, load_model_files=load_model_files)
    app = build(manager, clients_bus, config, [routes], openai_error_format, scaler)
    add_page(app)
    try:
        http = server.server_loop(app, sock, certificate)
        logs = log_sender(clients_bus, "manager", lambda: [job.id for job in manager.world.jobs.active()])
        loops = {"manage": manager.run, "credentials": credentials.run, "http": http, "logs": logs}
        await supervise(loops | {"scale": scaler.run_decisions, "provider": scaler.run_requests}, stop)
    finally:
        if provider is not None:
            await provider.close()
        await leader.close()
        await clients_bus.close()
        await bus.close()


def _provider(config: Settings) -> FleetProvider | None:
    match config.provider:
        case "command":
            return ShellCommand(config.provider_command)
        case "kubernetes":
            return Kubernetes.of_pod(config.kubernetes_namespace)
        case "none":
            return None


async def _worker_users(bus: RedisBus, config: Settings) -> RedisWorkerUsers | None:
    if config.worker_redis_users == "off":
        log.warning("worker_redis_users_off", reason="every worker gets the manager's Redis URL: trust all workers")
        return None
    users = RedisWorkerUsers(bus)
    await users.check()
    return users


if __name__ == "__main__":
    sys.exit(run_service("rollout_manager", Settings, main))
