"""Pulled versions without a store: shards written into a cache directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlboost.shared.weights.cache import PulledVersion
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, Manifest, Part, Shard, TensorEntry, digest_of


def pulled(shards: Iterable[Shard], directory: Path, version: int = 0, **more: Any) -> PulledVersion:
    """Return a version of one rank; `more` is of the manifest, and `base` the pulled version below an adapter."""
    base = more.pop("base", None)
    entries, data = [], bytearray()
    for shard in shards:
        raw = bytes(shard.data)
        entries.append(
            TensorEntry(
                **{name: getattr(shard, name) for name in ("name", "dtype", "global_shape", "offset", "local_shape")},
                start=len(data),
                n_bytes=len(raw),
                digest=digest_of(raw),
            )
        )
        data += raw
    chunks = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        chunks.append(ChunkRef(digest_of(chunk), len(chunk)))
        (directory / chunks[-1].digest).write_bytes(chunk)
    part = Part(rank=0, chunks=tuple(chunks), tensors=tuple(entries))
    if base is not None:
        more["base_version"] = base.manifest.version
    manifest = Manifest(job_id="j", version=version, config_json="{}", parts=(part,), **more)
    return PulledVersion(manifest, directory, base)
