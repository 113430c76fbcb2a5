"""A blob's file as an answer of HTTP."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi.responses import FileResponse
from prometheus_client import Counter
from starlette.types import Message, Receive, Scope, Send

_READ_BYTES = 1 << 20


class BlobResponse(FileResponse):
    """A blob's file, or the range of it that was asked for; counts the bytes that leave."""

    chunk_size = _READ_BYTES

    def __init__(self, path: Path, status: os.stat_result, digest: str, sent: Counter) -> None:
        """Answer with the file `path`, whose state is `status`."""
        super().__init__(
            path, stat_result=status, media_type="application/octet-stream", headers={"ETag": f'"{digest}"'}
        )
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def counted(message: Message) -> None:
            await send(message)
            self._sent.inc(len(message.get("body", b"")))

        await super().__call__(scope, receive, counted)
