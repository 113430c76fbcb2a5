"""A job's model as a Hugging Face folder: of a finished run, or any version that the weight store keeps."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from rlboost.client import Client, ClientError
from shared.errors import ConfigError, NotFound
from shared.model_folder import copy_without_weights, declare_dtype

if TYPE_CHECKING:
    import torch

    from shared.weights.pulled import PulledVersion

_FILE_BYTES = 5 << 30
"""A larger model is cut into several files, as transformers does it; so much is held in memory."""
_PULL_LIMIT_S = 3600.0
_NOT_FOUND = 404
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


@contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Make a folder that gets the name `out` when it is whole.

    Args:
        out: what must not be there, or be empty.
        force: where it is, replace the files that have new ones, and weights of before; leave the rest.

    Raises:
        ConfigError: it is there and not empty, or it cannot be written.

    """
    out = out.absolute()
    try:
        if not force and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} is there and not empty: name another with --out, or give --force")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place:
            aside = Path(place) / "folder"
            aside.mkdir()
            yield aside
            out.mkdir(exist_ok=True)
            for old in (*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")):
                old.unlink()
            # config.json last: without it nobody takes the folder for a model.
            for file in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
                file.replace(out / file.name)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}: make room, or name another") from error


def finished(runs: Path, wanted: Wanted) -> Path | None:
    """Return the folder that a finished run has left here, None where there is none or a version is asked for."""
    folder = runs / wanted.job_id / ("adapter" if wanted.adapter else "model")
    return folder if wanted.version is None and folder.is_dir() else None


def copy(folder: Path, aside: Path) -> Exported:
    """Copy what a finished run has left."""
    for file in folder.iterdir():
        shutil.copyfile(file, aside / file.name)
    return Exported(str(folder), None)


def from_store(client: Client, wanted: Wanted, store_url: str, token: str, model: Path | None, aside: Path) -> Exported:
    """Write a version of the weight store.

    Args:
        client: of the manager, which knows the job.
        wanted: what.
        store_url: the weight store's; empty: the one that the manager tells workers.
        token: of both.
        model: folder with the tokenizer and settings of the job's model; None: where the job file says.
        aside: an empty folder to write into.

    Raises:
        ConfigError: there is no such job or version, or something is missing on this machine.

    """
    try:
        spec = client.jobs.spec(wanted.job_id)
    except ClientError as error:
        if error.status != _NOT_FOUND:
            raise
        raise ConfigError(f"there is no job {wanted.job_id!r}: 'rlboost ps' lists them") from error
    url = store_url or client.request("GET", "/join").json()["weight_store_url"]
    base = None if wanted.adapter else _base(model, spec["model"])
    with _warnings_only():
        version = asyncio.run(_pulled(url, token, wanted, base, aside))
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


async def _pulled(url: str, token: str, wanted: Wanted, base: Path | None, aside: Path) -> int:
    try:
        from services.rollout_worker.adapters import torch_tensors  # noqa: PLC0415 - torch takes seconds
        from services.rollout_worker.adapters.store_weights import AdaptedVersion, StoredVersion  # noqa: PLC0415
        from shared.waiting import Waits  # noqa: PLC0415
        from shared.weights.cache import Cache  # noqa: PLC0415
        from shared.weights.client import StoreClient  # noqa: PLC0415
        from shared.weights.puller import Puller  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"export {_NEEDS}") from error
    async with StoreClient(url, token) as client:
        version = _choose(wanted, await _kept(client, wanted.job_id))
        cache = Cache(aside.parent / "pulled")
        puller = Puller(client, cache, Waits(), limit_s=_PULL_LIMIT_S)
        try:
            pulled = await puller.pull(wanted.job_id, version)
            if base is None:
                if pulled.base is None:
                    raise ConfigError(f"version {version} of {wanted.job_id} is no adapter: leave --adapter out")
                await asyncio.to_thread(_write_adapter, pulled, torch_tensors.tensors(pulled), aside)
            else:
                staged = StoredVersion(pulled) if pulled.base is None else AdaptedVersion(pulled, pulled.base)
                await asyncio.to_thread(_write_model, base, staged.config_json, staged.tensors(), aside)
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
        raise ConfigError(f"{wanted.job_id} has no weights in the store yet: its first version comes when it starts")
    if wanted.version is None:
        return kept[-1]
    if wanted.version not in kept:
        numbers = ", ".join(map(str, kept))
        raise ConfigError(f"version {wanted.version} of {wanted.job_id} is not kept, but these are: {numbers}")
    return wanted.version


def _write_model(base: Path, config_json: str, tensors: Iterable[tuple[str, torch.Tensor]], aside: Path) -> None:
    copy_without_weights(base, aside)
    (aside / "config.json").write_text(config_json, encoding="utf-8")
    dtype = _write_tensors(tensors, aside, "model")
    declare_dtype(aside, dtype)


def _write_adapter(pulled: PulledVersion, tensors: Iterable[tuple[str, torch.Tensor]], aside: Path) -> None:
    config = json.loads(pulled.manifest.adapter_json)
    (aside / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_tensors(tensors, aside, "adapter_model")


def _write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], aside: Path, stem: str) -> str:
    """Write .safetensors files; return the dtype of the weights."""
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

    dtype, n_bytes, total_bytes = "float32", 0, 0
    batch: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []

    def flush() -> None:
        save_file(batch, aside / f"{stem}-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(batch))
        batch.clear()

    for name, tensor in tensors:
        if tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
        if batch and n_bytes + tensor.nbytes > _FILE_BYTES:
            flush()
            n_bytes = 0
        batch[name] = tensor
        n_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    _name(files, total_bytes, aside, stem)
    return dtype


def _name(files: list[list[str]], total_bytes: int, aside: Path, stem: str) -> None:
    """Give the files their names, which say how many there are, and where there are several their index."""
    if len(files) == 1:
        (aside / f"{stem}-0.safetensors").rename(aside / f"{stem}.safetensors")
        return
    places: dict[str, str] = {}
    for i, names in enumerate(files):
        name = f"{stem}-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (aside / f"{stem}-{i}.safetensors").rename(aside / name)
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (aside / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
