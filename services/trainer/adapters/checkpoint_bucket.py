"""Checkpoints in an object store, and which place has those of a job: a local folder or an object store."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import structlog

from rlboost.services.trainer.adapters.checkpoint_folder import (
    CORRUPT_ERRORS,
    MANIFEST_FILE,
    N_RETAINED,
    CheckpointFolder,
    Manifest,
    is_stale,
    name_of,
    no_valid_checkpoint,
    read,
    step_of,
    unique_name,
)
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.services.trainer.ports.storage import CheckpointStore, TrainState
from rlboost.shared.bucket import SCHEMES, Bucket, Listed, NoCredentials, Refused, configuration
from rlboost.shared.errors import ConfigError, Fatal, NotFound, StoreUnavailable
from rlboost.shared.files import write_error
from rlboost.shared.ids import new_token
from rlboost.shared.job.training import RESUME_WORDS
from rlboost.shared.process.waiting import for_each, retry_while
from rlboost.shared.progress import TransferProgress

log = structlog.get_logger(__name__)

# --- Checkpoints in an object store, for a trainer that may resume on another machine ---------------------------------
#     manifests/step-000010-006ba3c1d21f2e3d4c.json      the manifest, written last: without it there is no checkpoint
#     files/step-000010-006ba3c1d21f2e3d4c/optimizer.safetensors/000003    a part of a file
#
# Files are split into parts, each a whole object. So a killed trainer leaves objects that a later checkpoint finds and
# removes, rather than an unfinished multipart upload, which costs money and is not listed.
#
# Two trainers may write at once: one that was presumed dead, and its successor. So each save has a unique name, also of
# its manifest, and no trainer replaces another's objects. After the step the name has the time at which the trainer
# started: if both have saved a step, the successor's checkpoint counts. Files without a manifest are removed once none
# of them has been written for an hour: until then their manifest may still follow.


PART_BYTES = 16 << 20
CONCURRENCY = 8
"""Parts in transfer at a time. A link of 54 Mb/s sends them within the 20 s that a request may take."""
_MANIFESTS, _FILES = "manifests", "files"
_PROBE = "probe"
_STALE_S = 3600.0
"""Age at which a scratch folder is one that a killed trainer has left."""
_EXPIRY_S = 3600.0
"""Longest time between the last of a checkpoint's files and its manifest, by the object store's clock."""

T = TypeVar("T")


class CheckpointBucket:
    """`CheckpointStore` under a URL. The engine's files pass through a local folder."""

    def __init__(self, url: str, scratch: Path, limit_s: float) -> None:
        """Describe the folder in the bucket; the first call connects.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`, for this job alone.
            scratch: parent of scratch folders; other processes may use it, too.
            limit_s: how long the object store may be unavailable.

        Raises:
            ConfigError: the URL is invalid.

        """
        self._bucket = Bucket(url)
        self._scratch = scratch
        self._limit_s = limit_s
        self._transfer = TransferProgress()
        """The present upload or download."""
        self._started_at = 0
        """When this trainer started, in seconds by the object store's clock; 0 until it has asked."""

    def save(self, state: TrainState, write: Snapshot) -> None:
        name = name_of(state.step)
        self._transfer = TransferProgress()
        try:
            self._remove_stale(state.step)
            with self._scratch_folder(state.step) as directory:
                write(directory)
                asyncio.run(self._save(directory, state))
        except (OSError, StoreUnavailable, NotFound) as error:
            raise write_error(
                error,
                f"checkpoint {name} cannot be written to {self._bucket.url}: {error}; repair the object store or free "
                f"space in {self._scratch}. Earlier checkpoints are complete",
            ) from error

    def newest(self) -> tuple[TrainState, Path] | None:
        """See `CheckpointStore.newest`. Also checks that the bucket is writable."""
        return asyncio.run(self._newest(may_write=True))

    def download(self, name: str = "") -> tuple[TrainState, Path] | None:
        """Download one checkpoint, by default the newest that verifies; return None if there is none.

        Raises:
            ConfigError, Corrupt, StoreUnavailable: see `newest`.

        """
        return asyncio.run(self._newest(may_write=False, only=name))

    def fallback(self) -> TrainState | None:
        return asyncio.run(self._fallback())

    def progress(self) -> str:
        return self._transfer.text()

    def _remove_stale(self, step: int) -> None:
        """Remove scratch folders of earlier steps, downloads among them, and stale ones."""
        for folder in self._scratch.glob("*"):
            with suppress(FileNotFoundError):  # removed by another process
                if is_stale(folder.name, step) or time.time() - folder.stat().st_mtime > _STALE_S:
                    shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _scratch_folder(self, step: int, *, keep: bool = False) -> Iterator[Path]:
        """Yield an empty folder and remove it afterwards; with `keep`, only after an error."""
        directory = self._scratch / unique_name(step)
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
        if not self._started_at:
            await self._read_store_clock()
        folder = f"{name_of(state.step)}-{self._started_at:010x}{new_token()}"
        manifest = await asyncio.to_thread(Manifest.of, directory, state, folder)
        self._begin_transfer(manifest)
        await for_each(
            _parts(manifest),
            lambda part: self._upload(directory, folder, *part),
            concurrency=CONCURRENCY,
            name="checkpoint-upload",
        )
        await self._retry_until_ok(lambda: self._bucket.put(_manifest_path(folder), manifest.encode().encode()))
        await self._remove_old(manifest)

    async def _read_store_clock(self) -> None:
        """Read the object store's clock, and check that the bucket is writable."""
        probe = new_token()
        await self._retry_until_ok(lambda: self._bucket.put(f"{_PROBE}/{probe}", b""))
        probes = await self._retry_until_ok(lambda: self._bucket.objects(_PROBE))
        now = probes[probe].modified
        # Greater than the last: what this trainer saves from now on must sort after what it has listed.
        self._started_at = max(int(now), self._started_at + 1)
        await self._remove([f"{_PROBE}/{name}" for name, it in probes.items() if name == probe or _is_expired(it, now)])

    async def _upload(self, directory: Path, folder: str, file: str, number: int) -> None:
        data = await asyncio.to_thread(_read_part, directory / file, number)
        await self._retry_until_ok(lambda: self._bucket.put(f"{_FILES}/{folder}/{_part(file, number)}", data))
        self._transfer.done_bytes += len(data)

    def _begin_transfer(self, manifest: Manifest) -> None:
        self._transfer = TransferProgress()
        self._transfer.total_bytes = sum(digest.n_bytes for digest in manifest.files.values())

    async def _remove_old(self, newest: Manifest) -> None:
        """Remove all but the newest checkpoints, and files of earlier steps that no checkpoint has, of killed trainers.

        Raises:
            Fatal: `newest` or its files were removed by another process.

        """
        names = await self._names()
        files = await self._files()  # after the names: a manifest's files were written before it
        retained = [name for name, _ in await self._retained(names, files)]
        old = [name for name in names if name not in retained and _step(name) <= newest.state.step]
        await self._remove([_manifest_path(name) for name in old])
        now = max((found.modified for found in names.values()), default=0.0)
        for folder, parts in files.items():
            stale = is_stale(folder, newest.state.step) and all(_is_expired(part, now) for part in parts.values())
            if folder in old or (stale and folder not in names):
                await self._remove([f"{_FILES}/{folder}/{part}" for part in parts])
        if newest.folder not in names or not _has_all_files(newest, files):
            raise Fatal(
                f"files of checkpoint {newest.folder} were removed from {self._bucket.url} while it was written: look "
                "for another trainer of this job, or a lifecycle rule of the bucket. Earlier checkpoints are complete"
            )

    async def _retained(
        self, names: Iterable[str], files: Mapping[str, Mapping[str, Listed]]
    ) -> list[tuple[str, Manifest]]:
        """Return the newest `N_RETAINED` checkpoints that have all their files, at most one per step."""
        retained: dict[int, tuple[str, Manifest]] = {}
        for name in names:
            if len(retained) == N_RETAINED:
                break
            try:
                manifest = await self._read_manifest(name)
            except (*CORRUPT_ERRORS, NotFound):
                continue
            if _has_all_files(manifest, files):
                retained.setdefault(_step(name), (name, manifest))
        return list(retained.values())

    async def _remove(self, paths: Sequence[str]) -> None:
        if paths:
            await self._retry_until_ok(lambda: self._bucket.remove(paths))

    # --- reading ---

    async def _newest(self, *, may_write: bool, only: str = "") -> tuple[TrainState, Path] | None:
        with configuration():
            if may_write:
                await self._read_store_clock()
            names = [name for name in await self._names() if not only or _step(name) == step_of(only)]
        for name in names:
            try:
                return await self._download_files(await self._read_manifest(name))
            except (*CORRUPT_ERRORS, NotFound) as error:
                where = f"{self._bucket.url}/{_manifest_path(name)}"
                log.warning("checkpoint_corrupt", directory=where, reason=str(error) or repr(error))
        if names:
            raise no_valid_checkpoint(self._bucket.url, list(dict.fromkeys(name_of(_step(name)) for name in names)))
        return None

    async def _download_files(self, manifest: Manifest) -> tuple[TrainState, Path]:
        self._remove_stale(0)
        self._begin_transfer(manifest)
        try:
            with self._scratch_folder(manifest.state.step, keep=True) as directory:
                for name, digest in manifest.files.items():
                    with (directory / name).open("wb") as file:
                        file.truncate(digest.n_bytes)
                await for_each(
                    _parts(manifest),
                    lambda part: self._download(directory, manifest.folder, *part),
                    concurrency=CONCURRENCY,
                    name="checkpoint-download",
                )
                await asyncio.to_thread(manifest.verify, directory)
        except OSError as error:
            raise Fatal(f"the checkpoint cannot be written to {self._scratch}: {error}; free space there") from error
        return manifest.state, directory

    async def _download(self, directory: Path, folder: str, file: str, number: int) -> None:
        found = await self._retry_until_ok(lambda: self._bucket.get(f"{_FILES}/{folder}/{_part(file, number)}"))
        await asyncio.to_thread(_write_part, directory / file, number, found.data)
        self._transfer.done_bytes += len(found.data)

    async def _fallback(self) -> TrainState | None:
        names = await self._names()
        retained = await self._retained(names, await self._files())
        return retained[-1][1].state if len(retained) == N_RETAINED else None

    async def _read_manifest(self, name: str) -> Manifest:
        return Manifest.decode((await self._retry_until_ok(lambda: self._bucket.get(_manifest_path(name)))).data)

    async def _names(self) -> dict[str, Listed]:
        """Return the manifests' names: newest step first, and within a step the latest trainer first."""
        found = await self._retry_until_ok(lambda: self._bucket.objects(_MANIFESTS))
        names = {file.removesuffix(".json"): listed for file, listed in found.items()}
        return {name: names[name] for name in sorted(names, key=lambda name: (_step(name), name), reverse=True)}

    async def _files(self) -> dict[str, dict[str, Listed]]:
        """Return the objects in each folder of files."""
        folders: dict[str, dict[str, Listed]] = {}
        for path, listed in (await self._retry_until_ok(lambda: self._bucket.objects(_FILES))).items():
            folder, _, part = path.partition("/")
            folders.setdefault(folder, {})[part] = listed
        return folders

    async def _retry_until_ok(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make an idempotent call, and repeat it while the object store is unavailable, for up to `limit_s`."""
        return await retry_while(_is_transient, call, limit_s=self._limit_s)


def _is_transient(error: Exception) -> bool:
    return isinstance(error, StoreUnavailable) and not isinstance(error, Refused | NoCredentials)


def _parts(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Yield (file, number) of all parts of a checkpoint; an empty file has no parts."""
    for file, digest in manifest.files.items():
        for number in range(-(-digest.n_bytes // PART_BYTES)):
            yield file, number


def _step(name: str) -> int:
    """Return the step of a manifest by its name, which is that of its files' folder."""
    return step_of(name.rpartition("-")[0])


def _is_expired(listed: Listed, now: float) -> bool:
    return now - listed.modified >= _EXPIRY_S


def _has_all_files(manifest: Manifest, files: Mapping[str, Mapping[str, Listed]]) -> bool:
    """Return True if all parts of a manifest's files exist; their content is not checked."""
    parts = files.get(manifest.folder, {})
    return all(_part(file, number) in parts for file, number in _parts(manifest))


def _part(file: str, number: int) -> str:
    return f"{file}/{number:06d}"


def _manifest_path(name: str) -> str:
    return f"{_MANIFESTS}/{name}.json"


def _read_part(file: Path, number: int) -> bytes:
    with file.open("rb") as opened:
        return os.pread(opened.fileno(), PART_BYTES, number * PART_BYTES)


def _write_part(file: Path, number: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        os.pwrite(opened.fileno(), data, number * PART_BYTES)


# --- Which place has a job's checkpoints: a local folder, or an object store ------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointLocations:
    """Builds the checkpoint store of a job, and finds checkpoints of other jobs."""

    folder: Path
    """The job's folder."""
    limit_s: float
    """How long an object store may be unavailable."""

    def store(self, where: str, job_id: str) -> CheckpointStore:
        """Return the store of a job's checkpoints.

        Args:
            where: a folder or URL, under which each job has a folder of its own; empty for the job's folder.
            job_id: the job.

        Raises:
            ConfigError: `where` is neither.

        """
        if not where:
            return CheckpointFolder(self.folder / "checkpoints")
        if _is_url(where, "trainer.checkpoints"):
            return CheckpointBucket(f"{where.rstrip('/')}/{job_id}", self.folder / "checkpoint", self.limit_s)
        return CheckpointFolder(Path(where) / job_id)

    def predecessor(self, resume: str) -> Callable[[], tuple[TrainState, Path]] | None:
        """Return a function that fetches the checkpoint that `trainer.resume` names; None if it names none.

        Raises:
            ConfigError: `trainer.resume` is not a path, a supported URL, or one of its words.

        """
        if resume in RESUME_WORDS:
            return None
        if _is_url(resume, "trainer.resume"):
            return lambda: self._from_bucket(resume.rstrip("/"))
        return lambda: _from_folder(Path(resume))

    def _from_bucket(self, url: str) -> tuple[TrainState, Path]:
        parent, _, name = url.rpartition("/")
        if step_of(name) < 0:
            parent, name = url, ""
        found = CheckpointBucket(parent, self.folder / "checkpoint", self.limit_s).download(name)
        if found is None:
            raise _no_checkpoint_at(url)
        return found


def _from_folder(given: Path) -> tuple[TrainState, Path]:
    """Return the given checkpoint, or the newest in a folder of checkpoints or in a job's folder."""
    if (given / MANIFEST_FILE).is_file():
        try:
            return read(given), given
        except CORRUPT_ERRORS as error:
            raise ConfigError(f"trainer.resume: checkpoint {given} is corrupt: {error}; name another") from error
    subfolder = given / "checkpoints"
    found = CheckpointFolder(subfolder if subfolder.is_dir() else given).newest()
    if found is None:
        raise _no_checkpoint_at(str(given))
    return found


def _no_checkpoint_at(place: str) -> ConfigError:
    return ConfigError(
        f"trainer.resume: no checkpoint at {place}: give auto, never, or a checkpoint of another job (its "
        "folder .rlboost/runs/JOB, its checkpoints, or one of them, as a path on the trainer's machine or a URL)"
    )


def _is_url(where: str, field: str) -> bool:
    if "://" not in where:
        return False
    if (scheme := urlsplit(where).scheme) not in SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(SCHEMES - {"memory"}))
        raise ConfigError(f"{field}: {scheme}:// is not supported: give a folder, or a URL that starts with {known}")
    return True
