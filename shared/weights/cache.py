"""A cache of verified blobs (chunks and deltas) in files on this machine, and the versions that are read from it.

A file is named by its digest and never changed: bytes that sendfile(2) has queued are read from it until the peer has
acknowledged them, even after it is closed.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import cached_property
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from rlboost.shared.errors import Corrupt, Fatal, NotFound
from rlboost.shared.files import DirectoryInUse, lock_directory, replace_file
from rlboost.shared.weights.lora import adapter_of
from rlboost.shared.weights.manifest import (
    CHUNK_BYTES,
    ITEM_BYTES,
    ChunkRef,
    Manifest,
    ParityReference,
    Part,
    TensorEntry,
    digest_of,
)

if TYPE_CHECKING:
    import torch

    from rlboost.shared.weights.changed_words import ChangedWords

# --- The cache --------------------------------------------------------------------------------------------------------


_DIGEST_LETTERS = 64
_MAX_PROCESSES = 64
"""Processes of one name on one machine."""


def open_cache(parent: Path, name: str) -> Cache:
    """Open the first of the directories `name`, `name-2`, `name-3`, ... in `parent` that no process uses.

    So several workers of one name, which is the host's by default, run on one machine, and a restarted one finds what
    it has pulled.

    Raises:
        ConfigError: a directory is not writable, or 64 processes use one each.

    """
    for number in range(1, _MAX_PROCESSES):
        try:
            return Cache(parent / (name if number == 1 else f"{name}-{number}"))
        except DirectoryInUse:
            continue
    return Cache(parent / f"{name}-{_MAX_PROCESSES}")


class Cache:
    """A cache directory, locked by one process. Its methods block on files: call them in threads."""

    def __init__(self, root: Path) -> None:
        """Create the directory if needed, lock it, and remove partial files of a killed process.

        Raises:
            ConfigError: the directory is not writable.
            DirectoryInUse: another process uses it.

        """
        self.blobs = root / "chunks"
        self.verified: set[str] = set()
        """Digests of the blobs verified by this process."""
        self._pulled_file = root / "held.json"
        self._lock = lock_directory(root)
        with self._errors():
            self.blobs.mkdir(exist_ok=True)
            for path in self.blobs.iterdir():
                if len(path.name) != _DIGEST_LETTERS:
                    path.unlink()

    def close(self) -> None:
        """Release the directory."""
        self._lock.close()

    def path(self, digest: str) -> Path:
        """Return the path of a blob, which may not exist."""
        return self.blobs / digest

    def open_to_send(self, digest: str) -> BinaryIO | None:
        """Open the file of a blob to be sent to a peer, None if there is none."""
        try:
            return self.path(digest).open("rb", buffering=0)
        except FileNotFoundError:
            return None

    def digests(self) -> set[str]:
        """Return the digests of all blobs, verified or not."""
        with self._errors():
            return {path.name for path in self.blobs.iterdir() if len(path.name) == _DIGEST_LETTERS}

    def holds(self, blob: ChunkRef) -> bool:
        """Return True if the cache holds the blob. An unverified one is verified, and removed if corrupt."""
        if blob.digest in self.verified:
            return True
        path = self.path(blob.digest)
        with self._errors():
            try:
                with path.open("rb", buffering=0) as file:
                    is_intact = _read_intact(file, blob) is not None
            except FileNotFoundError:
                return False
            if not is_intact:
                path.unlink(missing_ok=True)
                return False
        self.verified.add(blob.digest)
        return True

    def adopt(self, blob: ChunkRef, source: Path) -> bool:
        """Add a blob from a file that is never changed, as a hard link if possible; return True if it is intact."""
        try:
            with source.open("rb", buffering=0) as file:
                data = _read_intact(file, blob)
                if data is None:
                    return False
                if self._linked(blob, source, os.fstat(file.fileno())):
                    return True
        except OSError:
            return False
        return self.store(blob, data)

    def _linked(self, blob: ChunkRef, source: Path, verified: os.stat_result) -> bool:
        """Link the verified file into the cache; return False if that is impossible, as between file systems."""
        temporary = self.blobs / f".{blob.digest}.{secrets.token_hex(8)}"
        try:
            temporary.hardlink_to(source)
        except OSError:
            return False
        try:
            if not os.path.samestat(temporary.stat(), verified):
                return False
            temporary.replace(self.path(blob.digest))
        finally:
            # Renaming a link over another link to the same file does nothing.
            temporary.unlink(missing_ok=True)
        self.verified.add(blob.digest)
        return True

    def store(self, blob: ChunkRef, data: bytes | bytearray | memoryview) -> bool:
        """Store the blob if the bytes have its length and digest; return True if they do."""
        if len(data) != blob.n_bytes or digest_of(data) != blob.digest:
            return False
        with self._errors():
            replace_file(self.path(blob.digest), data)
        self.verified.add(blob.digest)
        return True

    def read(self, digest: str) -> memoryview:
        """Return a blob's bytes in a writable buffer, until the thread's next call; raises `FileNotFoundError`."""
        with self.path(digest).open("rb") as file:
            data = _scratch_of(os.fstat(file.fileno()).st_size)
            return data[: file.readinto(data)]

    def last_pulled(self) -> list[tuple[str, int]]:
        """Return the (job, version) pairs that an earlier process pulled last. A hint: blobs are still verified."""
        try:
            return [(str(job_id), int(version)) for job_id, version in json.loads(self._pulled_file.read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def remove(self, digests: AbstractSet[str]) -> None:
        """Remove blobs, if they exist."""
        self.verified -= digests
        with self._errors():
            for digest in digests:
                self.path(digest).unlink(missing_ok=True)

    def prune(self, keep: AbstractSet[str], pulled: list[tuple[str, int]]) -> None:
        """Remove all blobs but `keep`, and record what was pulled last."""
        self.remove(self.digests() - keep)
        with self._errors():
            replace_file(self._pulled_file, json.dumps(pulled))
        self.verified &= keep

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Fatal(
                f"cache directory {self.blobs.parent}: {error.strerror}; free space there, or set another directory"
            ) from error


class _Scratch(threading.local):
    """A buffer of each thread: new pages would cost more than reading into them."""

    def __init__(self) -> None:
        self.buffer = bytearray(CHUNK_BYTES)


_scratch = _Scratch()


def _scratch_of(n_bytes: int) -> memoryview:
    """Return a buffer, valid until the thread's next call."""
    return memoryview(_scratch.buffer if n_bytes <= CHUNK_BYTES else bytearray(n_bytes))[:n_bytes]


def _read_intact(file: BinaryIO, blob: ChunkRef) -> memoryview | None:
    """Read a blob, None if it is corrupt; the bytes are valid until the thread's next call.

    A file that is truncated meanwhile is just too short. Reading a mapping of it would kill the process.
    """
    data = _scratch_of(blob.n_bytes)
    n_bytes = 0
    while n_bytes < len(data) and (n := os.preadv(file.fileno(), [data[n_bytes:]], n_bytes)):
        n_bytes += n
    has_more = bool(os.pread(file.fileno(), 1, n_bytes))
    return data if n_bytes == len(data) and not has_more and digest_of(data) == blob.digest else None


# --- Reads a pulled version from the cache, tensor by tensor ----------------------------------------------------------


_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class WholeTensor(NamedTuple):
    """A tensor of a version, assembled from the shards of all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class PulledVersion:
    """One verified version in a cache."""

    def __init__(
        self, manifest: Manifest, chunks: Path, base: PulledVersion | None = None, *, verify: bool = False
    ) -> None:
        """Read the chunks of `manifest` from the directory `chunks`; `base` is the base version of an adapter.

        With `verify`, `tensors` compares the bytes of each tensor with their digest.
        """
        self.manifest = manifest
        self.base = base
        self._chunks = chunks
        self._verify = verify

    @property
    def location(self) -> dict[str, Any]:
        """Where the version is on this machine, as plain data for another process; see `at`."""
        base = self.base.location if self.base is not None else None
        return {"chunks": str(self._chunks), "manifest": self.manifest.model_dump_json(), "base": base}

    @classmethod
    def at(cls, location: Mapping[str, Any]) -> Self:
        """Invert `location`; the bytes are verified as they are read."""
        base = cls.at(location["base"]) if location["base"] is not None else None
        return cls(Manifest.decode(location["manifest"].encode()), Path(location["chunks"]), base, verify=True)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[WholeTensor, memoryview]]:
        """Yield every tensor with its bytes, or those with these names.

        One tensor is in memory at a time. Blocks on files: call it outside the event loop.

        Raises:
            NotFound: two later versions have been pulled, and the chunks of this one are removed.
            Corrupt: with `verify`, bytes do not match their digest.

        """
        shards: dict[str, list[tuple[Part, TensorEntry]]] = {}
        for part in self.manifest.parts:
            for entry in part.tensors:
                if names is None or entry.name in names:
                    shards.setdefault(entry.name, []).append((part, entry))
        with _Reader(self._chunks, self.manifest, verify=self._verify) as reader:
            for held in shards.values():
                yield _whole(held, reader)


def _whole(shards: list[tuple[Part, TensorEntry]], reader: _Reader) -> tuple[WholeTensor, memoryview]:
    entry = shards[0][1]
    tensor = np.empty(entry.global_shape, dtype=_UINT[ITEM_BYTES[entry.dtype]])
    for part, shard in shards:
        slices = [slice(low, low + n) for low, n in zip(shard.offset, shard.local_shape, strict=True)]
        index: tuple[Any, ...] = (..., *slices)  # with the ellipsis, the target is an array even without dimensions
        target = tensor[index]
        if target.flags.c_contiguous:
            reader.read_into(part, shard, target)
        else:
            shard_data = np.empty(shard.local_shape, dtype=tensor.dtype)
            reader.read_into(part, shard, shard_data)
            target[...] = shard_data
    return WholeTensor(entry.name, entry.dtype, entry.global_shape), _bytes(tensor)


def _bytes(array: npt.NDArray[np.unsignedinteger]) -> memoryview:
    """Return a view of a C-contiguous array's bytes."""
    return array.reshape(-1).view(np.uint8).data


class _Reader:
    """Reads shards from chunk files and keeps the last file open: adjacent shards are mostly in the same chunk."""

    def __init__(self, chunks: Path, manifest: Manifest, *, verify: bool) -> None:
        self._chunks = chunks
        self._verify = verify
        self._starts = [[0, *accumulate(chunk.n_bytes for chunk in part.chunks)] for part in manifest.parts]
        self._digest = ""
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read_into(self, part: Part, entry: TensorEntry, array: npt.NDArray[np.unsignedinteger]) -> None:
        """Fill a C-contiguous array with a shard's bytes."""
        remaining, at = _bytes(array), entry.start
        starts = self._starts[part.rank]
        while remaining:
            index = bisect_right(starts, at) - 1
            digest = part.chunks[index].digest
            n_bytes = os.preadv(self._open(digest), [remaining[: starts[index + 1] - at]], at - starts[index])
            if not n_bytes:
                raise Corrupt(f"{self._chunks / digest} is truncated: remove the cache directory")
            remaining, at = remaining[n_bytes:], at + n_bytes
        if self._verify and digest_of(_bytes(array)) != entry.digest:
            raise Corrupt(f"{entry.name}: the bytes in {self._chunks} are not the published ones: remove it")

    def _open(self, digest: str) -> int:
        if self._file is None or digest != self._digest:
            if self._file is not None:
                self._file.close()
            try:
                self._file = FileIO(self._chunks / digest)
            except FileNotFoundError as error:
                raise NotFound(f"{self._chunks / digest} is no longer in the cache: pull the version again") from error
            self._digest = digest
        return self._file.fileno()


# --- Pulled versions as torch tensors under the model's names ---------------------------------------------------------
# Torch is imported when the first tensor is read. An adapter is merged into its base model, so that readers see an
# ordinary model, unless they ask for the two apart.


Published = dict[str, list[TensorEntry]]
"""Name -> the shards of the tensor."""


class Located(Protocol):
    """A version on this machine."""

    @property
    def location(self) -> Mapping[str, Any]:
        """See `PulledVersion.location`."""


class CachedVersion:
    """A pulled version as torch tensors: a whole model."""

    def __init__(self, pulled: PulledVersion) -> None:
        self._pulled = pulled

    @property
    def config_json(self) -> str:
        """The model's own `config.json`."""
        return self._pulled.manifest.config_json

    @property
    def location(self) -> dict[str, Any]:
        """Where the bytes are on this machine: see `PulledVersion.location`."""
        return self._pulled.location

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """Name -> key of the tensor's content: equal keys in two versions of a model mean equal bytes."""
        return {name: tuple(map(_content, shards)) for name, shards in self.published.items()}

    @property
    def parity_reference(self) -> ParityReference | None:
        """The trainer's log-probabilities of canary prompts under these weights; None if it published none."""
        return _parity_reference(self._pulled.manifest)

    @cached_property
    def published(self) -> Published:
        """Name -> entries of the tensor in the manifest."""
        return _published(self._pulled.manifest)

    def unmerged(self) -> tuple[CachedVersion, None]:
        """Return this version and no adapter."""
        return self, None

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those with these names, on the CPU in its published dtype. Blocks on files.

        Raises:
            Corrupt: a file is truncated or missing.

        """
        return _tensors(self._pulled, names)

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that `loaded` lacks or has with other bits. Slow.

        A tensor loaded in a wider dtype is equal if narrowing it yields the published bytes.
        """
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        return torch_tensors.differing(self.published, loaded)

    def changed_words(self, since: Located, names: Container[str]) -> ChangedWords | None:
        """Return the words of these tensors that differ from an older version; None if they are too many.

        Verifies the bytes of both versions as it reads them.

        Raises:
            Corrupt: a file of one of them is damaged, truncated or missing.
            OSError: the file of changed words cannot be written.

        """
        return _changed_words(since.location, self.location, names, self.published)


class AdaptedVersion:
    """An adapter version, merged into its base while its tensors are read; `unmerged` has the two apart.

    Raises:
        ConfigError: it is not a plain LoRA adapter, or not one for this model.

    """

    def __init__(self, pulled: PulledVersion, base: PulledVersion) -> None:
        self._pulled = pulled
        self._base = CachedVersion(base)
        self._published = _published(pulled.manifest)
        self._adapter = adapter_of(
            pulled.manifest.adapter_json, _shapes(self._published), _shapes(self._base.published)
        )
        self.rank, self.scaling = self._adapter.rank, self._adapter.scaling
        self._merged: dict[str, str] = {}
        """Name -> digest of each merged tensor."""

    def unmerged(self) -> tuple[CachedVersion, AdaptedVersion]:
        """Return the base, and this version as the adapter: its rank, scaling, targets and factors."""
        return self._base, self

    @property
    def targets(self) -> Collection[str]:
        """The names of the model's tensors that the adapter changes."""
        return self._adapter.factors.keys()

    def factors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each target with A [rank, in] and B [out, rank], on the CPU in their published dtype. Blocks on files.

        Raises:
            Corrupt: a file is truncated or missing.

        """
        tensors = dict(_tensors(self._pulled))
        yield from ((name, tensors[pair.a], tensors[pair.b]) for name, pair in self._adapter.factors.items())

    def factors_differing(self, loaded: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
        """Return the names of the adapter's tensors that `loaded` lacks or has with other bits; see `differing`."""
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        factors = self._adapter.factors
        named = ((key, one) for name, *pair in loaded for key, one in zip(factors[name], pair, strict=True))
        return torch_tensors.differing(self._published, named)

    @property
    def config_json(self) -> str:
        """The model's own `config.json`."""
        return self._base.config_json

    @property
    def location(self) -> dict[str, Any]:
        """Where the bytes are on this machine: see `PulledVersion.location`."""
        return self._pulled.location

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """Name -> key of the tensor's content: equal keys in two versions of a model mean equal bytes."""
        adapter, changed = self._adapter, {}
        contents = self._base.contents
        for name, pair in adapter.factors.items():
            factors = tuple(_content(shard) for factor in pair for shard in self._published[factor])
            changed[name] = (contents[name], adapter.scaling, factors)
        return {**contents, **changed}

    @property
    def parity_reference(self) -> ParityReference | None:
        """The trainer's log-probabilities of canary prompts under these weights; None if it published none."""
        return _parity_reference(self._pulled.manifest)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those with these names, on the CPU in its published dtype. Blocks on files."""
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        adapter, factors = self._adapter, dict(_tensors(self._pulled))
        for name, tensor in self._base.tensors(names):
            if (pair := adapter.factors.get(name)) is None:
                yield name, tensor
                continue
            merged = torch_tensors.merged(tensor, factors[pair.a], factors[pair.b], adapter.scaling)
            self._merged[name] = torch_tensors.digest(merged)
            yield name, merged

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that `loaded` lacks or has with other bits. Slow.

        A merged tensor is compared with the last result of `tensors`.
        """
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        unread = self._adapter.factors.keys() - self._merged.keys()
        for _ in self.tensors(unread) if unread else ():
            pass  # reading a tensor records its digest
        merged = {name: [_merged_entry(self._base.published[name][0], digest)] for name, digest in self._merged.items()}
        return torch_tensors.differing({**self._base.published, **merged}, loaded)

    def changed_words(self, since: Located, names: Container[str]) -> ChangedWords | None:
        return _changed_words(since.location, self.location, names, self._base.published)


def cached_version(pulled: PulledVersion) -> CachedVersion | AdaptedVersion:
    """Return the reader for a pulled version: a whole model or an adapter.

    Raises:
        ConfigError: see `AdaptedVersion`.

    """
    return CachedVersion(pulled) if pulled.base is None else AdaptedVersion(pulled, pulled.base)


def _tensors(pulled: PulledVersion, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

    try:
        yield from torch_tensors.tensors(pulled, names)
    except NotFound as error:
        raise Corrupt(str(error)) from error


def _changed_words(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Container[str], published: Published
) -> ChangedWords | None:
    from rlboost.shared.weights.changed_words import find_changed_words  # noqa: PLC0415 - see `_tensors`

    before, after = (cached_version(PulledVersion.at(location)).tensors(names) for location in (old, new))
    n_words = sum(math.prod(shape) for shape in _shapes(published).values())
    return find_changed_words(before, after, n_words, Path(new["chunks"]))


def _parity_reference(manifest: Manifest) -> ParityReference | None:
    return ParityReference.decode(manifest.parity_json) if manifest.parity_json else None


def _published(manifest: Manifest) -> Published:
    found: defaultdict[str, list[TensorEntry]] = defaultdict(list)
    for part in manifest.parts:
        for entry in part.tensors:
            found[entry.name].append(entry)
    return dict(found)


def _shapes(published: Published) -> dict[str, tuple[int, ...]]:
    return {name: shards[0].global_shape for name, shards in published.items()}


def _content(shard: TensorEntry) -> Hashable:
    return shard.dtype, shard.offset, shard.local_shape, shard.digest


def _merged_entry(shard: TensorEntry, digest: str) -> TensorEntry:
    """Return the entry of the whole tensor."""
    update = {"offset": (0,) * len(shard.global_shape), "local_shape": shard.global_shape, "digest": digest}
    return shard.model_copy(update=update)
