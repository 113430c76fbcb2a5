"""`python -m services.weight_store`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import sys
import time

import structlog
from prometheus_client import REGISTRY

from services.weight_store.adapters.disk import Directory, DiskChunks, DiskDocuments
from services.weight_store.api import create
from services.weight_store.app import WeightStore
from services.weight_store.deltas import Deltas
from services.weight_store.metrics import Metrics
from services.weight_store.settings import Settings
from shared.http import bind, server_loop
from shared.lifecycle import run_service, supervise
from shared.redis_bus import connect
from shared.waiting import Waits

NAME = "weight_store"


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Compose the service and run it until the stop."""
    sock = bind(settings.host, settings.port)
    directory = Directory(settings.dir)
    bus = await connect(settings.redis_url, NAME)
    try:
        waits, metrics = Waits(), Metrics(REGISTRY)
        chunks, documents = DiskChunks(directory), DiskDocuments(directory)
        deltas = Deltas(chunks, documents, metrics, keep=settings.keep_deltas, clock=time.time)
        store = WeightStore(
            chunks, documents, deltas, bus, waits, metrics, keep_versions=settings.keep_versions, clock=time.time
        )
        await store.load()
        token = settings.token.get_secret_value()
        app = create(store, chunk_file=chunks.path, token=token, waits=waits, metrics=metrics)
        structlog.get_logger(__name__).info("serving", host=settings.host, port=sock.getsockname()[1])
        loops = {
            "http": server_loop(app, sock),
            "announce": store.announce,
            "collect": store.collect,
            "compose": deltas.compose,
        }
        await supervise(loops, stop)
    finally:
        await bus.close()
        directory.close()


if __name__ == "__main__":
    sys.exit(run_service(NAME, Settings, main))
