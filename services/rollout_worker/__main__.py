"""Run a rollout worker: `python -m services.rollout_worker --help`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import structlog

from services.rollout_worker.adapters.manager_http import join
from services.rollout_worker.adapters.store_weights import StoreWeights
from services.rollout_worker.adapters.torch_factory import TorchFactory
from services.rollout_worker.app import Pace, Worker
from services.rollout_worker.generator import Generator, in_thread
from services.rollout_worker.link import Identity, Link
from services.rollout_worker.settings import Settings
from shared.lifecycle import Loop, run_service
from shared.redis_bus import connect
from shared.waiting import Waits
from shared.weights.client import StoreClient
from shared.weights.puller import Puller

log = structlog.get_logger(__name__)


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Compose one worker and run it until the stop."""
    token = settings.token.get_secret_value()
    joined = await join(settings.url, token)
    bus = await connect(joined.redis_url, f"worker-{settings.worker_name}")
    waits = Waits()
    store = StoreClient(joined.weight_store_url, token)
    puller = Puller(store, settings.cache_dir.expanduser() / settings.worker_name, waits)
    generator = Generator(TorchFactory(slots=settings.slots, device=settings.device, dtype=settings.dtype))
    identity = Identity(
        name=settings.worker_name,
        role=settings.role,
        kind=settings.worker_kind,
        slots=settings.slots,
        price_per_hour=settings.price_per_hour,
        host=socket.gethostname(),
        pid=os.getpid(),
        trainer=settings.trainer,
    )
    link = Link(bus, generator, identity, settings.lease_s, waits)
    pace = Pace(settings.flush_interval_s, settings.beat_interval_s, settings.grace_s)
    worker = Worker(bus, link, generator, StoreWeights(puller), pace, waits)
    try:
        await worker.run(stop, {"http": _http(settings, link, generator, waits)})
    finally:
        puller.close()
        await store.close()
        await bus.close()


def _http(settings: Settings, link: Link, generator: Generator, waits: Waits) -> Loop:
    def serve() -> Loop:
        # The web framework is imported beside the loops that run already: a worker joins the sooner.
        from services.rollout_worker.api import create  # noqa: PLC0415
        from shared.http import bind, server_loop  # noqa: PLC0415

        sock = bind(settings.host, settings.port)
        log.info("listening", host=settings.host, port=sock.getsockname()[1])
        return server_loop(create(link, generator, token=settings.token.get_secret_value(), waits=waits), sock)

    async def loop(stop: asyncio.Event) -> None:
        await (await in_thread("http-imports", serve))(stop)

    return loop


if __name__ == "__main__":
    code = run_service("rollout_worker", Settings, main)
    sys.stderr.flush()
    # Not sys.exit: a thread may be importing a library or loading weights, which nothing can interrupt, and by now all
    # that this process owes anybody is done.
    os._exit(code)
