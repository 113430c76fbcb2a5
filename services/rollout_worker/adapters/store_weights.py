"""The weights that an engine loads: pulled from the weight store into the cache, or taken from a model folder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rlboost.shared.errors import ConfigError, UnsuitableWeights
from rlboost.shared.model.folder import tensor_names
from rlboost.shared.weights.access import IssuedAccess
from rlboost.shared.weights.cache import Cache, cached_version
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, TensorEntry
from rlboost.shared.weights.puller import Puller

if TYPE_CHECKING:
    import torch

    from rlboost.services.rollout_worker.ports import StagedWeights

log = structlog.get_logger(__name__)

_MAX_TOKENIZERS = 16
"""Of jobs that share the engine; each is some megabytes."""

# --- Fills the cache from a model folder on this machine, such as the public model in a machine image -----------------
# The first version of a job is usually that model, so its chunks can be built from the folder's files. A chunk is
# cached only if its digest matches: a folder with another model costs the time to read it. One that cannot be read is
# reported.


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


# --- Pulls weights from the weight store into this machine's cache ----------------------------------------------------


class StoreWeights:
    """`ports.WeightSource` on one weight store."""

    def __init__(
        self,
        puller: Puller,
        client: StoreClient,
        access: IssuedAccess,
        fetch_tokenizer: Callable[[str], Awaitable[str]],
    ) -> None:
        """Use a puller, its client, which has this access, and what fetches the tokenizer of a job."""
        self._puller = puller
        self._client = client
        self._access = access
        self._fetch_tokenizer = fetch_tokenizer
        self._tokenizers: dict[str, str] = {}

    async def pull(self, job_id: str, version: int) -> StagedWeights:
        pulled = await self._puller.pull(job_id, version)
        try:
            return cached_version(pulled)
        except ConfigError as error:  # of what was published: the next version may be another
            raise UnsuitableWeights(str(error)) from error

    async def tokenizer_json(self, job_id: str) -> str:
        if job_id not in self._tokenizers:
            while len(self._tokenizers) >= _MAX_TOKENIZERS:
                del self._tokenizers[next(iter(self._tokenizers))]
            self._tokenizers[job_id] = await self._fetch_tokenizer(job_id)
        return self._tokenizers[job_id]

    async def image(self, digest: str, n_bytes: int) -> bytes:
        return await retry_unavailable(lambda: self._client.read(ChunkRef(digest, n_bytes)))

    def verify_cache_again(self) -> None:
        self._puller.verify_cache_again()

    def renew_access(self, credential: str) -> None:
        self._access.credential = credential
