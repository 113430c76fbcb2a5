"""What people find of one job on disk: `job.json`, `metrics.jsonl`, `model/`, and `adapter/` where one was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from services.trainer.adapters.log.run_log import Opener, RunLog
from services.trainer.ports import Row
from shared.columns import floats, ints
from shared.errors import Fatal
from shared.model_folder import copy_without_weights, declare_dtype
from shared.weights.publisher import Shard

_FINISH_LIMIT_S = 5.0
"""A trainer that is told to stop has ten seconds for everything."""


class JobFolder:
    """`RunFolder` in a local folder."""

    def __init__(self, folder: Path, model: Path, loggers: Mapping[str, Opener] | None = None) -> None:
        """Use `folder`, which is made where it is missing; `model` is the base model's directory."""
        self._folder = folder
        self._log = RunLog(loggers or {})
        self._model = model
        self._metrics = folder / "metrics.jsonl"

    def begin(self, spec_json: str, step: int) -> None:
        """See `RunFolder.begin`."""
        with self._disk_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            _replace(self._folder / "job.json", json.dumps(json.loads(spec_json), indent=2) + "\n")
            if self._metrics.exists():
                _replace(self._metrics, "".join(_rows_before(self._metrics, step)))
        self._log.begin(step)

    def log_step(self, step: int, metrics: dict[str, float]) -> list[str]:
        """See `RunFolder.log_step`."""
        with self._disk_errors(), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._log.log(step, metrics)
        return self._log.troubles()

    def keep_batch(self, name: str, rows: Sequence[Row]) -> Path:
        """See `RunFolder.keep_batch`: JSON, a row a line."""
        path = self._folder / name
        with self._disk_errors():
            _replace(path, "".join(json.dumps(_readable(row)) + "\n" for row in rows))
        return path

    def export(self, shards: Iterable[Shard]) -> Path:
        """See `RunFolder.export`."""
        with self._aside("model") as aside:
            copy_without_weights(self._model, aside)
            tensors = {shard.name: _tensor(shard) for shard in shards}
            save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
            # Else nobody but its owner could read it, other than the files beside it.
            shutil.copymode(aside / "config.json", aside / "model.safetensors")
            dtypes = (t.dtype for t in tensors.values() if t.is_floating_point())
            declare_dtype(aside, str(next(dtypes)).removeprefix("torch."))
        return self._folder / "model"

    def export_adapter(self, shards: Iterable[Shard], adapter_json: str) -> Path:
        """See `RunFolder.export_adapter`."""
        with self._aside("adapter") as aside:
            tensors = {shard.name: _tensor(shard) for shard in shards}
            save_file(tensors, aside / "adapter_model.safetensors", metadata={"format": "pt"})
            _replace(aside / "adapter_config.json", json.dumps(json.loads(adapter_json), indent=2) + "\n")
            shutil.copymode(aside / "adapter_config.json", aside / "adapter_model.safetensors")
        return self._folder / "adapter"

    def close(self) -> list[str]:
        """See `RunFolder.close`."""
        self._log.close(_FINISH_LIMIT_S)
        return self._log.troubles()

    @contextmanager
    def _aside(self, name: str) -> Iterator[Path]:
        """Make a directory that gets its name when it is whole."""
        final, aside = self._folder / name, self._folder / f"unfinished-{name}"
        with self._disk_errors():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise Fatal(f"the run's folder {self._folder} cannot be written: {error}; make room or mend it") from error


_ASKED = ("reference", "advantages", "values", "returns")
"""Columns that only some algorithms have."""


def _readable(row: Row) -> dict[str, Any]:
    return {
        "prompt": ints(row.prompt),
        "completion": ints(row.completion),
        "logprobs": floats(row.logprobs),
        "proximal": floats(row.proximal),
        "advantage": row.advantage,
        "trained": list(row.trained),
        **{name: floats(column) for name in _ASKED if (column := getattr(row, name))},
    }


def _tensor(shard: Shard) -> torch.Tensor:
    # safetensors writes whole tensors, so a copy of the model is held while it is written.
    return torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).reshape(shard.local_shape)


def _rows_before(file: Path, step: int) -> list[str]:
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a process that was killed while it wrote
        if row["step"] < step:
            kept.append(line + "\n")
    return kept


def _replace(file: Path, text: str) -> None:
    aside = file.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    aside.rename(file)
