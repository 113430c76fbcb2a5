"""Fills the cache from a model folder on this machine, such as the public model in a machine image.

The first version of a job is usually that model, so its chunks can be built from the folder's files. A chunk is cached
only if its digest matches: a folder with another model costs the time to read it. One that cannot be read is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import tensor_names
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.manifest import Manifest, Part, TensorEntry

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)


class ModelFolderSeeder:
    """A `puller.CacheSeeder` of a Hugging Face folder with `.safetensors` files."""

    def __init__(self, folder: Path) -> None:
        """Take the folder; calling the seeder reads it."""
        self._folder = folder

    def __call__(self, manifest: Manifest, cache: Cache) -> int:
        """Add the chunks of a version that the folder contains to the cache; return their number."""
        from safetensors import SafetensorError  # noqa: PLC0415 - torch is imported after joining

        try:
            with ExitStack() as stack:
                tensors = _open(self._folder, stack)
                n_chunks = sum(_seed_part(part, tensors, cache) for part in manifest.parts)
        except (OSError, SafetensorError, ConfigError) as error:
            log.warning("cache_seeding_failed", folder=str(self._folder), job=manifest.job_id, error=str(error))
            return 0
        log.info("cache_seeded", folder=str(self._folder), job=manifest.job_id, chunks=n_chunks)
        return n_chunks


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return a lazy slice of every tensor in the folder, by its name in transformers' model.

    Raises:
        FileNotFoundError: the folder has no such file.
        OSError, SafetensorError: a file cannot be read.

    """
    from safetensors import safe_open  # noqa: PLC0415 - torch is imported after joining

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError("no *.safetensors file: set RLBOOST_WORKER_BASE_MODEL to the folder of a model")
    files, name_of = [stack.enter_context(safe_open(path, framework="pt")) for path in paths], tensor_names(folder)
    return {name_of(name): file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 - no mapping


def _seed_part(part: Part, tensors: dict[str, Any], cache: Cache) -> int:
    n_chunks, chunks, buffer = 0, iter(part.chunks), bytearray()
    chunk = next(chunks, None)
    for data in _stream(part.tensors, tensors):
        buffer += data
        while chunk is not None and len(buffer) >= chunk.n_bytes:
            n_chunks += cache.holds(chunk) or cache.store(chunk, buffer[: chunk.n_bytes])
            del buffer[: chunk.n_bytes]
            chunk = next(chunks, None)
    return n_chunks


def _stream(entries: tuple[TensorEntry, ...], tensors: dict[str, Any]) -> Iterator[bytes]:
    """Yield a part's bytes; zeros for tensors that the folder does not have."""
    for entry in entries:
        data = _bytes(entry, tensors.get(entry.name))
        yield data if len(data) == entry.n_bytes else bytes(entry.n_bytes)


def _bytes(entry: TensorEntry, found: Any) -> bytes:
    import torch  # noqa: PLC0415 - imported after joining

    if found is None or tuple(found.get_shape()) != entry.global_shape:
        return b""
    region = tuple(slice(low, low + size) for low, size in zip(entry.offset, entry.local_shape, strict=True))
    # Rounded as the trainer rounds its initial model.
    tensor: torch.Tensor = (found[region] if region else found[:]).to(getattr(torch, entry.dtype))
    return b"" if not tensor.numel() else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
