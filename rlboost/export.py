"""Export a job's model as a Hugging Face folder: of a finished run, or any version in the weight store."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from rlboost.client import Client
from rlboost.export_folder import NewFolder, copy_files, write_adapter, write_model
from rlboost.shared.errors import ConfigError, NotFound
from rlboost.shared.process.extras import pip_install

if TYPE_CHECKING:
    from rlboost.shared.process.waiting import Waits

_PULL_LIMIT_S = 3600.0
_SHOW_EVERY_S = 2.0
_NEEDS = f"needs torch and transformers on this machine: {pip_install('worker')}"
_SMALL_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]


class ExportRequest(NamedTuple):
    """What to export."""

    job_id: str
    version: int | None
    """None for the newest."""
    adapter: bool
    """The adapter alone, as a PEFT folder."""


class Exported(NamedTuple):
    """The result of an export."""

    source: str
    """A folder or a version, for display."""
    version: int | None
    """None for the result of a finished run."""


def finished(runs: Path, request: ExportRequest) -> Path | None:
    """Return the folder that a finished run wrote here; None if there is none or a version is requested."""
    folder = runs / request.job_id / ("adapter" if request.adapter else "model")
    return folder if request.version is None and folder.is_dir() else None


def copy(folder: Path, to: NewFolder) -> Exported:
    """Copy the result of a finished run.

    Raises:
        ConfigError: a file cannot be read or written.

    """
    copy_files(folder, to)
    return Exported(str(folder), None)


def from_store(
    client: Client, request: ExportRequest, store_url: str, token: str, model: Path | None, to: NewFolder
) -> Exported:
    """Write a version of the weight store.

    Args:
        client: connected to the manager that has the job.
        request: what to export.
        store_url: URL of the weight store; empty for the one that the manager advertises to workers.
        token: bearer token of both.
        model: folder with the tokenizer and configuration of the job's model; None for the job file's `model`.
        to: an empty folder to write into.

    Raises:
        ClientError: the manager has no such job, or does not answer.
        ConfigError: the version does not exist, a required package or file is missing, or a file cannot be read or
            written.

    """
    spec = client.jobs.spec(request.job_id)
    url = store_url or client.request("GET", "/weights").json()["store_url"]
    base = None if request.adapter else _base(model, spec["model"])
    with _warnings_only():
        version = asyncio.run(_pulled(url, token, request, base, to))
    return Exported(f"version {version} of {request.job_id}", version)


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Suppress service logs below warnings in the command's output."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _base(given: Path | None, model: str) -> Path:
    """Return the folder with the model's files other than its weights."""
    folder = given or Path(model)
    if (folder / "config.json").is_file():
        return folder
    if given is not None:
        raise ConfigError(f"--model {given} has no config.json: name a Hugging Face model directory")
    if not folder.is_absolute():
        try:
            from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(f"export {_NEEDS}") from error
        try:
            return Path(snapshot_download(model, allow_patterns=_SMALL_FILES))
        except Exception as error:  # errors of the network or the hub
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"Hugging Face did not provide the files of {model} ({reason}): {_naming_hint(model)}"
            ) from error
    raise ConfigError(f"the job's model {model} is on another machine: {_naming_hint(model)}")


def _naming_hint(model: str) -> str:
    return (
        f"its tokenizer and settings belong into the export; copy {model} here, the weights are not needed, and name "
        "the copy with --model"
    )


async def _pulled(url: str, token: str, request: ExportRequest, base: Path | None, to: NewFolder) -> int:
    try:
        from rlboost.shared.process.waiting import Waits  # noqa: PLC0415 - torch takes seconds
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - likewise
        from rlboost.shared.weights.cache import Cache  # noqa: PLC0415 - likewise
        from rlboost.shared.weights.cached_version import cached_version  # noqa: PLC0415 - likewise
        from rlboost.shared.weights.client import StoreClient  # noqa: PLC0415 - likewise
        from rlboost.shared.weights.puller import Puller  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise ConfigError(f"export {_NEEDS}") from error
    async with StoreClient(url, token) as client:
        version = _choose(request, await _retained_versions(client, request.job_id))
        cache = Cache(to.scratch.parent / "pulled")
        waits = Waits()
        puller = Puller(client, cache, waits, limit_s=_PULL_LIMIT_S)
        try:
            showing = asyncio.create_task(_show(waits), name="export-progress")
            try:
                pulled = await puller.pull(request.job_id, version)
            finally:
                showing.cancel()
            if base is None:
                if pulled.base is None:
                    raise ConfigError(f"version {version} of {request.job_id} is not an adapter: omit --adapter")
                await asyncio.to_thread(write_adapter, pulled.manifest.adapter_json, torch_tensors.tensors(pulled), to)
            else:
                model = cached_version(pulled)
                await asyncio.to_thread(write_model, base, model.config_json, model.tensors(), to)
        except NotFound as error:
            raise ConfigError(f"version {version} was removed just now: run the command again ({error})") from error
        finally:
            puller.close()
    return version


async def _show(waits: Waits) -> None:
    """Print to standard error, every few seconds, how far the pull is; runs until it is cancelled."""
    while True:
        await asyncio.sleep(_SHOW_EVERY_S)
        for wait in waits.current():
            print(f"rlboost: {wait.because}", file=sys.stderr, flush=True)


async def _retained_versions(client: Any, job_id: str) -> list[int]:
    model = await client.model(job_id)
    return [] if model is None else [version.version for version in model.versions]


def _choose(request: ExportRequest, retained: list[int]) -> int:
    if not retained:
        raise ConfigError(
            f"{request.job_id} has no weights in the store: the first comes when it starts, see 'rlboost status'"
        )
    if request.version is None:
        return retained[-1]
    if request.version not in retained:
        numbers = ", ".join(map(str, retained))
        raise ConfigError(f"version {request.version} of {request.job_id} is not retained; available: {numbers}")
    return request.version
