"""Which files and folders a job file may name, and how many processes it may ask for.

A client that can create jobs chooses what the trainer reads as data, and sees it in samples, errors and logs. It may
name what lies in the folder in which the trainer runs, except hidden folders, such as `.ssh`, and the state folder's
own files, which contain tokens; in the folders of runs and of downloaded models; and in the folders of the operator's
setting `RLBOOST_TRAINER_FOLDERS`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path

from rlboost.shared.data.rows import AGENT_ROWS, is_remote, names_of, shards
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import TEACHER
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.model.folder import REWARD_MODEL

_STATE_FOLDER = ".rlboost"
_OF_THE_SYSTEM = ("cache", "drained", "logs", "redis", "weights")
"""Folders of a state folder that no job may name."""
_MIN_USER_PROCESSES, _USER_PROCESSES_PER_CPU = 64, 16


def check_named_paths(spec: JobSpec, runs: Path, folders: Sequence[str]) -> None:
    """Check all paths of a job file, without reading what is there.

    Args:
        spec: the job file.
        runs: the folder of all jobs' folders.
        folders: of the operator, in addition.

    Raises:
        ConfigError: one lies elsewhere; the text names the field, the path and the setting.

    """
    for field, name in _named(spec):
        if not _is_allowed(name, runs, folders):
            raise ConfigError(
                f"{field}: {name} is not in the trainer's folder {Path.cwd()}, or is hidden or of the system there: "
                "name what lies in that folder, or start the trainer with "
                f"RLBOOST_TRAINER_FOLDERS={Path(name).expanduser().absolute().parent} (several are separated by ':')"
            )


def _named(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the field and the name of each local path."""
    models = [("model", spec.model)]
    if spec.held_teacher:
        models.append((TEACHER, spec.held_teacher))
    models += [(REWARD_MODEL, model) for model in spec.held_reward_models]
    if not isinstance(spec, OfflineJob):
        models += [(f"models.{name}.model", other.model) for name, other in spec.models.items()]
    for field, model in models:
        if model.startswith(("/", ".", "~")) or Path(model).exists():
            yield field, model
    for rows in spec.rows:
        for name in names_of(rows.source):
            if name != AGENT_ROWS and not is_remote(name):
                yield rows.field, _without_pattern(name)
                with suppress(ConfigError):  # reading it says why
                    yield from ((rows.field, shard) for shard in shards(name))
    if spec.trainer.checkpoints and "://" not in spec.trainer.checkpoints:
        yield "trainer.checkpoints", spec.trainer.checkpoints
    if spec.trainer.starts_from_checkpoint and "://" not in spec.trainer.resume:
        yield "trainer.resume", spec.trainer.resume


def _without_pattern(name: str) -> str:
    parts = Path(name).parts
    n_plain = next((n for n, part in enumerate(parts) if has_magic(part)), len(parts))
    return name if n_plain == len(parts) else str(Path(*parts[:n_plain]))


def _is_allowed(name: str, runs: Path, folders: Sequence[str]) -> bool:
    path = Path(name).expanduser()
    forms = [Path(os.path.realpath(path))]
    if ".." not in path.parts:
        forms.append(path.absolute())  # a link in the folder is the operator's
    return any(_is_within(form, runs, folders) for form in forms)


def _is_within(path: Path, runs: Path, folders: Sequence[str]) -> bool:
    places = [runs, *_downloads(), *_examples(), *(Path(one).expanduser() for one in folders)]
    if any(path.is_relative_to(form) for place in places for form in _forms(place)):
        return True
    for state in _forms(runs.parent):
        if state.name != _STATE_FOLDER and not (state / "lock").is_file():
            continue
        if path.is_relative_to(state):
            parts = path.relative_to(state).parts
            return bool(parts) and parts[0] not in _OF_THE_SYSTEM and (state / parts[0]).is_dir()
        if _is_visible(state, path):
            return False  # it would be read with the rest of the folder
    return any(_is_visible(path, folder) for folder in _forms(Path()))


def _is_visible(path: Path, folder: Path) -> bool:
    """Return True if a path is in a folder, and not in a hidden one of it."""
    return path.is_relative_to(folder) and not any(part.startswith(".") for part in path.relative_to(folder).parts)


def _downloads() -> list[Path]:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - the command line does without it
    except ImportError:
        return []
    return [Path(HF_HUB_CACHE)]


def _examples() -> list[Path]:
    spec = find_spec("rlboost.examples")  # the demo's model and data
    return [Path(spec.origin).parent] if spec is not None and spec.origin is not None else []


def _forms(folder: Path) -> set[Path]:
    return {folder.absolute(), Path(os.path.realpath(folder))}


def check_processes(spec: JobSpec, n_cpus: int) -> None:
    """Refuse more processes of user code than this machine can be meant to run.

    Raises:
        ConfigError: names the field.

    """
    most = max(_MIN_USER_PROCESSES, _USER_PROCESSES_PER_CPU * n_cpus)
    for field, section in (("reward", spec.reward), ("environment", spec.environment), ("agent", spec.agent)):
        if section is not None and section.workers > most:
            raise ConfigError(
                f"{field}.workers: {section.workers} processes are too many for the trainer's machine, which has "
                f"{n_cpus} CPUs: give {most} or less"
            )
