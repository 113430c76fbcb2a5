"""Check a job against its model and this machine before training.

Uses the trainer's own checks where they exist, so that messages are the same. A check that needs a trainer library is
skipped if that library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlboost.jobs.user_code_check import complaint
from rlboost.services.trainer.adapters.megatron import model_shape as megatron
from rlboost.services.trainer.adapters.ranks.layout import Layout, require_divisible_heads
from rlboost.shared.data.rows import is_remote
from rlboost.shared.data.shards import names_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.run_log import missing_log_libraries
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.model.experts import require_known_experts, require_mixture, require_replayable
from rlboost.shared.model.folder import (
    count_parameters,
    read_config,
    read_tensor_shapes,
    require_tokenizer,
    require_unquantized,
)
from rlboost.shared.model.lora_targets import check_targets
from rlboost.shared.process.extras import is_installed, pip_install

_USER_CODE_SCRIPT = """
import sys
from rlboost.shared.errors import ConfigError
from rlboost.shared.user_code.functions import load_user_function
try:
    load_user_function(sys.argv[1], sys.argv[2], sys.argv[3].split(","))
except ConfigError as error:
    sys.exit(str(error))
"""


def model_problems(spec: JobSpec) -> list[str]:
    """Return the problems of a job whose model is a local folder, one line each."""
    model = Path(spec.model).expanduser()
    checks: list[Callable[[], object]] = [
        lambda: require_tokenizer(model),
        lambda: require_unquantized(read_config(model)),
        lambda: require_known_experts(model),
    ]
    if spec.trainer.router_aux_loss_coef:
        checks.append(lambda: require_mixture(model, "trainer.router_aux_loss_coef"))
    if spec.trainer.expert_parallel > 1:
        checks.append(lambda: require_mixture(model, "trainer.expert_parallel"))
    if spec.trainer.router_replay != "none":
        checks.append(lambda: require_replayable(model, spec.sampling.max_tokens))
    if spec.trainer.backend == "torch" and spec.trainer.context_parallel > 1:
        checks.append(lambda: _check_heads(spec, model))
    if (adapter := spec.adapter) is not None:
        checks.append(lambda: check_targets(adapter, read_tensor_shapes(model)))
    if spec.trainer.backend == "megatron":
        checks.append(lambda: _check_cut(spec, model))
    return _errors_of(checks) or _errors_of(_model_checks(spec, model))


def n_parameters(spec: JobSpec) -> int | None:
    """Return the number of parameters of a local model, None if its files do not say."""
    try:
        return count_parameters(Path(spec.model).expanduser())
    except ConfigError:
        return None


def code_problems(spec: JobSpec) -> list[str]:
    """Return the problems of user functions that run in the trainer, one line each."""
    asked = [("algorithm.loss", spec.algorithm.loss, "batch")] if spec.kind == "rl" else []
    if spec.data.curriculum is not None:
        asked.append(("data.curriculum.function", spec.data.curriculum.function, "means,step,columns"))
    found = [
        complaint(field, path, _USER_CODE_SCRIPT, field, path, arguments) for field, path, arguments in asked if path
    ]
    return [problem for problem in found if problem and not _needs_torch(problem)]


def missing_libraries(spec: JobSpec) -> list[str]:
    """Return the missing libraries that the job needs, one line each; empty if no trainer can run here.

    A warning, not a problem: the trainer may be on another machine.
    """
    if not is_installed("torch", "transformers"):
        return []
    return [*missing_log_libraries(spec.log), *_other_libraries(spec)]


def data_problem(spec: JobSpec) -> str:
    """Return the first problem of the tokenized prompts, empty if there is none.

    Does what the trainer does before training: tokenizes every row and compares it with the model's context length.
    """
    sources = [name for rows in spec.data.rows for name in names_of(rows.source)]
    if not is_installed("torch", "transformers") or any(map(is_remote, sources)):
        return ""  # only the trainer can tell
    return _error_of(lambda: _load_data(spec))


def _load_data(spec: JobSpec) -> None:
    from rlboost.services.trainer.adapters.data import load_data  # noqa: PLC0415 - imports torch
    from rlboost.services.trainer.domain import plan  # noqa: PLC0415 - only where a trainer may run

    data = load_data(spec, Path(spec.model).expanduser())
    if spec.kind != "sft":
        plan.check(spec, len(data.evaluation))


def _check_cut(spec: JobSpec, model: Path) -> None:
    config = read_config(model)
    text = config.get("text_config", config)
    given = {"num_experts": text.get("num_local_experts"), "tie_word_embeddings": False, **text}
    # Before transformers 5 it was `rope_scaling`, and earlier its type was `type`.
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    given["rope_parameters"] = {"rope_type": rope.get("type", "default"), **rope}
    try:
        shape = megatron.shape_of(SimpleNamespace(**given))
    except AttributeError:
        return  # an incomplete configuration: only the trainer can check it
    megatron.require_divisible(shape, Layout.of(spec.trainer))


def _check_heads(spec: JobSpec, model: Path) -> None:
    config = read_config(model)
    if n_heads := config.get("text_config", config).get("num_attention_heads"):
        require_divisible_heads(n_heads, spec.trainer.context_parallel)


def _model_checks(spec: JobSpec, source: Path) -> list[Callable[[], object]]:
    """Return the checks of settings that the code of some models does not support."""
    trainer, adapter = spec.trainer, spec.adapter
    used = {
        "context_parallel": trainer.context_parallel > 1,
        "data_parallel": not trainer.in_one_process,
        "compile": trainer.compile,
        "activation_checkpointing": trainer.activation_checkpointing,
        "router_aux_loss_coef": trainer.router_aux_loss_coef > 0,
        "router_replay": trainer.router_replay != "none",
    }
    keys = [key for key, is_used in used.items() if is_used]
    if trainer.backend != "torch" or not (keys or adapter) or not is_installed("torch", "transformers"):
        return []
    from rlboost.services.trainer.adapters import model_checks  # noqa: PLC0415 - imports torch

    if (model := model_checks.model_without_weights(source)) is None:
        return []
    checks: list[Callable[[], object]] = [partial(model_checks.CHECKS[key], model) for key in keys]
    if adapter is not None and is_installed("peft"):
        checks.append(partial(model_checks.require_adaptable, model, adapter))
    return checks


def _other_libraries(spec: JobSpec) -> Iterator[str]:
    if spec.adapter is not None and not is_installed("peft"):
        yield f"elastic.weights: lora needs PEFT: {pip_install('trainer')}"
    if spec.trainer.backend == "megatron" and not is_installed("megatron"):
        yield f"trainer.backend: megatron needs megatron-core: {pip_install('megatron')}"
    for field, source, _ in spec.data.rows:
        remote = [name for name in names_of(source) if is_remote(name)]
        if remote and not is_installed("datasets"):
            yield f"{field}: {remote[0]} needs the library datasets: {pip_install('data')}"


def _error_of(check: Callable[[], Any]) -> str:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def _errors_of(checks: Iterable[Callable[[], Any]]) -> list[str]:
    return [error for check in checks if (error := _error_of(check))]


def _needs_torch(problem: str) -> bool:
    return "No module named 'torch'" in problem and not is_installed("torch")
