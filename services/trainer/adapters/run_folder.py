"""Writes a job's output folder.

It holds `job.json`, `metrics.jsonl`, `record/`, `profile.json`, `model/`, and `adapter/` if an adapter was trained.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from rlboost.services.trainer.adapters.run_log import Opener, Row, RunLog
from rlboost.services.trainer.adapters.weights import tensor_of
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.storage import LoggedSample, RunEnd
from rlboost.shared import files
from rlboost.shared.errors import DiskFull, Fatal
from rlboost.shared.files import append_line, replace_file, sync_path, write_error
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.run_record import (
    CHAIN,
    FINAL_FOLDERS,
    FOLDER,
    digest_of,
    digest_of_file,
    line_of,
    samples_path,
)
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

    def close(self, end: RunEnd) -> list[str]:
        self._log.close(_FINISH_LIMIT_S, end)
        return self._log.new_problems()

    @contextmanager
    def _replaced_dir(self, name: str) -> Iterator[Path]:
        """Yield a temporary directory, and rename it to `name` after the body, replacing an older one."""
        final, temporary = self._folder / name, self._folder / f"unfinished-{name}"
        with self._disk_errors():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                sync_path(path)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            sync_path(self._folder)

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


# --- The record of the run: see `shared.job.run_record` ---------------------------------------------------------------


_TAIL_BYTES = 1 << 16
"""More than a line of the chain has, but for that of a final model of thousands of files."""


class RunRecord:
    """The record in one run's folder. All calls block and raise errors of the file system; each may be repeated."""

    def __init__(self, folder: Path, key: RecordKey) -> None:
        """Use the run's `folder`, and sign with `key`."""
        self._folder = folder
        self._chain = folder / CHAIN
        self._key = key

    def begin(self, step: int, data_digest: str) -> None:
        """Record that a trainer continues at `step`, after the run's job file is written.

        Args:
            step: the first step that it trains.
            data_digest: of the training prompts.

        """
        (self._folder / FOLDER).mkdir(parents=True, exist_ok=True)
        if self._chain.exists():
            self._drop_unfinished_line()
        file = (self._folder / "job.json").read_bytes()
        self._append(
            {
                "kind": "start",
                "job": self._folder.name,
                "step": step,
                "job_file": digest_of(file),
                "data": data_digest,
                "code": {
                    "rlboost": version("rlboost"),
                    "torch": version("torch"),
                    "python": platform.python_version(),
                    "machine": platform.machine(),
                    "digest": _code_digest(),
                },
                "user_code": user_code_digests(json.loads(file)),
                "key": self._key.public,
            }
        )

    def add_step(self, step: int, metrics: bytes, groups: bytes, weights: str) -> None:
        """Record a finished step.

        Args:
            step: number of the step.
            metrics: its line of the run log.
            groups: its samples (`pack_groups`); empty if none were generated.
            weights: digest of the weights that it has trained; empty if it has published none.

        """
        if groups:
            replace_file(self._folder / samples_path(step), groups)
        samples = digest_of(groups) if groups else ""
        self._append(
            {"kind": "step", "step": step, "metrics": digest_of(metrics), "samples": samples, "weights": weights}
        )

    def end(self, weights: str) -> None:
        """Record that the job is done, once its final model is written, with the digest of its last weights."""
        written = (file for name in FINAL_FOLDERS for file in (self._folder / name).rglob("*") if file.is_file())
        digests = {str(file.relative_to(self._folder)): digest_of_file(file) for file in written}
        self._append({"kind": "end", "weights": weights, "files": digests})

    def _append(self, fields: dict[str, Any]) -> None:
        # The file's own last line: another trainer may have written it meanwhile, on a shared disk.
        previous = digest_of(last) if (last := self._last_line()) else ""
        with self._chain.open("ab", buffering=0) as file:
            append_line(file, line_of(fields, previous, self._key))

    def _last_line(self) -> bytes:
        if not self._chain.exists():
            return b""
        size = self._chain.stat().st_size
        for n_bytes in (_TAIL_BYTES, size):
            with self._chain.open("rb") as file:
                file.seek(max(0, size - n_bytes))
                lines = file.read().splitlines(keepends=True)
            if len(lines) > 1:
                break
        return lines[-1] if lines else b""

    def _drop_unfinished_line(self) -> None:
        """Remove the line that a killed trainer has not finished: it is no link, and no step has ended with it."""
        content = self._chain.read_bytes()
        if not content.endswith(b"\n") and content:
            replace_file(self._chain, content[: content.rfind(b"\n") + 1])


# --- The code of a run ------------------------------------------------------------------------------------------------


@lru_cache
def _code_digest() -> str:
    """Return the digest of all Python files of the trainer and of what services share."""
    lines = [
        f"{root.name}/{file.relative_to(root)} {digest_of_file(file)}\n"
        for root in (Path(__file__).parents[1], Path(files.__file__).parent)
        for file in sorted(root.rglob("*.py"))
    ]
    return digest_of("".join(lines).encode())


def user_code_digests(spec: Any) -> dict[str, str]:
    """Return the digest of the file of each function that a job file names as `module:function`, of those found here.

    Args:
        spec: the job file, or a part of it, as it is in JSON.

    """
    if isinstance(spec, Mapping | list):
        values = spec.values() if isinstance(spec, Mapping) else spec
        return {name: digest for value in values for name, digest in user_code_digests(value).items()}
    module, found, function = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if not (found and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        return {}
    top, *rest = module.split(".")
    origin = find_spec(top)  # imports nothing, unlike that of a module in a package
    for folder in (origin.submodule_search_locations or ()) if origin else ():
        for path in (Path(folder, *rest, "__init__.py"), Path(folder, *rest).with_suffix(".py")):
            if path.is_file():
                return {spec: digest_of_file(path)}
    if origin and origin.origin and origin.has_location and not rest:
        return {spec: digest_of_file(Path(origin.origin))}
    return {}
