"""HTTP responses with a blob's file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fastapi.responses import FileResponse
from prometheus_client import Counter
from starlette.types import Message, Receive, Scope, Send

_READ_BYTES = 1 << 20
_PATH = re.compile(r"/v1/chunks/([0-9a-f]{64})")


def digest_in(path: str) -> str:
    """Return the digest of the blob at this path of a URL, an empty string if it is something else."""
    found = _PATH.fullmatch(path)
    return found[1] if found else ""


class BlobResponse(FileResponse):
    """A blob's file, or the requested range of it; counts the bytes sent."""

    chunk_size = _READ_BYTES

    def __init__(self, path: Path, status: os.stat_result, digest: str, sent: Counter) -> None:
        """Respond with the file `path`; `status` is its stat result."""
        super().__init__(
            path, stat_result=status, media_type="application/octet-stream", headers={"ETag": f'"{digest}"'}
        )
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""

        async def counted(message: Message) -> None:
            await send(message)
            self._sent.inc(len(message.get("body", b"")))

        await super().__call__(scope, receive, counted)
