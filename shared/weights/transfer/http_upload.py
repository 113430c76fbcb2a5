"""Uploads blobs over HTTP in threads: bytes go from the caller's memory into the socket, not through the event loop."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping
from contextlib import suppress

from rlboost.shared.weights.transfer.http_download import (
    MAX_ERROR_BYTES,
    BadStatus,
    BlobDownloader,
    Exchange,
    transfer_errors,
)

_BLOCK_BYTES = 256 << 10
"""Sent within one timeout."""


class BlobTransfer(BlobDownloader):
    """A `BlobDownloader` that also uploads, on the same connections."""

    async def upload(self, url: str, authorization: str, data: memoryview) -> None:
        """Send a blob. After a cancelled upload a thread may still read `data` for a moment.

        Raises:
            BadStatus: the server rejected the blob.
            DownloadFailed: the server did not answer, or the transfer broke off.

        """
        upload = _Upload(data)
        work = self._threads.submit(self._send, upload, url, {"Authorization": authorization})
        try:
            await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            upload.abort()
            raise

    def _send(self, upload: _Upload, url: str, headers: Mapping[str, str]) -> None:
        with transfer_errors(url):
            connection, response = self._open(upload, url, headers)
            try:
                body = response.read(MAX_ERROR_BYTES)
            finally:
                self._give_back(url, connection, response)
        if not 200 <= response.status < 300:
            raise BadStatus(response.status, body, redirected=False)


class _Upload(Exchange):
    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data

    def request(self, connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]) -> None:
        connection.putrequest("PUT", target)
        for name, value in {**headers, "Content-Length": str(len(self._data))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        # A server that rejects the request may close the connection after its response.
        with suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(self._data), _BLOCK_BYTES):
                connection.send(self._data[start : start + _BLOCK_BYTES])
