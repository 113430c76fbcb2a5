"""Reads what W&B writes offline: LevelDB's log format, of protocol buffers that wandb's own classes parse."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK_BYTES = 32 * 1024
_FILE_HEADER_BYTES = 7
_FULL, _LAST = 1, 4


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file."""
    data, at, parts = file.read_bytes(), _FILE_HEADER_BYTES, []
    while at + 7 <= len(data):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < 7:
            at += left
            continue
        _checksum, n_bytes, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + n_bytes])
        at += 7 + n_bytes
        if kind in {_FULL, _LAST}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record
