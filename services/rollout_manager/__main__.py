"""`python -m rlboost.services.rollout_manager`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import socket
import sys
from functools import partial

from rlboost.services.rollout_manager.adapters.leader_connection import LeaderConnection
from rlboost.services.rollout_manager.adapters.model_files import load_model_files
from rlboost.services.rollout_manager.adapters.prometheus import WorldCollector
from rlboost.services.rollout_manager.api import build
from rlboost.services.rollout_manager.app import Manager
from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.openai.errors import openai_error_format
from rlboost.services.rollout_manager.openai.routes import add_openai_routes
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.http import server
from rlboost.shared.lifecycle import run_service, supervise
from rlboost.shared.redis.bus import connect


async def main(config: Settings, stop: asyncio.Event) -> None:
    """Run the manager until the stop."""
    sock = server.bind(config.host, config.port)
    bus = await connect(config.redis_url, "rollout_manager")
    # Clients have connections of their own: however many there are, the manager's loop gets one.
    clients_bus = await connect(config.redis_url, "rollout_manager_api")
    host, port = sock.getsockname()[:2]
    record = manager_record(host, port, socket.gethostname(), config.public_url)
    leader = LeaderConnection()
    manager = Manager(
        bus,
        lease_s=config.lease_s,
        redis_limit_s=config.redis_limit_s,
        record=record.signed(config.token.get_secret_value()),
        leader_lease_s=config.leader_lease_s,
        leader_watch=leader,
    )
    WorldCollector(manager).register()
    routes = partial(add_openai_routes, load_model_files=load_model_files)
    app = build(manager, clients_bus, config, extensions=[routes], error_format_besides=openai_error_format)
    try:
        await supervise({"manage": manager.run, "http": server.server_loop(app, sock)}, stop)
    finally:
        await leader.close()
        await clients_bus.close()
        await bus.close()


if __name__ == "__main__":
    sys.exit(run_service("rollout_manager", Settings, main))
