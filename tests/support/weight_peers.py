"""Pullers that serve each other, each a process: `python -m tests.support.weight_peers --help`.

The processes are forked from one that has imported everything, so that many of them start at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter

from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import bind, create_app, server_loop
from rlboost.shared.process import logs
from rlboost.shared.process.lifecycle import supervise
from rlboost.shared.process.waiting import Waits
from rlboost.shared.redis.bus import connect
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.streams.names import WEIGHT_PEERS
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import digest_of
from rlboost.shared.weights.peers.blob_routes import MAX_CONCURRENT, blob_routes, blob_transfers
from rlboost.shared.weights.peers.directory import PeerDirectory
from rlboost.shared.weights.peers.source import PeerSource, PeerTransport
from rlboost.shared.weights.puller import Puller, StoreSource


async def peer(options: argparse.Namespace, name: str, stop: asyncio.Event) -> None:
    """Pull and serve until the stop; the digest of all tensors goes to `DIR/NAME.digest`."""
    directory = options.dir / name
    bus = await connect(options.redis, name)
    await bus.transact([HashSet(WEIGHT_PEERS, {name: ""})])  # as the manager does when a worker joins
    cache, transport = Cache(directory), PeerTransport(options.token)
    sock, waits = bind(options.host, 0), Waits()
    url = f"http://{options.host}:{sock.getsockname()[1]}"
    (options.dir / f"{name}.url").write_text(url)
    app: FastAPI = create_app(name, guard=Guard.of_token(options.token), not_ready_reason=lambda: None, waits=waits)
    sent, slots = Counter("sent", "bytes", registry=CollectorRegistry()), asyncio.Semaphore(MAX_CONCURRENT)
    app.include_router(blob_routes(cache, options.token, sent, slots))
    transfers = blob_transfers(cache, options.token, sent, slots)
    async with StoreClient(options.store, options.token) as client:
        store = StoreSource(client, cache, concurrency=8)
        store_only_bytes = sys.maxsize if options.alone else 0
        peer_source = PeerSource(
            PeerDirectory(bus, name, options.host, options.site),
            transport,
            store,
            cache,
            concurrency=8,
            store_only_bytes=store_only_bytes,
        )
        peer_source.url = url
        puller = Puller(client, cache, waits, source=peer_source, limit_s=300.0)

        async def pull(stop: asyncio.Event) -> None:
            pulled = await puller.pull(options.job, options.version)
            digests = await asyncio.to_thread(lambda: [digest_of(data) for _, data in pulled.tensors()])
            result = f"{digest_of(''.join(digests).encode())} {puller.last.from_store} {puller.last.from_peers}"
            (options.dir / f"{name}.new").write_text(result)
            (options.dir / f"{name}.new").rename(options.dir / f"{name}.digest")
            await stop.wait()

        await supervise(
            {"http": server_loop(app, sock, transfers=transfers), "announce": peer_source.announce, "pull": pull}, stop
        )
    await transport.close()
    await bus.close()


def run(options: argparse.Namespace, name: str) -> None:
    """Be one peer."""
    logs.configure(name, level="DEBUG", form="json")

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await peer(options, name, stop)

    asyncio.run(main())


def main() -> None:
    """Fork the peers, print their process ids, and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    for name in ["store", "redis", "token", "job"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address that they listen on")
    parser.add_argument("--site", default="", help="see RLBOOST_WORKER_SITE")
    parser.add_argument("--name", default="peer", help="begins their names")
    parser.add_argument("--alone", action="store_true", help="pull from the store alone")
    options = parser.parse_args()
    pids = []
    for number in range(options.peers):
        pid = os.fork()
        if pid == 0:
            try:
                run(options, f"{options.name}-{number}")
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - the process ends
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        pids.append(pid)
    print(*pids, flush=True)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
