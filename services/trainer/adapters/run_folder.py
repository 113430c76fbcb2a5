"""Writes a job's output folder.

It holds `job.json`, `metrics.jsonl`, `record/`, `profile.json`, `model/`, and `adapter/` if an adapter was trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from rlboost.services.trainer.adapters.run_log import Opener, Row, RunLog
from rlboost.services.trainer.adapters.run_record import RunRecord
from rlboost.services.trainer.adapters.torch.tensors import tensor_of
from rlboost.services.trainer.domain.batches import TrainingRow
from rlboost.services.trainer.ports.storage import LoggedSample
from rlboost.shared.errors import DiskFull, Fatal
from rlboost.shared.files import append_line, replace_file, write_error
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.model.folder import copy_without_weights, declare_dtype, declare_scores
from rlboost.shared.weights.access import RecordKey
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import floats, ints

_FINISH_LIMIT_S = 5.0
"""How long loggers may take at the end: a stopping trainer has ten seconds in all."""


class RewardModel(NamedTuple):
    """What `config.json` of a trained reward model says, unlike the model that it started from."""

    architecture: str
    """transformers' class."""
    pad_id: int | None
    """The token that pads batches."""


class LocalRunFolder:
    """`RunFolder` in a local folder."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        key: RecordKey,
        loggers: Mapping[str, Opener] | None = None,
        reward_model: RewardModel | None = None,
    ) -> None:
        """Use `folder`, created if missing; `model` is the base model's directory, and `key` signs the run's record.

        With `reward_model` the final model is one.
        """
        self._folder = folder
        self._reward_model = reward_model
        self._record = RunRecord(folder, key)
        self._log = RunLog(loggers or {})
        self._model = model
        self._metrics = folder / "metrics.jsonl"

    def begin(self, spec_json: str, step: int, data_digest: str = "") -> None:
        with self._disk_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / "job.json", json.dumps(json.loads(spec_json), indent=2) + "\n")
            if self._metrics.exists():
                replace_file(self._metrics, "".join(_rows_before(self._metrics, step)))
            self._record.begin(step, data_digest)
        self._log.begin(step)

    def log_step(self, step: int, metrics: dict[str, float], samples: Sequence[LoggedSample] = ()) -> list[str]:
        with self._disk_errors(), self._metrics.open("ab", buffering=0) as file:
            append_line(file, _line(step, metrics))
        self._log.log(Row(step, metrics, samples))
        return self._log.new_problems()

    def path_of(self, name: str) -> Path:
        return self._folder.absolute() / name

    def record_step(self, step: int, metrics: dict[str, float], groups: bytes, weights: str) -> None:
        with self._disk_errors():
            self._record.add_step(step, _line(step, metrics), groups, weights)

    def record_end(self, weights: str) -> None:
        with self._disk_errors():
            self._record.end(weights)

    def write_profile(self, profile: RunProfile) -> None:
        with self._disk_errors():
            replace_file(self._folder / "profile.json", profile.model_dump_json(indent=2) + "\n")

    def dump_batch(self, name: str, rows: Sequence[TrainingRow]) -> Path:
        """See `RunFolder.dump_batch`: JSON, a row a line."""
        path = self._folder / name
        try:
            with self._disk_errors():
                replace_file(path, "".join(json.dumps(_readable(row)) + "\n" for row in rows))
        except DiskFull as error:
            raise Fatal(str(error)) from error  # the job fails anyway
        return path

    def export(self, shards: Iterable[Shard]) -> Path:
        with self._replaced_dir("model") as directory:
            copy_without_weights(self._model, directory)
            # safetensors writes all tensors at once, so a copy of the model is in memory meanwhile.
            tensors = {shard.name: tensor_of(shard) for shard in shards}
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
            # safetensors creates files that only the owner can read, unlike the other files here.
            shutil.copymode(directory / "config.json", directory / "model.safetensors")
            dtypes = (t.dtype for t in tensors.values() if t.is_floating_point())
            declare_dtype(directory, str(next(dtypes)).removeprefix("torch."))
            if self._reward_model is not None:
                declare_scores(directory, *self._reward_model)
        return self._folder / "model"

    def export_adapter(self, shards: Iterable[Shard], adapter_json: str) -> Path:
        with self._replaced_dir("adapter") as directory:
            tensors = {shard.name: tensor_of(shard) for shard in shards}
            save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
            replace_file(directory / "adapter_config.json", json.dumps(json.loads(adapter_json), indent=2) + "\n")
            shutil.copymode(directory / "adapter_config.json", directory / "adapter_model.safetensors")
        return self._folder / "adapter"

    def close(self) -> list[str]:
        self._log.close(_FINISH_LIMIT_S)
        return self._log.new_problems()

    @contextmanager
    def _replaced_dir(self, name: str) -> Iterator[Path]:
        """Yield a temporary directory, and rename it to `name` after the body, replacing an older one."""
        final, temporary = self._folder / name, self._folder / f"unfinished-{name}"
        with self._disk_errors():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Translate errors of the file system."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            text = f"the run's folder {self._folder} cannot be written: {error}; free space there"
            raise write_error(error, text) from error


def _line(step: int, metrics: Mapping[str, float]) -> bytes:
    """Return a row of the run log."""
    return (json.dumps({"step": step, **metrics}) + "\n").encode()


_OPTIONAL_COLUMNS = ("reference", "values", "returns")
"""Columns that only some algorithms have."""


def _readable(row: TrainingRow) -> dict[str, Any]:
    advantages, by_token = floats(row.advantages), bool(row.values)  # with a critic each token has its own
    return {
        "prompt": ints(row.prompt),
        "completion": ints(row.completion),
        "logprobs": floats(row.sampled),
        "proximal": floats(row.proximal),
        "advantage": 0.0 if by_token else advantages[0],
        "loss_mask": list(row.loss_mask),
        **({"advantages": advantages} if by_token else {}),
        **{name: floats(column) for name in _OPTIONAL_COLUMNS if (column := getattr(row, name))},
    }


def _rows_before(file: Path, step: int) -> list[str]:
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # incomplete last line of a killed process
        if row["step"] < step:
            lines.append(line + "\n")
    return lines
