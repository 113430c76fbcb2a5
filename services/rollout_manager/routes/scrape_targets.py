"""Where Prometheus finds the metrics of workers, in the format of its HTTP service discovery."""

from __future__ import annotations

import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from pydantic import BaseModel

from rlboost.shared.streams.bus import Bus
from rlboost.shared.weights.peers.directory import list_peers


class ScrapeTarget(BaseModel):
    """One worker."""

    targets: list[str]
    """Its host and port."""
    labels: dict[str, str]


async def scrape_targets(bus: Bus, workers: Collection[str], path: str) -> list[ScrapeTarget]:
    """Return the present workers that have an address which this machine can reach.

    Args:
        bus: has the addresses, as workers report them.
        workers: ids of the present workers.
        path: URL path of the workers' metrics, see `token_signature.metrics_path`.

    Raises:
        BusUnavailable: Redis does not answer.

    """
    here = socket.gethostname()
    peers = [peer for peer in await list_peers(bus) if peer.host == here or not peer.is_loopback]
    urls = {peer.name: urlsplit(peer.url) for peer in peers if peer.name in workers}
    return [
        ScrapeTarget(
            targets=[url.netloc], labels={"instance": name, "__scheme__": url.scheme, "__metrics_path__": path}
        )
        for name, url in urls.items()
    ]
