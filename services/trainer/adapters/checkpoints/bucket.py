"""Checkpoints in an object store, for a trainer that may go on on another machine.

    manifests/step-000010-006ba3c1d21f2e3d4c.json      the document, written last: without it there is no checkpoint
    files/step-000010-006ba3c1d21f2e3d4c/optimizer.safetensors/000003    a part of a file

Files are cut into parts, each a whole object: a trainer that is killed in the middle leaves objects that the checkpoint
of a later step finds and removes, and no unfinished upload that costs money and is seen nowhere.

Two trainers may write at once: one that was thought dead, and its successor. So each writing has a name of its own, for
its document too, and nobody replaces what another has written. The name begins with the time at which the trainer
began: where both have written a step, the successor's counts. Files that no document names are removed only when
nothing has come to them for an hour: until then their document may be on its way.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import stamina
import structlog

from services.trainer.adapters.checkpoints.files import (
    BROKEN,
    KEPT,
    Document,
    is_left_over,
    name_of,
    none_is_whole,
    own_name,
    step_of,
)
from services.trainer.ports import Snapshot, TrainState
from shared.bucket import Bucket, Listed, NoCredentials, Refused, configuration
from shared.errors import Fatal, NotFound, StoreUnavailable
from shared.ids import new_token

log = structlog.get_logger(__name__)

PART_BYTES = 16 << 20
AT_ONCE = 8
"""Parts on their way. With `PART_BYTES` a link of 54 Mb/s sends them within the 20 s that a request may take."""
_MANIFESTS, _FILES = "manifests", "files"
_PROBE = "probe"
_STALE_S = 3600.0
"""After this a local folder of files on their way is one that a killed trainer has left."""
_LATE_S = 3600.0
"""How long after the last of its files a document may still come, by the object store's clock."""

T = TypeVar("T")


class CheckpointBucket:
    """`CheckpointStore` below a URL. The engine's files pass through a local folder."""

    def __init__(self, url: str, scratch: Path, limit_s: float) -> None:
        """Prepare.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`, for this job alone.
            scratch: where files on their way have a folder each; others may use it, too.
            limit_s: how long the object store may be away.

        Raises:
            ConfigError: the URL cannot be used.

        """
        self._bucket = Bucket(url)
        self._scratch = scratch
        self._limit_s = limit_s
        self._since = 0
        """When this trainer last began, by the object store's clock; 0 where it was not asked yet."""

    def save(self, state: TrainState, write: Snapshot) -> None:
        """See `CheckpointStore.save`."""
        name = name_of(state.step)
        try:
            self._clear(state.step)
            with self._aside(state.step) as directory:
                write(directory)
                asyncio.run(self._save(directory, state))
        except (OSError, StoreUnavailable, NotFound) as error:
            raise Fatal(
                f"checkpoint {name} cannot be written to {self._bucket.url}: {error}; mend the object store or make "
                f"room in {self._scratch}. The checkpoints before it are whole"
            ) from error

    def newest(self) -> tuple[TrainState, Path] | None:
        """See `CheckpointStore.newest`. Finds out, too, whether one could be written."""
        return asyncio.run(self._newest(may_write=True))

    def brought(self, name: str = "") -> tuple[TrainState, Path] | None:
        """Bring one checkpoint here, the newest that verifies if it is not named; None where there is none.

        Raises:
            ConfigError, Corrupt, StoreUnavailable: see `newest`.

        """
        return asyncio.run(self._newest(may_write=False, only=name))

    def fallback(self) -> TrainState | None:
        """See `CheckpointStore.fallback`."""
        return asyncio.run(self._fallback())

    def _clear(self, step: int) -> None:
        """Remove files of earlier steps that are here still, those that were brought among them, and stale ones."""
        for left in self._scratch.glob("*"):
            with suppress(FileNotFoundError):  # somebody else has removed it
                if is_left_over(left.name, step) or time.time() - left.stat().st_mtime > _STALE_S:
                    shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def _aside(self, step: int, *, keep: bool = False) -> Iterator[Path]:
        """Give an empty folder for files, and remove it afterwards; after an error only, where it is to be kept."""
        directory = self._scratch / own_name(step)
        directory.mkdir(parents=True)
        try:
            yield directory
        except BaseException:
            keep = False
            raise
        finally:
            if not keep:
                shutil.rmtree(directory, ignore_errors=True)

    # --- writing ---

    async def _save(self, directory: Path, state: TrainState) -> None:
        if not self._since:
            await self._begin()
        folder = f"{name_of(state.step)}-{self._since:010x}{new_token()}"
        document = await asyncio.to_thread(Document.of, directory, state, folder)
        await _all(
            self._upload(directory / file, f"{_FILES}/{folder}/{_part(file, number)}", number)
            for file, digest in document.files.items()
            for number in _numbers(digest.n_bytes)
        )
        await self._patiently(lambda: self._bucket.put(_manifest(folder), document.encode().encode()))
        await self._remove_old(document)

    async def _begin(self) -> None:
        """Find out what time it is at the object store, and whether one may write there."""
        probe = new_token()
        await self._patiently(lambda: self._bucket.put(f"{_PROBE}/{probe}", b""))
        probes = await self._patiently(lambda: self._bucket.objects(_PROBE))
        now = probes[probe].modified
        # Above the last: what is written after this look counts before what was found by it.
        self._since = max(int(now), self._since + 1)
        await self._remove([f"{_PROBE}/{name}" for name, it in probes.items() if name == probe or _is_late(it, now)])

    async def _upload(self, file: Path, path: str, number: int) -> None:
        data = await asyncio.to_thread(_read_part, file, number)
        await self._patiently(lambda: self._bucket.put(path, data))

    async def _remove_old(self, newest: Document) -> None:
        """Remove all but the newest checkpoints, and what no checkpoint has of earlier steps: of killed writers.

        Raises:
            Fatal: somebody has removed `newest`, or what it names.

        """
        names = await self._names()
        files = await self._files()  # after the names: whatever a document names was there before it
        kept = [name for name, _ in await self._kept(names, files)]
        old = [name for name in names if name not in kept and _step(name) <= newest.state.step]
        await self._remove([_manifest(name) for name in old])
        used = {await self._folder(name) for name in names if name not in old}
        now = max((found.modified for found in names.values()), default=0.0)
        for folder, parts in files.items():
            left = is_left_over(folder, newest.state.step) and all(_is_late(part, now) for part in parts.values())
            if folder not in used and (left or folder in old):
                await self._remove([f"{_FILES}/{folder}/{part}" for part in parts])
        if newest.folder not in names or not _is_there(newest, files):
            raise Fatal(
                f"files of checkpoint {newest.folder} were removed from {self._bucket.url} while it was written: look "
                "for another trainer of this job, or a rule of the bucket that removes objects. The checkpoints before "
                "it are whole"
            )

    async def _kept(
        self, names: Iterable[str], files: Mapping[str, Mapping[str, Listed]]
    ) -> list[tuple[str, Document]]:
        """Return the newest checkpoints that have all their files, one of each step, as many as are kept."""
        kept: dict[int, tuple[str, Document]] = {}
        for name in names:
            if len(kept) == KEPT:
                break
            try:
                document = await self._document(name)
            except (*BROKEN, NotFound):
                continue
            if _is_there(document, files):
                kept.setdefault(_step(name), (name, document))
        return list(kept.values())

    async def _folder(self, name: str) -> str:
        """Return where the files of a document are; that of before documents had names of their own says it itself."""
        if step_of(name) < 0:
            return name
        try:
            return (await self._document(name)).folder
        except (*BROKEN, NotFound):
            return ""  # its files are of no use

    async def _remove(self, paths: Sequence[str]) -> None:
        if paths:
            await self._patiently(lambda: self._bucket.remove(paths))

    # --- reading ---

    async def _newest(self, *, may_write: bool, only: str = "") -> tuple[TrainState, Path] | None:
        with configuration():
            if may_write:
                await self._begin()
            names = [name for name in await self._names() if not only or _step(name) == step_of(only)]
        for name in names:
            try:
                return await self._bring(await self._document(name))
            except (*BROKEN, NotFound) as error:
                where = f"{self._bucket.url}/{_manifest(name)}"
                log.warning("checkpoint_broken", directory=where, reason=str(error) or repr(error))
        if names:
            raise none_is_whole(self._bucket.url, list(dict.fromkeys(name_of(_step(name)) for name in names)))
        return None

    async def _bring(self, document: Document) -> tuple[TrainState, Path]:
        self._clear(0)
        try:
            with self._aside(document.state.step, keep=True) as directory:
                for name, digest in document.files.items():
                    with (directory / name).open("wb") as file:
                        file.truncate(digest.n_bytes)
                await _all(
                    self._download(f"{_FILES}/{document.folder}/{_part(name, number)}", directory / name, number)
                    for name, digest in document.files.items()
                    for number in _numbers(digest.n_bytes)
                )
                await asyncio.to_thread(document.verify, directory)
        except OSError as error:
            raise Fatal(f"{self._scratch} has no room for the checkpoint: {error}; make room there") from error
        return document.state, directory

    async def _download(self, path: str, file: Path, number: int) -> None:
        found = await self._patiently(lambda: self._bucket.get(path))
        await asyncio.to_thread(_write_part, file, number, found.data)

    async def _fallback(self) -> TrainState | None:
        names = await self._names()
        kept = await self._kept(names, await self._files())
        return kept[-1][1].state if len(kept) == KEPT else None

    async def _document(self, name: str) -> Document:
        return Document.decode((await self._patiently(lambda: self._bucket.get(_manifest(name)))).data)

    async def _names(self) -> dict[str, Listed]:
        """Return the names of the documents, those of the newest step first, and of them the latest trainer's."""
        found = await self._patiently(lambda: self._bucket.objects(_MANIFESTS))
        names = {file.removesuffix(".json"): listed for file, listed in found.items()}
        return {name: names[name] for name in sorted(names, key=lambda name: (_step(name), name), reverse=True)}

    async def _files(self) -> dict[str, dict[str, Listed]]:
        """Return what is in each folder of files."""
        folders: dict[str, dict[str, Listed]] = {}
        for path, listed in (await self._patiently(lambda: self._bucket.objects(_FILES))).items():
            folder, _, part = path.partition("/")
            folders.setdefault(folder, {})[part] = listed
        return folders

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent call for as long as the object store is away."""
        retries = stamina.retry_context(on=_may_pass, attempts=None, timeout=self._limit_s, wait_max=2.0)
        async for attempt in retries:
            with attempt:
                return await call()
        raise AssertionError("a retry context ends with a result or an error")


def _may_pass(error: Exception) -> bool:
    return isinstance(error, StoreUnavailable) and not isinstance(error, Refused | NoCredentials)


async def _all(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Do everything, some at once; the first error ends the others."""
    waiting = iter(works)

    async def some() -> None:
        for work in waiting:
            await work

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _numbers(n_bytes: int) -> range:
    """Return the numbers of a file's parts; an empty file has none."""
    return range(-(-n_bytes // PART_BYTES))


def _step(name: str) -> int:
    """Return the step of a document by its name."""
    return max(step_of(name), step_of(name.rpartition("-")[0]))


def _is_late(listed: Listed, now: float) -> bool:
    return now - listed.modified >= _LATE_S


def _is_there(document: Document, files: Mapping[str, Mapping[str, Listed]]) -> bool:
    """Tell whether there is every part of a document's files, whatever is in it."""
    parts = files.get(document.folder, {})
    return all(
        _part(file, number) in parts for file, digest in document.files.items() for number in _numbers(digest.n_bytes)
    )


def _part(file: str, number: int) -> str:
    return f"{file}/{number:06d}"


def _manifest(name: str) -> str:
    return f"{_MANIFESTS}/{name}.json"


def _read_part(file: Path, number: int) -> bytes:
    with file.open("rb") as opened:
        return os.pread(opened.fileno(), PART_BYTES, number * PART_BYTES)


def _write_part(file: Path, number: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        os.pwrite(opened.fileno(), data, number * PART_BYTES)
