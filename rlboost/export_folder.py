"""An output folder that appears under its name only when complete, and the model or adapter files in it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import declare_dtype, non_weight_files

if TYPE_CHECKING:
    import torch

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
        force: if it exists, replace files of the same name and earlier weights; keep other files.
        adapter: the folder will hold an adapter; earlier weights are those of an adapter.

    Raises:
        ConfigError: `out` exists and is not empty, or cannot be written.

    """
    out = out.absolute()
    try:
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
    for old in (*to.out.glob(f"{weights}.safetensors"), *to.out.glob(f"{weights}.safetensors.index.json")):
        old.unlink()
    for file in sorted(to.scratch.iterdir(), key=lambda path: path.name == settings):
        file.replace(to.out / file.name)


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
