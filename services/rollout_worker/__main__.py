"""Run a rollout worker: `python -m rlboost.services.rollout_worker --help`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path

import structlog

from rlboost.services.rollout_worker.adapters.machine import MemoryProbe, listen_address, peer_url
from rlboost.services.rollout_worker.adapters.manager_http import fetch_tokenizer, join
from rlboost.services.rollout_worker.adapters.model_folder import ModelFolderSeeder
from rlboost.services.rollout_worker.adapters.preemption import Aws, Azure, Google, Metadata, NoticeFile, site_of
from rlboost.services.rollout_worker.adapters.serving_metrics import ServingMetrics
from rlboost.services.rollout_worker.adapters.tokenizer import decoder
from rlboost.services.rollout_worker.adapters.torch.factory import TorchFactory
from rlboost.services.rollout_worker.adapters.vllm.factory import VllmFactory, is_quantized
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions
from rlboost.services.rollout_worker.app import WorkerApp, WorkerOptions
from rlboost.services.rollout_worker.domain.borrowing import Borrowing
from rlboost.services.rollout_worker.domain.parity_check import Precision
from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.life import (
    PreemptionWatch,
    ServingWatch,
    StartupTimer,
    Watchdog,
    check_serving,
    process_age_s,
)
from rlboost.services.rollout_worker.manager_connection import ManagerConnection, WorkerIdentity
from rlboost.services.rollout_worker.ports import EngineFactory, Membership, NoticeSource
from rlboost.services.rollout_worker.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.lifecycle import Loop, run_service
from rlboost.shared.process.system import bind_to_cpus, run_in_thread
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.access import IssuedAccess
from rlboost.shared.weights.cache import Cache, open_cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.peers.directory import PeerDirectory
from rlboost.shared.weights.peers.source import PeerSource, PeerTransport
from rlboost.shared.weights.puller import DirectorySource, Puller, StoreSource, StoreWeights

log = structlog.get_logger(__name__)

_TRANSFERS = 8
"""Blobs pulled concurrently."""


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Build one worker and run it until the stop."""
    startup = StartupTimer(process_age_s())
    startup.end("import")
    bind_to_cpus(settings.cpus)
    token, name = settings.token.get_secret_value(), settings.worker_name
    serving = ServingMetrics(settings.beside_url) if settings.beside_url else None
    if serving is not None:
        await check_serving(serving)
    metadata = Metadata(settings.metadata_url)
    if site := await site_of(settings.site, metadata):
        log.info("pulls_by_site", site=site)
    first = await join(settings.url, token, name, settings.role)
    waits = Waits()
    access = IssuedAccess(first.store_credential, first.manifest_key)
    store = StoreClient(first.weight_store_url, access)
    cache = open_cache(_cache_dir(settings), name)
    transport = PeerTransport(first.peer_key)
    directory = PeerDirectory(first.bus, first.worker, socket.gethostname(), site)
    peers = PeerSource(
        directory, transport, StoreSource(store, cache, concurrency=_TRANSFERS), cache, concurrency=_TRANSFERS
    )
    seeder = ModelFolderSeeder(settings.base_model) if settings.base_model else None
    puller = Puller(store, cache, waits, source=DirectorySource(store, cache, peers), seeder=seeder)
    generator = Generator(
        _engines(settings),
        precision=_precision(settings),
        tolerance=settings.parity_tolerance,
        suspects=VllmOptions(settings.slots, vllm_args=settings.vllm_args).suspects,
        decoder=decoder,
    )
    identity = WorkerIdentity(
        role=settings.role,
        kind=settings.worker_kind,
        slots=settings.slots,
        price_per_hour=settings.price_per_hour,
        host=socket.gethostname(),
        pid=os.getpid(),
        trainer=settings.trainer,
        startup_s=process_age_s(),
    )

    async def join_again() -> Membership:
        membership = await join(settings.url, token, name, settings.role, again=True)
        directory.use(membership.bus, membership.worker)
        access.credential = membership.store_credential
        return membership

    weights = StoreWeights(puller, store, access, partial(fetch_tokenizer, settings.url, token))
    memory = MemoryProbe(settings.device)
    connection = ManagerConnection(first, join_again, generator, identity, settings.lease_s, waits, memory)
    options = WorkerOptions(
        settings.flush_interval_s,
        settings.heartbeat_interval_s,
        settings.grace_s,
        drain_on_rebalance=settings.rebalance == "drain",
    )
    worker = WorkerApp(stop, connection, generator, weights, options, waits, startup)
    try:
        serve = _http(settings, connection, generator, worker, waits, cache, peers, first.peer_key)
        watch = _preemption_watch(settings, metadata, worker)
        progress = Watchdog(generator, settings.stall_limit_s)
        loops = {"http": serve, "peers": peers.announce, "notices": watch.run, "progress": progress.run}
        if serving is not None:
            borrowing = Borrowing(settings.beside_max_running, settings.beside_ttft_ms / 1e3)
            loops["serving"] = ServingWatch(serving, borrowing, worker, connection.report_serving_trouble).run
        await worker.run(loops)
    finally:
        await metadata.close()
        if serving is not None:
            await serving.close()
        puller.close()
        await transport.close()
        await store.close()
        await connection.incarnation.bus.close()


def _cache_dir(settings: Settings) -> Path:
    """Return the cache's folder.

    Raises:
        ConfigError: it is below the home folder of a user who has none, as in containers with a random user id.

    """
    try:
        return settings.cache_dir.expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the home folder of user {os.getuid()} is unknown, and {settings.cache_dir} is below it: set "
            "RLBOOST_WORKER_CACHE_DIR to a folder on a disk with space, or HOME"
        ) from error


def _engines(settings: Settings) -> EngineFactory:
    if settings.engine == "torch":
        if settings.tensor_parallel > 1:
            raise ConfigError(
                f"tensor_parallel {settings.tensor_parallel} needs the vllm engine: set RLBOOST_WORKER_ENGINE to vllm"
            )
        if settings.vllm_args:
            raise ConfigError("vllm_args needs the vllm engine: set RLBOOST_WORKER_ENGINE to vllm, or remove it")
        return TorchFactory(
            slots=settings.slots,
            device=settings.device,
            dtype=settings.dtype,
            kv_cache_bytes=settings.kv_cache_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            speculation=settings.speculation == "auto",
            max_adapters=settings.held_adapters,
            max_adapter_rank=settings.max_adapter_rank,
        )
    if settings.speculation == "off" and (settings.vllm_args.keys() & {"speculative_config", "spec_method"}):
        raise ConfigError("speculation is off, and vllm_args has speculative decoding: remove one of them")
    return VllmFactory(
        VllmOptions(
            slots=settings.slots,
            device=settings.device,
            dtype=settings.dtype,
            kv_cache_bytes=settings.kv_cache_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel=settings.tensor_parallel,
            enable_sleep=settings.role == "reserved" or bool(settings.beside_url),
            pack_weights=settings.pack_weights,
            max_adapters=settings.held_adapters,
            max_adapter_rank=settings.max_adapter_rank,
            vllm_args=settings.vllm_args,
        )
    )


def _precision(settings: Settings) -> Precision:
    return "quantized" if is_quantized(settings.vllm_args, settings.dtype) else settings.dtype


def _preemption_watch(settings: Settings, metadata: Metadata, worker: WorkerApp) -> PreemptionWatch:
    clouds: list[NoticeSource] = [Aws(metadata), Google(metadata), Azure(metadata)]
    sources = [cloud for cloud in clouds if cloud.name == settings.notices]
    if settings.notice_file is not None:
        sources.append(NoticeFile(settings.notice_file))
    return PreemptionWatch(sources, clouds if settings.notices == "auto" else [], worker)


def _http(
    settings: Settings,
    connection: ManagerConnection,
    generator: Generator,
    worker: WorkerApp,
    waits: Waits,
    cache: Cache,
    peers: PeerSource,
    peer_key: str,
) -> Loop:
    def serve() -> Loop:
        # The web framework is imported while the other loops run, so that the worker joins sooner.
        from prometheus_client import Counter  # noqa: PLC0415 - see above

        from rlboost.services.rollout_worker.api import create, notice_routes  # noqa: PLC0415 - see above
        from rlboost.shared.http.access import metrics_path  # noqa: PLC0415 - see above
        from rlboost.shared.http.guard import Guard  # noqa: PLC0415 - see above
        from rlboost.shared.http.server import bind, server_loop  # noqa: PLC0415 - see above
        from rlboost.shared.weights.peers.blob_routes import MAX_CONCURRENT, blob_routes, blob_transfers  # noqa: PLC0415 - see above

        host = listen_address(settings.host, settings.url)
        sock = bind(host, settings.port)
        port = sock.getsockname()[1]
        certificate = settings.certificate
        peers.url = peer_url(settings.peer_url, host, port, settings.url, tls=certificate is not None)
        log.info("listening", host=host, port=port, peer_url=peers.url)
        token, slots = settings.token.get_secret_value(), asyncio.Semaphore(MAX_CONCURRENT)
        guard = Guard.of_token(token)
        app = create(connection, generator, guard=guard, waits=waits, metrics_path=metrics_path(peer_key))
        app.include_router(notice_routes(worker.on_preemption_notice, guard))
        sent = Counter("rlboost_worker_weights_sent_bytes", "Bytes of weights sent to other workers.")
        app.include_router(blob_routes(cache, peer_key, sent, slots))
        return server_loop(app, sock, certificate, transfers=blob_transfers(cache, peer_key, sent, slots))

    async def loop(stop: asyncio.Event) -> None:
        await (await run_in_thread("http-imports", serve))(stop)

    return loop


if __name__ == "__main__":
    code = run_service("rollout_worker", Settings, main)
    sys.stderr.flush()
    # Not sys.exit, which waits for threads: one may be importing a library or loading weights, which cannot be
    # interrupted. The worker has handed off everything by now.
    os._exit(code)
