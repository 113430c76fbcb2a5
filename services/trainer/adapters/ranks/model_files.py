"""One rank's slices of a model in safetensors files: what it loads, exports, and saves in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.checkpoints.files import CRITIC_PREFIX
from rlboost.services.trainer.adapters.ranks.sharded_tensors import SliceReader, write_slices
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.adapters.ranks.trainable import MOMENTS, NO_TENSORS, WEIGHT, Model, Trainable
from rlboost.shared.disk_space import write_error
from rlboost.shared.errors import Corrupt, DiskFull

_STEPS_FILE = "steps.txt"


def fill(trainable: Trainable, reader: SliceReader, initial: Mapping[str, Tensor] = NO_TENSORS) -> None:
    """Overwrite what is trained with values of files, but for those in `initial`, which are whole tensors by name.

    Raises:
        ValueError: the files lack a tensor, or it has another shape.

    """
    for name, parameter in trainable.model.parameters():
        trainable.state.set(parameter, WEIGHT, _read(trainable.model, name, reader, initial))


def fill_frozen(model: Model, reader: SliceReader) -> None:
    """Overwrite a model that is not trained with values of files; see `fill`."""
    for name, parameter in model.parameters():
        model.put(parameter, _read(model, name, reader))


def slices_of(model: Model) -> list[TensorSlice]:
    """Return the slices of Hugging Face tensors that this rank has."""
    return [s for name, _ in model.parameters() for s in model.weight_map.slices(name)]


def exported_slices(
    model: Model, value_of: Callable[[Tensor], Tensor], *, exports: bool
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Yield the slices that this rank exports. All ranks must iterate.

    Args:
        model: this rank's shard.
        value_of: returns a value of a parameter's shape; may be a collective call.
        exports: False if another rank has the same slices and exports them.

    """
    weight_map = model.weight_map
    for name, parameter in model.parameters():
        value = value_of(parameter)
        if not exports or not weight_map.owns(name):
            continue
        for s, local in zip(weight_map.slices(name), weight_map.split(name, value), strict=True):
            if math.prod(s.local_shape):
                yield s, local


def write_model(
    directory: Path, kind: str, model: Model, value_of: Callable[[Tensor], Tensor], *, exports: bool
) -> None:
    """Write this rank's slices of one kind into a file of its own, after all ranks have gathered.

    The arguments are those of `exported_slices`, and where to write.

    Raises:
        DiskFull, Fatal: it cannot be written.

    """
    values = dict(exported_slices(model, value_of, exports=exports))
    if values:
        file = directory / f"{kind}-{distributed.get_rank():04d}.safetensors"
        with _disk_errors(file):
            write_slices(file, values)


def save_checkpoint(folder: Path, trained: Mapping[str, Trainable], n_steps: int, *, exports: bool) -> None:
    """Write master weights and moments of what is trained, in files that any other layout can read.

    Args:
        folder: an existing one.
        trained: prefix of the file names -> this rank's shard.
        n_steps: updates that the moments contain.
        exports: see `exported_slices`.

    Raises:
        DiskFull: there is no space on this rank's machine. All ranks can take the next call.
        Fatal: a file cannot be written for another reason.

    """
    full: DiskFull | None = None
    # The disk of one rank may be full: it still gathers every kind with the others.
    for prefix, (model, _, state, *_) in trained.items():
        for kind in _kinds(n_steps):
            try:
                write_model(folder, f"{prefix}{kind}", model, partial(state.get, kind=kind), exports=exports)
            except DiskFull as error:
                full = error
    if full is not None:
        raise full
    if distributed.get_rank() == 0:
        with _disk_errors(file := folder / _STEPS_FILE):
            file.write_text(str(n_steps), encoding="utf-8")


def load_checkpoint(folder: Path, trained: Mapping[str, Trainable]) -> int:
    """Read what `save_checkpoint` wrote, in any layout; return the number of updates.

    Raises:
        Corrupt: it does not match this model.

    """
    what = "checkpoint"
    try:
        n_steps = int((folder / _STEPS_FILE).read_text(encoding="utf-8"))
        for prefix, (model, _, state, *_) in trained.items():
            what = "the critic in checkpoint" if prefix == CRITIC_PREFIX else "checkpoint"
            for kind in _kinds(n_steps):
                with SliceReader(sorted(folder.glob(f"{prefix}{kind}-*.safetensors"))) as reader:
                    for name, parameter in model.parameters():
                        state.set(parameter, kind, _read(model, name, reader))
            state.set_steps(n_steps)
    except (OSError, ValueError, SafetensorError) as error:
        raise Corrupt(f"{what} {folder} does not match this model: {error}") from error
    return n_steps


def _kinds(n_steps: int) -> tuple[str, ...]:
    """Return what a checkpoint has: there are no moments before the first step."""
    return (WEIGHT, *MOMENTS) if n_steps else (WEIGHT,)


def _read(model: Model, name: str, reader: SliceReader, initial: Mapping[str, Tensor] = NO_TENSORS) -> Tensor:
    """Return this rank's value of a parameter: a part of its initial value if it has one, otherwise of files."""
    whole = initial.get(name)
    slices = model.weight_map.slices(name)
    return model.weight_map.join(name, [reader.read(s) if whole is None else s.of(whole) for s in slices])


@contextmanager
def _disk_errors(file: Path) -> Iterator[None]:
    """Translate errors of writing a file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise write_error(error, f"{file} cannot be written: {error}; free space there") from error
