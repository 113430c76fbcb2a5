"""Run a rollout worker: `python -m rlboost.services.rollout_worker --help`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from rlboost.services.rollout_worker.commands import YIELD_LIMIT_S
from rlboost.services.rollout_worker.domain.borrowing import Borrowing, Seats
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
from rlboost.services.rollout_worker.ports import EngineFactory, EngineFailed, Membership, NoticeSource
from rlboost.services.rollout_worker.serving import SeatsWatch, ServingGenerator
from rlboost.services.rollout_worker.settings import Settings
from rlboost.shared.errors import ConfigError, RLBoostError, leaves
from rlboost.shared.process.lifecycle import Loop, run_service, supervise, until_stop
from rlboost.shared.process.system import bind_to_cpus, run_in_thread
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.access import IssuedAccess
from rlboost.shared.weights.cache import Cache, open_cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.peers.directory import PeerDirectory
from rlboost.shared.weights.peers.source import PeerSource, PeerTransport
from rlboost.shared.weights.puller import DirectorySource, Puller, StoreSource, StoreWeights

if TYPE_CHECKING:
    from prometheus_client import Counter

    from rlboost.services.rollout_worker.adapters.vllm.front import Front

log = structlog.get_logger(__name__)

_TRANSFERS = 8
"""Blobs pulled concurrently."""


_REJOIN_AFTER_S = 10.0
"""From a failure of a worker whose engine serves others, which goes on, until it joins again."""


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Build one worker and run it until the stop."""
    startup = StartupTimer(process_age_s())
    startup.end("import")
    bind_to_cpus(settings.cpus)
    if settings.serve:
        await _serve(settings, stop, startup)
    else:
        await _work(settings, startup, stop)


async def _serve(settings: Settings, stop: asyncio.Event, startup: StartupTimer) -> None:
    """Serve a model to others until the stop, and work next to that."""
    from rlboost.shared.http.server import bind, server_loop  # noqa: PLC0415 - the web framework takes long to import

    host, _, port = settings.serve.rpartition(":")
    sock = bind(host.strip("[]"), int(port), "RLBOOST_WORKER_SERVE or --serve")
    front = await run_in_thread("engine-build", VllmFactory(_vllm_options(settings)).serve)
    try:
        app = await front.app(settings.serve_args)
        log.info("serving", address=settings.serve, model=app.state.args.served_model_name)
        loops: dict[str, Loop] = {
            "serving": server_loop(app, sock, settings.certificate),
            "vllm": front.watch,
            "rollouts": partial(_keep_working, settings, startup, front),
        }
        await supervise(loops, stop, grace_s=settings.grace_s)
    finally:
        await run_in_thread("vllm-shutdown", front.llm.shutdown)


async def _keep_working(settings: Settings, startup: StartupTimer, front: Front, stop: asyncio.Event) -> None:
    """Work until the stop; a worker that fails, but for its engine, joins again, and a drained one does not."""
    n_joined = 0
    while not stop.is_set():
        ended = asyncio.Event()
        forward = asyncio.create_task(_set_after(stop, ended), name="forward-stop")
        try:
            await _work(settings, startup, ended, front)
            log.info("rollouts_ended", serving=not stop.is_set())
            await stop.wait()
        except Exception as error:
            causes = leaves(error)
            if any(isinstance(cause, EngineFailed) for cause in causes):
                raise
            if isinstance(causes[0], ConfigError) and not n_joined:
                raise
            is_expected = all(isinstance(cause, RLBoostError) for cause in causes)  # the text says what to do
            text = str(causes[0]) or repr(causes[0])
            log.exception("rollouts_failed", error=text, joins_again_in_s=_REJOIN_AFTER_S, exc_info=not is_expected)
            await until_stop(stop, _REJOIN_AFTER_S)
        finally:
            forward.cancel()
        n_joined += 1


async def _set_after(first: asyncio.Event, second: asyncio.Event) -> None:
    await first.wait()
    second.set()


async def _work(settings: Settings, startup: StartupTimer, stop: asyncio.Event, front: Front | None = None) -> None:
    """Join and work until the stop; `front` has the engine if that serves others."""
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
    generator = _generator(settings, front)
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
    behavior = WorkerOptions(
        settings.flush_interval_s,
        settings.heartbeat_interval_s,
        settings.grace_s,
        drain_on_rebalance=settings.rebalance == "drain",
    )
    worker = WorkerApp(stop, connection, generator, weights, behavior, waits, startup)
    try:
        serve = _http(settings, connection, generator, worker, waits, cache, peers, first.peer_key)
        watch = _preemption_watch(settings, metadata, worker)
        progress = Watchdog(generator, settings.stall_limit_s)
        loops = {"http": serve, "peers": peers.announce, "notices": watch.run, "progress": progress.run}
        if serving is not None:
            loops["serving"] = ServingWatch(
                serving,
                Borrowing(settings.beside_max_running, settings.beside_ttft_ms / 1e3),
                worker,
                connection.report_serving_trouble,
            ).run
        if front is not None:
            loops["seats"] = SeatsWatch(front.requests, Seats(settings.slots, settings.serve_ttft_ms / 1e3), worker).run
        await worker.run(loops)
    finally:
        if front is not None:
            await generator.close()
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


def _generator(settings: Settings, front: Front | None) -> Generator:
    options: dict[str, Any] = {
        "engines": _engines(settings),
        "precision": _precision(settings),
        "tolerance": settings.parity_tolerance,
        "suspects": VllmOptions(settings.slots, vllm_args=settings.vllm_args).suspects,
        "decoder": decoder,
    }
    # With a front, scores wait for the requests of others.
    if front is None:
        return Generator(**options)
    return ServingGenerator(front.engine(), front.differing, **options, parity_limit_s=YIELD_LIMIT_S)


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
    return VllmFactory(_vllm_options(settings))


def _vllm_options(settings: Settings) -> VllmOptions:
    if settings.speculation == "off" and (settings.vllm_args.keys() & {"speculative_config", "spec_method"}):
        raise ConfigError("speculation is off, and vllm_args has speculative decoding: remove one of them")
    return VllmOptions(
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
        served_model=str(settings.base_model) if settings.serve else "",
        vllm_args=settings.vllm_args,
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
    def serve() -> tuple[Loop, Callable[[], None]]:
        # The web framework is imported while the other loops run, so that the worker joins sooner.
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
        sent = _sent_bytes()
        app.include_router(blob_routes(cache, peer_key, sent, slots))
        transfers = blob_transfers(cache, peer_key, sent, slots)
        return server_loop(app, sock, certificate, transfers=transfers), app.state.end_metrics

    async def loop(stop: asyncio.Event) -> None:
        served, end_metrics = await run_in_thread("http-imports", serve)
        try:
            await served(stop)
        finally:
            end_metrics()

    return loop


@once
def _sent_bytes() -> Counter:
    from prometheus_client import Counter  # noqa: PLC0415 - imported after joining

    return Counter("rlboost_worker_weights_sent_bytes", "Bytes of weights sent to other workers.")


if __name__ == "__main__":
    code = run_service("rollout_worker", Settings, main)
    sys.stderr.flush()
    # Not sys.exit, which waits for threads: one may be importing a library or loading weights, which cannot be
    # interrupted. The worker has handed off everything by now.
    os._exit(code)
