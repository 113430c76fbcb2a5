"""A model folder on this machine, such as the public model in a machine image, as a version that need not be pulled.

The first version of a job is mostly that model, so its chunks can be made of the folder's files. Each is kept only if
it has its digest: a folder with another model costs the reading of it and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from shared.weights.cache import Cache
from shared.weights.manifest import Manifest, Part, TensorEntry

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)


class BaseModel:
    """`puller.Seed` of a Hugging Face folder with `.safetensors` files."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self._folder = folder

    def __call__(self, manifest: Manifest, cache: Cache) -> int:
        """Put those of a version's chunks into the cache that can be made of the folder; return how many."""
        with ExitStack() as stack:
            tensors = _open(self._folder, stack)
            n_chunks = sum(_seed_part(part, tensors, cache) for part in manifest.parts)
        log.info("cache_seeded", folder=str(self._folder), job=manifest.job_id, chunks=n_chunks)
        return n_chunks


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return name -> slice of every tensor in the folder."""
    from safetensors import safe_open  # noqa: PLC0415 - torch is imported after joining

    files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 - no mapping


def _seed_part(part: Part, tensors: dict[str, Any], cache: Cache) -> int:
    n_chunks, chunks, buffer = 0, iter(part.chunks), bytearray()
    chunk = next(chunks, None)
    for piece in _stream(part.tensors, tensors):
        buffer += piece
        while chunk is not None and len(buffer) >= chunk.n_bytes:
            n_chunks += cache.holds(chunk) or cache.keep(chunk, buffer[: chunk.n_bytes])
            del buffer[: chunk.n_bytes]
            chunk = next(chunks, None)
    return n_chunks


def _stream(entries: tuple[TensorEntry, ...], tensors: dict[str, Any]) -> Iterator[bytes]:
    """Yield a part's bytes; zeros where the folder has no such tensor."""
    for entry in entries:
        data = _bytes(entry, tensors.get(entry.name))
        yield data if len(data) == entry.n_bytes else bytes(entry.n_bytes)


def _bytes(entry: TensorEntry, found: Any) -> bytes:
    import torch  # noqa: PLC0415 - imported after joining

    if found is None or tuple(found.get_shape()) != entry.global_shape:
        return b""
    box = tuple(slice(low, low + size) for low, size in zip(entry.offset, entry.local_shape, strict=True))
    # Rounded as the trainer rounds the model that it begins with.
    tensor: torch.Tensor = (found[box] if box else found[:]).to(getattr(torch, entry.dtype))
    return b"" if not tensor.numel() else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
