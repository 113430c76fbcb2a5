"""What of a job does not fit its model, or this machine, found before anything is trained.

Where the trainer has a check of its own, it is that one which is asked here, so that the texts are the same. What needs
a library that only trainers have is left to the trainer where that is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlboost.tried import complaint
from services.trainer.adapters.megatron import shape as megatron
from services.trainer.adapters.ranks.layout import Layout
from shared.errors import ConfigError
from shared.jobspec import JobSpec
from shared.lora_targets import check_targets
from shared.model_folder import check_tokenizer, config_of, tensors_of
from shared.rows import is_remote
from shared.runlog import lacking
from shared.shards import names

_OWN_CODE_SCRIPT = """
import sys
from shared.errors import ConfigError
from shared.own_code import own_function
try:
    own_function(sys.argv[1], sys.argv[2], sys.argv[3].split(","))
except ConfigError as error:
    sys.exit(str(error))
"""


def model_problems(spec: JobSpec) -> list[str]:
    """Return what is wrong with a job whose model is a folder here, one line a problem."""
    model = Path(spec.model).expanduser()
    checks: list[Callable[[], None]] = [lambda: check_tokenizer(model)]
    if (adapter := spec.adapter) is not None:
        checks.append(lambda: check_targets(adapter, tensors_of(model)))
    if spec.trainer.backend == "megatron":
        checks.append(lambda: _check_cut(spec, model))
    elif spec.trainer.activation_checkpointing and _is_installed("torch", "transformers"):
        checks.append(lambda: _check_layers(model))
    return [problem for check in checks if (problem := _said_by(check))]


def code_problems(spec: JobSpec) -> list[str]:
    """Return what is wrong with the user's functions that run in the trainer, one line a problem."""
    asked = [("algorithm.loss", spec.algorithm.loss, "batch")] if spec.kind == "rl" else []
    if spec.data.curriculum is not None:
        asked.append(("data.curriculum.function", spec.data.curriculum.function, "means,step,columns"))
    found = [
        complaint(field, path, _OWN_CODE_SCRIPT, field, path, arguments) for field, path, arguments in asked if path
    ]
    return [problem for problem in found if problem and not _wants_torch(problem)]


def missing_libraries(spec: JobSpec) -> list[str]:
    """Return what the job needs and is not installed, one line a library; nothing where no trainer can run.

    Where one can, a worker can, too, so it is no problem of the job: the trainer may be on another machine.
    """
    if not _is_installed("torch", "transformers"):
        return []
    return [*lacking(spec.log), *_other_libraries(spec)]


def data_problem(spec: JobSpec) -> str:
    """Return the first thing that is wrong with the prompts as the model gets them, nothing where all fit.

    That is what the trainer itself does before it trains: every row is tokenized, and put beside the model's positions.
    """
    sources = [name for rows in spec.data.rows for name in names(rows.source)]
    if not _is_installed("torch", "transformers") or any(map(is_remote, sources)):
        return ""  # only the trainer can tell
    return _said_by(lambda: _load_data(spec))


def _load_data(spec: JobSpec) -> None:
    from services.trainer.adapters.data import load_data  # noqa: PLC0415 - imports torch
    from services.trainer.domain import plan  # noqa: PLC0415 - only where a trainer may run

    data = load_data(spec, Path(spec.model).expanduser())
    if spec.kind != "sft":
        plan.check(spec, len(data.evaluation))


def _check_cut(spec: JobSpec, model: Path) -> None:
    config = config_of(model)
    given = {"tie_word_embeddings": False, "rope_parameters": {}, **config.get("text_config", config)}
    given["rope_parameters"] = {"rope_theta": 0.0, **(given["rope_parameters"] or {})}
    try:
        shape = megatron.shape_of(SimpleNamespace(**given))
    except AttributeError:
        return  # it says less than transformers writes: only the trainer can tell
    megatron.check(shape, Layout.of(spec.trainer))


def _check_layers(model: Path) -> None:
    from services.trainer.adapters.torch.recompute import check_recomputable  # noqa: PLC0415 - imports torch

    check_recomputable(model)


def _other_libraries(spec: JobSpec) -> Iterator[str]:
    if spec.adapter is not None and not _is_installed("peft"):
        yield "elastic.weights: lora needs PEFT: pip install 'rlboost[trainer]'"
    if spec.trainer.backend == "megatron" and not _is_installed("megatron"):
        yield "trainer.backend: megatron needs megatron-core: pip install 'rlboost[megatron]'"
    for field, source, _ in spec.data.rows:
        remote = [name for name in names(source) if is_remote(name)]
        if remote and not _is_installed("datasets"):
            yield f"{field}: {remote[0]} needs the library datasets: pip install 'rlboost[data]'"


def _is_installed(*libraries: str) -> bool:
    return all(find_spec(library) is not None for library in libraries)


def _said_by(check: Callable[[], Any]) -> str:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def _wants_torch(problem: str) -> bool:
    return "No module named 'torch'" in problem and not _is_installed("torch")
