"""A folder that gets its name when it is whole, and the files of a model or an adapter in it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shared.errors import ConfigError
from shared.model_folder import declare_dtype, files_beside_weights

if TYPE_CHECKING:
    import torch

_FILE_BYTES = 5 << 30
"""A larger model is cut into several files, as transformers does it; so much is held in memory."""


class NewFolder(NamedTuple):
    """A folder that is being made."""

    aside: Path
    """Where its files are written."""
    out: Path
    """What its name will be."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Tell what the disk refuses.

        Raises:
            ConfigError: in words for people.

        """
        try:
            yield
        except OSError as error:
            raise _unwritable(self.out, error.strerror or str(error)) from error


@contextmanager
def new_folder(out: Path, *, force: bool, adapter: bool) -> Iterator[NewFolder]:
    """Make a folder that gets the name `out` when it is whole.

    Args:
        out: what must not be there, or be empty.
        force: where it is, replace the files that have new ones, and weights of before; leave the rest.
        adapter: it will hold an adapter; weights of before are an adapter's, too.

    Raises:
        ConfigError: it is there and not empty, or it cannot be written.

    """
    out = out.absolute()
    try:
        if not force and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} is there and not empty: name another with --out, or give --force")
        out.parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent)
    except OSError as error:
        raise _unwritable(out, error.strerror or str(error)) from error
    with place as name:
        to = NewFolder(Path(name) / "folder", out)
        with to.writing():
            to.aside.mkdir()
        yield to
        with to.writing():
            _move(to, adapter=adapter)


def _move(to: NewFolder, *, adapter: bool) -> None:
    settings, weights = ("adapter_config.json", "adapter_model*") if adapter else ("config.json", "*")
    to.out.mkdir(exist_ok=True)
    # It goes first and comes last: without it nobody takes the folder for a model.
    if (to.out / settings).exists():
        (to.out / settings).replace(to.aside.parent / settings)
    for old in (*to.out.glob(f"{weights}.safetensors"), *to.out.glob(f"{weights}.safetensors.index.json")):
        old.unlink()
    for file in sorted(to.aside.iterdir(), key=lambda path: path.name == settings):
        file.replace(to.out / file.name)


def copy_files(folder: Path, to: NewFolder) -> None:
    """Copy the files of a folder, not what is in folders in it.

    Raises:
        ConfigError: one cannot be read or written.

    """
    _copy(folder, lambda: [file for file in folder.iterdir() if file.is_file()], to)


def write_model(base: Path, config_json: str, tensors: Iterable[tuple[str, torch.Tensor]], to: NewFolder) -> None:
    """Write a Hugging Face folder.

    Args:
        base: folder that has the files beside the weights.
        config_json: the model's own `config.json`.
        tensors: the weights.
        to: where.

    Raises:
        ConfigError: a file cannot be read or written.

    """
    _copy(base, lambda: files_beside_weights(base), to)
    with to.writing():
        (to.aside / "config.json").write_text(config_json, encoding="utf-8")
    dtype = _write_tensors(tensors, to, "model")
    with to.writing():
        declare_dtype(to.aside, dtype)


def write_adapter(adapter_json: str, tensors: Iterable[tuple[str, torch.Tensor]], to: NewFolder) -> None:
    """Write a PEFT folder.

    Raises:
        ConfigError: a file cannot be written.

    """
    with to.writing():
        text = json.dumps(json.loads(adapter_json), indent=2) + "\n"
        (to.aside / "adapter_config.json").write_text(text, encoding="utf-8")
    _write_tensors(tensors, to, "adapter_model")


def _copy(folder: Path, which: Callable[[], list[Path]], to: NewFolder) -> None:
    place = folder
    try:
        files = which()
        for place in files:
            place.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror or error}: mend that and ask again") from error
    with to.writing():
        for file in files:
            shutil.copyfile(file, to.aside / file.name)


def _unwritable(out: Path, reason: str) -> ConfigError:
    return ConfigError(f"{out} cannot be written: {reason}: make room, or name another")


def _write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], to: NewFolder, stem: str) -> str:
    """Write .safetensors files; return the dtype of the weights."""
    from safetensors import SafetensorError  # noqa: PLC0415 - only who has torch needs it
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

    dtype, n_bytes, total_bytes = "float32", 0, 0
    batch: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []
    said = to.aside / ("config.json" if stem == "model" else "adapter_config.json")

    def flush() -> None:
        file = to.aside / f"{stem}-{len(files)}.safetensors"
        try:
            save_file(batch, file, metadata={"format": "pt"})
            shutil.copymode(said, file)  # else nobody but its owner could read it
        except (OSError, SafetensorError) as error:  # a full disk is the latter
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
        _name(files, total_bytes, to.aside, stem)
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
