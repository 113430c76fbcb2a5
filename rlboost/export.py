"""A job's model as a Hugging Face folder: of a finished run, or any version that the weight store keeps."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from rlboost.client import Client
from rlboost.export_folder import NewFolder, copy_files, write_adapter, write_model
from shared.errors import ConfigError, NotFound

_PULL_LIMIT_S = 3600.0
_NEEDS = "needs torch and transformers on this machine: pip install 'rlboost[worker]'"
_SMALL_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]


class Wanted(NamedTuple):
    """What is to be exported."""

    job_id: str
    version: int | None
    """None: the newest."""
    adapter: bool
    """The adapter alone, as a PEFT folder."""


class Exported(NamedTuple):
    """What was exported."""

    source: str
    """For people: a folder, or a version."""
    version: int | None
    """None: what a finished run left."""


def finished(runs: Path, wanted: Wanted) -> Path | None:
    """Return the folder that a finished run has left here, None where there is none or a version is asked for."""
    folder = runs / wanted.job_id / ("adapter" if wanted.adapter else "model")
    return folder if wanted.version is None and folder.is_dir() else None


def copy(folder: Path, to: NewFolder) -> Exported:
    """Copy what a finished run has left.

    Raises:
        ConfigError: a file cannot be read or written.

    """
    copy_files(folder, to)
    return Exported(str(folder), None)


def from_store(
    client: Client, wanted: Wanted, store_url: str, token: str, model: Path | None, to: NewFolder
) -> Exported:
    """Write a version of the weight store.

    Args:
        client: of the manager, which knows the job.
        wanted: what.
        store_url: the weight store's; empty: the one that the manager tells workers.
        token: of both.
        model: folder with the tokenizer and settings of the job's model; None: where the job file says.
        to: an empty folder to write into.

    Raises:
        ClientError: the manager knows no such job, or does not answer.
        ConfigError: there is no such version, something is missing on this machine, or a file cannot be read or
            written.

    """
    spec = client.jobs.spec(wanted.job_id)
    url = store_url or client.request("GET", "/join").json()["weight_store_url"]
    base = None if wanted.adapter else _base(model, spec["model"])
    with _warnings_only():
        version = asyncio.run(_pulled(url, token, wanted, base, to))
    return Exported(f"version {version} of {wanted.job_id}", version)


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Keep what a service would log off the command's output."""
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
    """Return the folder that has the files of a model beside its weights."""
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
        except Exception as error:  # the network, the service, and what they raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"Hugging Face does not give the files of {model} ({reason}): {_name_it(model)}"
            ) from error
    raise ConfigError(f"the job's model {model} is on another machine: {_name_it(model)}")


def _name_it(model: str) -> str:
    return (
        f"its tokenizer and settings belong into the export; copy {model} here, the weights are not needed, and name "
        "the copy with --model"
    )


async def _pulled(url: str, token: str, wanted: Wanted, base: Path | None, to: NewFolder) -> int:
    try:
        from shared.waiting import Waits  # noqa: PLC0415 - torch takes seconds
        from shared.weights import torch_tensors  # noqa: PLC0415
        from shared.weights.cache import Cache  # noqa: PLC0415
        from shared.weights.client import StoreClient  # noqa: PLC0415
        from shared.weights.puller import Puller  # noqa: PLC0415
        from shared.weights.stored import stored_version  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"export {_NEEDS}") from error
    async with StoreClient(url, token) as client:
        version = _choose(wanted, await _kept(client, wanted.job_id))
        cache = Cache(to.aside.parent / "pulled")
        puller = Puller(client, cache, Waits(), limit_s=_PULL_LIMIT_S)
        try:
            pulled = await puller.pull(wanted.job_id, version)
            if base is None:
                if pulled.base is None:
                    raise ConfigError(f"version {version} of {wanted.job_id} is no adapter: leave --adapter out")
                await asyncio.to_thread(write_adapter, pulled.manifest.adapter_json, torch_tensors.tensors(pulled), to)
            else:
                stored = stored_version(pulled)
                await asyncio.to_thread(write_model, base, stored.config_json, stored.tensors(), to)
        except NotFound as error:
            raise ConfigError(f"version {version} was removed just now: ask again ({error})") from error
        finally:
            puller.close()
    return version


async def _kept(client: Any, job_id: str) -> list[int]:
    model = await client.model(job_id)
    return [] if model is None else [version.version for version in model.versions]


def _choose(wanted: Wanted, kept: list[int]) -> int:
    if not kept:
        raise ConfigError(
            f"{wanted.job_id} has no weights in the store: the first comes when it starts, see 'rlboost status'"
        )
    if wanted.version is None:
        return kept[-1]
    if wanted.version not in kept:
        numbers = ", ".join(map(str, kept))
        raise ConfigError(f"version {wanted.version} of {wanted.job_id} is not kept, but these are: {numbers}")
    return wanted.version
