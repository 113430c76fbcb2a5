"""Run a rollout worker: `python -m services.rollout_worker --help`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import structlog

from services.rollout_worker.adapters.base_model import BaseModel
from services.rollout_worker.adapters.manager_http import join
from services.rollout_worker.adapters.memory import MemoryProbe
from services.rollout_worker.adapters.metadata import Aws, Azure, Google, Metadata
from services.rollout_worker.adapters.notice_file import NoticeFile
from services.rollout_worker.adapters.peer_address import peer_url
from services.rollout_worker.adapters.store_weights import StoreWeights
from services.rollout_worker.adapters.torch_factory import TorchFactory
from services.rollout_worker.adapters.vllm_factory import VllmFactory
from services.rollout_worker.app import Pace, Worker
from services.rollout_worker.generator import Generator, in_thread
from services.rollout_worker.leaving import Leaving
from services.rollout_worker.link import Identity, Link
from services.rollout_worker.notices import Watch
from services.rollout_worker.ports import EngineFactory, NoticeSource
from services.rollout_worker.prefetching import Prefetching
from services.rollout_worker.settings import Settings
from services.rollout_worker.startup import Startup, process_age_s
from services.rollout_worker.watchdog import Watchdog
from shared.errors import ConfigError
from shared.ids import new_token
from shared.lifecycle import Loop, run_service
from shared.redis_bus import connect
from shared.waiting import Waits
from shared.weights.cache import Cache
from shared.weights.client import StoreClient
from shared.weights.following import DraftFollower
from shared.weights.peers.directory import Directory
from shared.weights.peers.swarm import Swarm
from shared.weights.peers.transport import PeerTransport
from shared.weights.puller import Puller
from shared.weights.source import StoreSource

_TRANSFERS = 8
"""Blobs that are pulled at a time."""

log = structlog.get_logger(__name__)


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Compose one worker and run it until the stop."""
    startup = Startup(process_age_s())
    startup.end("import")
    token = settings.token.get_secret_value()
    joined = await join(settings.url, token)
    bus = await connect(joined.redis_url, f"worker-{settings.worker_name}")
    waits = Waits()
    store = StoreClient(joined.weight_store_url, token)
    cache = Cache(settings.cache_dir.expanduser() / settings.worker_name)
    transport = PeerTransport(token)
    directory = Directory(bus, f"{settings.worker_name}-{new_token()}", socket.gethostname())
    swarm = Swarm(
        directory, transport, StoreSource(store, cache, concurrency=_TRANSFERS), cache, concurrency=_TRANSFERS
    )
    seed = BaseModel(settings.base_model) if settings.base_model else None
    puller = Puller(store, cache, waits, source=swarm, seed=seed)
    generator = Generator(_engines(settings), dtype=settings.dtype, tolerance=settings.canary_tolerance)
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
    link = Link(bus, generator, identity, settings.lease_s, waits, MemoryProbe(settings.device))
    pace = Pace(settings.flush_interval_s, settings.beat_interval_s, settings.grace_s)
    heeds = settings.rebalance == "drain"
    worker = Worker(bus, link, generator, StoreWeights(puller), pace, waits, heeds_advice=heeds, startup=startup)
    metadata = Metadata(settings.metadata_url)
    try:
        serve = _http(settings, link, generator, worker.leaving, waits, cache, swarm, puller)
        watch = _watch(settings, metadata, worker.leaving)
        progress = Watchdog(generator, settings.stall_limit_s)
        more = {"http": serve, "peers": swarm.announce, "notices": watch.run, "progress": progress.run}
        if settings.role == "reserved":
            # Its machine sleeps while the trainer publishes, beside it. A spot worker's link costs, and it has peers.
            more["prefetch"] = Prefetching(link, DraftFollower(store, puller)).run
        await worker.run(stop, more)
    finally:
        await metadata.close()
        puller.close()
        await transport.close()
        await store.close()
        await bus.close()


def _engines(settings: Settings) -> EngineFactory:
    if settings.engine == "torch":
        if settings.tensor_parallel > 1:
            raise ConfigError(f"tensor_parallel {settings.tensor_parallel} needs the vllm engine: set engine to vllm")
        return TorchFactory(
            slots=settings.slots,
            device=settings.device,
            dtype=settings.dtype,
            kv_cache_bytes=settings.kv_cache_bytes,
        )
    return VllmFactory(
        slots=settings.slots,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_bytes=settings.kv_cache_bytes,
        tensor_parallel=settings.tensor_parallel,
        sleeps=settings.role == "reserved",
    )


def _watch(settings: Settings, metadata: Metadata, leaver: Leaving) -> Watch:
    clouds: list[NoticeSource] = [Aws(metadata), Google(metadata), Azure(metadata)]
    sources = [cloud for cloud in clouds if cloud.name == settings.notices]
    if settings.notice_file is not None:
        sources.append(NoticeFile(settings.notice_file))
    return Watch(sources, clouds if settings.notices == "auto" else [], leaver)


def _http(
    settings: Settings,
    link: Link,
    generator: Generator,
    leaving: Leaving,
    waits: Waits,
    cache: Cache,
    swarm: Swarm,
    puller: Puller,
) -> Loop:
    def serve() -> Loop:
        # The web framework is imported beside the loops that run already: a worker joins the sooner.
        from prometheus_client import REGISTRY, Counter  # noqa: PLC0415

        from services.rollout_worker.api import Prefetched, create, notice_routes  # noqa: PLC0415
        from shared.http import bind, server_loop  # noqa: PLC0415
        from shared.weights.peers.serving import blob_routes  # noqa: PLC0415

        sock = bind(settings.host, settings.port)
        port = sock.getsockname()[1]
        swarm.url = peer_url(settings.peer_url, settings.host, port, settings.url)
        log.info("listening", host=settings.host, port=port, peer_url=swarm.url)
        app = create(link, generator, token=settings.token.get_secret_value(), waits=waits)
        REGISTRY.register(Prefetched(lambda: puller.prefetched_bytes))
        app.include_router(notice_routes(leaving.take_notice, settings.token.get_secret_value()))
        sent = Counter("rlboost_worker_weights_sent_bytes", "Bytes of weights sent to other workers.")
        app.include_router(blob_routes(cache, settings.token.get_secret_value(), sent))
        return server_loop(app, sock)

    async def loop(stop: asyncio.Event) -> None:
        await (await in_thread("http-imports", serve))(stop)

    return loop


if __name__ == "__main__":
    code = run_service("rollout_worker", Settings, main)
    sys.stderr.flush()
    # Not sys.exit: a thread may be importing a library or loading weights, which nothing can interrupt, and by now all
    # that this process owes anybody is done.
    os._exit(code)
