"""Export a job's model as a Hugging Face folder: of a finished run, or any version in the weight store."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from rlboost.client import Client
from rlboost.shared.errors import ConfigError, NotFound
from rlboost.shared.files import sync_path
from rlboost.shared.model.folder import declare_dtype, non_weight_files
from rlboost.shared.process.modules import pip_install
from rlboost.terminal import echo

if TYPE_CHECKING:
    import torch

    from rlboost.shared.process.waiting import Waits


# --- An output folder that appears under its name only when complete, and the model or adapter files in it ------------


_FILE_BYTES = 5 << 30
"""Size of a weights file; also the memory used. Larger models are split into several files, as transformers does."""


class NewFolder(NamedTuple):
    """A folder under construction."""

    scratch: Path
    """Temporary location of its files."""
    out: Path
    """Final location."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Translate disk errors.

        Raises:
            ConfigError: says which path failed and what to do.

        """
        try:
            yield
        except OSError as error:
            raise _unwritable(self.out, error.strerror or str(error)) from error


@contextmanager
def new_folder(out: Path, *, force: bool, adapter: bool) -> Iterator[NewFolder]:
    """Create a folder that is renamed to `out` when it is complete.

    Args:
        out: must not exist, or be empty.
        force: if it exists, replace files of the same name, earlier weights and an earlier adapter; keep other files.
        adapter: the folder will hold an adapter.

    Raises:
        ConfigError: `out` exists and is not empty, holds a model to which transformers would add the adapter, or cannot
            be written.

    """
    out = out.absolute()
    try:
        if adapter and (out / "config.json").exists():
            raise ConfigError(f"{out} has a model, to which transformers would add the adapter: choose another --out")
        if not force and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not empty: choose another with --out, or pass --force")
        out.parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent)
    except OSError as error:
        raise _unwritable(out, error.strerror or str(error)) from error
    with place as name:
        to = NewFolder(Path(name) / "folder", out)
        with to.writing():
            to.scratch.mkdir()
        yield to
        with to.writing():
            _move(to, adapter=adapter)


def _move(to: NewFolder, *, adapter: bool) -> None:
    settings, weights = ("adapter_config.json", "adapter_model*") if adapter else ("config.json", "*")
    to.out.mkdir(exist_ok=True)
    # Removed first and moved last: without it the folder is not recognized as a model.
    if (to.out / settings).exists():
        (to.out / settings).replace(to.scratch.parent / settings)
    old_files = (*to.out.glob(f"{weights}.safetensors"), *to.out.glob(f"{weights}.safetensors.index.json"))
    for old in (*old_files, *to.out.glob("adapter_config.json")):
        old.unlink()
    for file in sorted(to.scratch.iterdir(), key=lambda path: path.name == settings):
        sync_path(file)
        file.replace(to.out / file.name)
    sync_path(to.out)


def copy_files(folder: Path, to: NewFolder) -> None:
    """Copy the files of a folder, excluding subfolders.

    Raises:
        ConfigError: one cannot be read or written.

    """
    _copy(folder, lambda: [file for file in folder.iterdir() if file.is_file()], to)


def write_model(base: Path, config_json: str, tensors: Iterable[tuple[str, torch.Tensor]], to: NewFolder) -> None:
    """Write a Hugging Face folder.

    Args:
        base: folder with the files other than the weights.
        config_json: the model's own `config.json`.
        tensors: the weights.
        to: destination.

    Raises:
        ConfigError: a file cannot be read or written.

    """
    _copy(base, lambda: non_weight_files(base), to)
    with to.writing():
        (to.scratch / "config.json").write_text(config_json, encoding="utf-8")
    dtype = _write_tensors(tensors, to, "model")
    with to.writing():
        declare_dtype(to.scratch, dtype)


def write_adapter(adapter_json: str, tensors: Iterable[tuple[str, torch.Tensor]], to: NewFolder) -> None:
    """Write a PEFT folder.

    Raises:
        ConfigError: a file cannot be written.

    """
    with to.writing():
        text = json.dumps(json.loads(adapter_json), indent=2) + "\n"
        (to.scratch / "adapter_config.json").write_text(text, encoding="utf-8")
    _write_tensors(tensors, to, "adapter_model")


def _copy(folder: Path, which: Callable[[], list[Path]], to: NewFolder) -> None:
    place = folder
    try:
        files = which()
        for place in files:
            place.open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be read: {error.strerror or error}: correct that, then run the command again"
        ) from error
    with to.writing():
        for file in files:
            shutil.copyfile(file, to.scratch / file.name)


def _unwritable(out: Path, reason: str) -> ConfigError:
    return ConfigError(f"{out} cannot be written: {reason}: make room, or name another")


def _write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], to: NewFolder, stem: str) -> str:
    """Write .safetensors files; return the dtype of the weights."""
    from safetensors import SafetensorError  # noqa: PLC0415 - only who has torch needs it
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

    dtype, n_bytes, total_bytes = "float32", 0, 0
    batch: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []
    config = to.scratch / ("config.json" if stem == "model" else "adapter_config.json")

    def flush() -> None:
        file = to.scratch / f"{stem}-{len(files)}.safetensors"
        try:
            save_file(batch, file, metadata={"format": "pt"})
            shutil.copymode(config, file)  # a temporary folder is readable by its owner only
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            raise _unwritable(to.out, str(error)) from error
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
    with to.writing():
        _name(files, total_bytes, to.scratch, stem)
    return dtype


def _name(files: list[list[str]], total_bytes: int, scratch: Path, stem: str) -> None:
    """Rename the files to include their number, and write the index if there are several."""
    if len(files) == 1:
        (scratch / f"{stem}-0.safetensors").rename(scratch / f"{stem}.safetensors")
        return
    places: dict[str, str] = {}
    for i, names in enumerate(files):
        name = f"{stem}-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (scratch / f"{stem}-{i}.safetensors").rename(scratch / name)
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (scratch / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


# --- The export -------------------------------------------------------------------------------------------------------


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
    spec: dict[str, Any]
    """The resolved job file."""
    state: str = "completed"
    """The state of the job."""
    certificate: tuple[str, str] | None = None
    """That of the run's record, and the key that signed it; None without a valid record."""


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
    try:
        spec = json.loads((folder.parent / "job.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        spec = {}  # an export does not need it
    return Exported(str(folder), None, spec, certificate=_certificate(folder.parent))


def _certificate(run: Path) -> tuple[str, str] | None:
    if not (run / "record").is_dir():
        return None
    try:
        from rlboost.verify import check  # noqa: PLC0415 - its libraries are extras
    except ImportError as error:
        raise ConfigError(f"export {_NEEDS}") from error
    record = check(run)
    if record.problems:
        problem = f"{record.problems[0]}: the model card does not name it; see 'rlboost verify-run {run}'"
        echo(f"rlboost: warning: the record of the run does not match: {problem}", err=True)
        return None
    if record.end is None:
        echo("rlboost: warning: the record of the run has no end: the model card has no certificate", err=True)
        return None
    return record.head, record.key


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
    state = client.jobs.show(request.job_id)["state"]
    return Exported(f"version {version} of {request.job_id}", version, spec, state)


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
        from rlboost.shared.weights.cache import Cache, cached_version  # noqa: PLC0415 - likewise
        from rlboost.shared.weights.client import StoreClient  # noqa: PLC0415 - likewise
        from rlboost.shared.weights.puller import Puller  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise ConfigError(f"export {_NEEDS}") from error
    async with StoreClient(url, token) as client:
        stored = await client.model(request.job_id)
        version = _choose(request, [] if stored is None else [one.version for one in stored.versions])
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
            echo(f"rlboost: {wait.because}", err=True)


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
