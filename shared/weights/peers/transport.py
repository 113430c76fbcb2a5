"""Fetch a blob from a peer over HTTP, with one error type for each way in which a peer can fail.

The URLs of peers come from Redis, so no peer is sent a credential: each request carries a proof that is valid for one
blob.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from rlboost.shared.errors import Corrupt
from rlboost.shared.http.token_signature import sign
from rlboost.shared.weights.transfer.download import Download
from rlboost.shared.weights.transfer.http_download import BadStatus, BlobDownloader, DownloadFailed, Unreachable

BUSY_STATUS = 503
_CONNECT_S = 2.0
_STALL_S = 5.0
"""Maximum time without a byte."""
_FAIR_S = 3.0
"""How long a transfer may take before its speed is checked."""
_SLOW = 1 / 8
"""A transfer below this fraction of the median speed is slow."""
_MAX_SPEEDS = 32


class PeerFailed(Exception):
    """The peer did not answer, or the transfer broke off."""


class PeerUnreachable(PeerFailed):
    """Nothing answers at the URL, or it is not a peer."""


class BlobNotHeld(PeerFailed):
    """The peer does not have the blob."""


class PeerBusy(PeerFailed):
    """The peer serves its maximum of concurrent transfers."""


class PeerSlow(PeerFailed):
    """The peer is much slower than the others."""


class DigestMismatch(PeerFailed):
    """The received bytes do not have the blob's digest or length."""


class PeerTransport:
    """Connections to peers."""

    def __init__(self, peer_key: str) -> None:
        """Connect lazily; see `token_signature.peer_key`."""
        self._peer_key = peer_key
        self._downloader = BlobDownloader(
            connect_s=_CONNECT_S, stall_s=_STALL_S, follow_redirects=False, use_proxies=False
        )
        self._speeds: deque[float] = deque(maxlen=_MAX_SPEEDS)
        """Bytes/s of the last completed transfers."""

    async def close(self) -> None:
        """Release connections."""
        self._downloader.close()

    async def fetch(self, url: str, download: Download, keep: Callable[[], bool]) -> bool:
        """Fetch a whole blob, call `keep`, which checks its digest, in the thread that received it; return its result.

        Raises:
            PeerFailed: or a subclass; `download` has the bytes received so far.

        """
        began, digest = time.monotonic(), download.blob.digest

        def check_speed() -> None:
            took = time.monotonic() - began
            if took > _FAIR_S and download.n_bytes < took * self._fair_speed():
                raise PeerSlow(f"{download.n_bytes / took:.0f} bytes/s")

        def received() -> bool:
            self._speeds.append(download.n_bytes / max(time.monotonic() - began, 1e-6))
            return keep()

        proof = f"Bearer {sign(self._peer_key, 'chunk', digest)}"
        try:
            return await self._downloader.download(
                f"{url}/v1/chunks/{digest}", proof, download, check_speed, keep=received
            )
        except Corrupt as error:
            raise DigestMismatch(str(error)) from error
        except Unreachable as error:
            raise PeerUnreachable(str(error)) from error
        except DownloadFailed as error:
            raise PeerFailed(str(error)) from error
        except BadStatus as error:
            raise _error(error.status, digest) from error

    def _fair_speed(self) -> float:
        speeds = tuple(self._speeds)
        return _SLOW * statistics.median(speeds) if speeds else 0.0


def _error(status: int, digest: str) -> PeerFailed:
    match status:
        case 404:
            return BlobNotHeld(digest)
        case _ if status == BUSY_STATUS:
            return PeerBusy(digest)
        case 401:
            return PeerUnreachable(
                "it refuses the proof of the peer key: it is of another system, or has another version of rlboost"
            )
        case _:
            return PeerUnreachable(f"status {status}")
