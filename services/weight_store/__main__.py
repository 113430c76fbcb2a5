"""`python -m rlboost.services.weight_store`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial

import structlog
from prometheus_client import REGISTRY

from rlboost.services.weight_store.adapters.origin import open_origin
from rlboost.services.weight_store.api import chunk_receiver, create, find_chunk
from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.chunks import DerivedChunks, LimitedChunks
from rlboost.services.weight_store.deltas import DeltaComposer, Deltas
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.settings import Settings
from rlboost.shared.http.access import may_download, may_upload, store_authenticator
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import bind, server_loop
from rlboost.shared.http.transfer_server import TransferServer
from rlboost.shared.process.lifecycle import run_service, supervise
from rlboost.shared.process.waiting import Waits
from rlboost.shared.redis.bus import connect
from rlboost.shared.streams.job_logs import log_sender
from rlboost.shared.streams.state_protocol import check_leader, leader_check
from rlboost.shared.weights.access import ManifestKey

NAME = "weight_store"


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Compose the service and run it until the stop."""
    sock = bind(settings.host, settings.port)
    bus = await connect(settings.redis_url, NAME)
    waits, metrics = Waits(), Metrics(REGISTRY)
    try:
        await check_leader(bus)
        async with open_origin(
            settings.origin,
            settings.dir,
            waits,
            lease_s=settings.lease_s,
            redirect=settings.redirect,
            clock=_clock,
        ) as origin:
            documents = origin.documents
            limited = LimitedChunks(origin.chunks, settings.max_bytes, time.monotonic) if settings.max_bytes else None
            chunks = DerivedChunks(limited or origin.chunks)
            deltas = Deltas(chunks, documents, metrics, keep=settings.keep_deltas, clock=_clock)
            composer = DeltaComposer(deltas, chunks, documents, metrics, clock=_clock)
            token = settings.token.get_secret_value()
            store = WeightStore(
                chunks,
                documents,
                deltas,
                bus,
                waits,
                metrics,
                sign=ManifestKey(token).sign,
                keep_versions=settings.keep_versions,
                clock=_clock,
            )
            await store.load()
            if limited is not None:
                await limited.measure()
                limited.reclaim = store.collector.tidy
            app = create(
                store,
                guard=Guard(store_authenticator(token, time.time)),
                directory=origin.directory,
                not_ready_reason=origin.not_ready_reason,
                waits=waits,
                metrics=metrics,
            )
            find = find_chunk(origin.open_chunk, partial(may_download, token=token, clock=time.time))
            uploads = chunk_receiver(store, metrics, partial(may_upload, token=token, clock=time.time))
            transfers = TransferServer(find, metrics.bytes_out, uploads=uploads)
            structlog.get_logger(__name__).info("serving", host=settings.host, port=sock.getsockname()[1])
            loops = {
                **origin.loops,
                "http": server_loop(app, sock, settings.certificate, transfers=transfers),
                "announce": store.announcements.announce,
                "collect": store.collector.collect,
                "compose": composer.compose,
                "protocol": leader_check(bus),
                "logs": log_sender(bus, NAME, list),
            }
            await supervise(loops, stop)
    finally:
        await bus.close()


def _clock() -> float:
    """Return Unix seconds with the resolution of the chunk store: a time read back from it compares equal."""
    return round(time.time(), 6)


if __name__ == "__main__":
    sys.exit(run_service(NAME, Settings, main))
