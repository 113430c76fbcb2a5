"""`python -m services.rollout_manager`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import socket
import sys

from prometheus_client import REGISTRY

from services.rollout_manager.api import build
from services.rollout_manager.app import Manager
from services.rollout_manager.leadership import manager_at
from services.rollout_manager.metrics import WorldCollector
from services.rollout_manager.settings import Settings
from shared import http
from shared.lifecycle import run_service, supervise
from shared.redis_bus import connect


async def main(config: Settings, stop: asyncio.Event) -> None:
    """Run the manager until the stop."""
    sock = http.bind(config.host, config.port)
    bus = await connect(config.redis_url, "rollout_manager")
    host, port = sock.getsockname()[:2]
    manager = Manager(
        bus,
        lease_s=config.lease_s,
        redis_limit_s=config.redis_limit_s,
        me=manager_at(host, port, socket.gethostname(), config.public_url).signed(config.token.get_secret_value()),
        leader_lease_s=config.leader_lease_s,
    )
    REGISTRY.register(WorldCollector(manager))
    try:
        await supervise({"manage": manager.run, "http": http.server_loop(build(manager, bus, config), sock)}, stop)
    finally:
        await bus.close()


if __name__ == "__main__":
    sys.exit(run_service("rollout_manager", Settings, main))
