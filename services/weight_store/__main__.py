"""`python -m rlboost.services.weight_store`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import sys
import time

import structlog
from prometheus_client import REGISTRY

from rlboost.services.weight_store.adapters.origin import open_origin
from rlboost.services.weight_store.api import create
from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.deltas import Deltas
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.settings import Settings
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import bind, server_loop
from rlboost.shared.http.store_credential import store_authenticator
from rlboost.shared.lifecycle import run_service, supervise
from rlboost.shared.redis.bus import connect
from rlboost.shared.waiting import Waits

NAME = "weight_store"


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Compose the service and run it until the stop."""
    sock = bind(settings.host, settings.port)
    bus = await connect(settings.redis_url, NAME)
    waits, metrics = Waits(), Metrics(REGISTRY)
    try:
        async with open_origin(
            settings.origin,
            settings.dir,
            waits,
            lease_s=settings.lease_s,
            redirect=settings.redirect,
            clock=time.time,
        ) as origin:
            chunks, documents = origin.chunks, origin.documents
            deltas = Deltas(chunks, documents, metrics, keep=settings.keep_deltas, clock=time.time)
            store = WeightStore(
                chunks, documents, deltas, bus, waits, metrics, keep_versions=settings.keep_versions, clock=time.time
            )
            await store.load()
            guard = Guard(store_authenticator(settings.token.get_secret_value(), time.time))
            app = create(store, guard=guard, ready=origin.not_ready_reason, waits=waits, metrics=metrics)
            structlog.get_logger(__name__).info("serving", host=settings.host, port=sock.getsockname()[1])
            loops = {
                **origin.loops,
                "http": server_loop(app, sock),
                "announce": store.announce,
                "collect": store.collect,
                "compose": deltas.compose,
            }
            await supervise(loops, stop)
    finally:
        await bus.close()


if __name__ == "__main__":
    sys.exit(run_service(NAME, Settings, main))
