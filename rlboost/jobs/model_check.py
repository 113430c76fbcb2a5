"""Check a job against its model and this machine before training.

Uses the trainer's own checks where they exist, so that messages are the same. A check that needs a trainer library is
skipped if that library is not installed. User code is loaded in a separate process, as a service will.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from rlboost.services.trainer.adapters.agent_rows import rows_of
from rlboost.services.trainer.adapters.megatron import model_shape as megatron
from rlboost.services.trainer.adapters.named_paths import check_named_paths
from rlboost.services.trainer.adapters.torch.ranks import Layout, require_divisible_heads
from rlboost.services.trainer.ports.samples import EnvironmentFault
from rlboost.services.trainer.settings import Settings
from rlboost.shared.data.rows import Row, is_remote, names_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.base import missing_log_libraries
from rlboost.shared.job.images import require_supported
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import check_targets
from rlboost.shared.model.experts import require_mixture, require_replayable
from rlboost.shared.model.folder import (
    count_parameters,
    is_classifier,
    read_config,
    read_tensor_shapes,
    require_language_model,
    require_scores,
    require_teachable,
    require_tokenizer,
    require_whole_weights,
)
from rlboost.shared.model.tool_calls import CallStyle
from rlboost.shared.process.modules import is_installed, pip_install
from rlboost.shared.wire import ints
from rlboost.terminal import printable

if TYPE_CHECKING:
    from rlboost.services.trainer.ports.samples import Data, Prompt

_LIMIT_S = 60.0
MAY_WORK_THERE = 3
"""Exit code of a script for a problem that the trainer's machine may not have."""


class MissingHere(str):
    """A missing file or module, which may exist in the trainer's folder or on its machine."""

    __slots__ = ()


def complaint(field: str, function: str, script: str, *arguments: str, more_s: float = 0.0) -> str | None:
    """Run a script that imports and tries a user function; return the problem, None if there is none.

    Uses a separate process with the current folder on its path: user code may be slow, print, or hold resources.

    Args:
        field: the job file's field that names the function.
        function: the field's value.
        script: Python code whose last line on standard error is the problem, which begins with a field of that section.
        arguments: passed in `sys.argv`.
        more_s: how long the script may take beyond its imports.

    """
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    limit_s = _LIMIT_S + more_s
    with TemporaryFile() as stderr:  # not a pipe, which a process that the user's code leaves running would hold open
        try:
            done = subprocess.run(  # noqa: S603 - our own script; the user's module is what is to be tried
                [sys.executable, "-c", script, *arguments],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return MissingHere(f"{field}: trying {function} took more than {limit_s:.0f} s")
        if done.returncode == 0:
            return None
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    # Exit handlers may have written after it.
    section = field.partition(".")[0] + "."
    reported = next((line for line in reversed(lines) if line.startswith(section)), None)
    if reported is None:
        return f"{field}: trying {function} ended its process" + (f": {lines[-1]}" if lines else "")
    is_missing = "ModuleNotFoundError: " in reported or done.returncode == MAY_WORK_THERE
    return MissingHere(reported) if is_missing else reported


_MAX_HALF = 1500
"""Characters of the beginning and of the end of a prompt that are shown."""
_USER_CODE_SCRIPT = """
import sys
from rlboost.shared.errors import ConfigError
from rlboost.shared.user_code import load_user_function
try:
    load_user_function(sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4])
except ConfigError as error:
    sys.exit(str(error))
"""
_AGENT_SCRIPT = """
import json, sys
from rlboost.shared.job.agent import agent_factory
from rlboost.shared.user_code import describe_import_error
try:
    agent_factory(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))
except BaseException as error:
    sys.exit("agent.function: " + describe_import_error(sys.argv[1], "agent", error))
"""
_ENVIRONMENT = "environment.function"
_ENVIRONMENT_SCRIPT = """
import json, sys
from pathlib import Path
import msgpack
from rlboost.services.trainer.children.environment import reset_once
from rlboost.jobs.model_check import MAY_WORK_THERE
from rlboost.shared.job.environment import environment_factory
from rlboost.shared.model.tool_calls import CallStyle
from rlboost.shared.user_code import describe_import_error
spec, style, start = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
place = "environment.function: " + spec["function"]
try:
    make = environment_factory(spec["function"], spec["arguments"], style and CallStyle(**style))
except BaseException as error:
    sys.exit("environment.function: " + describe_import_error(spec["function"], "environment", error))
if start.exists():
    request = msgpack.unpackb(start.read_bytes())
    answer = reset_once(make, request["row"], request["seed"])
    if "raised" in answer:
        print(f"{place}: reset of the first row raised {answer['raised'].partition(chr(10))[0]}", file=sys.stderr)
        sys.exit(MAY_WORK_THERE)
    start.write_bytes(msgpack.packb(answer))
"""


def model_problems(spec: JobSpec) -> list[str]:
    """Return the problems of a job whose model is a local folder, one line each."""
    model = Path(spec.model).expanduser()
    checks: list[Callable[[], object]] = [
        lambda: require_tokenizer(model),
        lambda: require_whole_weights(model),
        lambda: _check_head(spec, model),
        lambda: require_supported(spec, read_config(model)),
    ]
    if spec.trainer.router_aux_loss_coef:
        checks.append(lambda: require_mixture(model, "trainer.router_aux_loss_coef"))
    if spec.trainer.expert_parallel > 1:
        checks.append(lambda: require_mixture(model, "trainer.expert_parallel"))
    if spec.trainer.router_replay != "none":
        checks.append(lambda: require_replayable(model, spec.sampling.max_tokens))
    if spec.trainer.backend == "torch" and spec.trainer.context_parallel > 1:
        checks.append(lambda: _check_heads(spec, model))
    if spec.teacher is not None:
        teacher = Path(spec.teacher_model).expanduser()
        checks.append(lambda: require_teachable(model, teacher) if teacher.is_dir() else None)
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


def path_warning(spec: JobSpec) -> str:
    """Return why a trainer in this folder, with the settings of this environment, would not read what the job names."""
    try:
        config = Settings()
        check_named_paths(spec, config.dir, config.job_folders)
    except ConfigError as error:
        return str(error)
    except ValueError:
        return ""  # of a setting, which the trainer reports
    return ""


def code_problems(spec: JobSpec) -> list[str]:
    """Return the problems of user functions that run in the trainer, one line each."""
    asked = [("algorithm.loss", spec.algorithm.loss, "batch", "loss function")] if spec.kind == "rl" else []
    if spec.data.curriculum is not None:
        skips = spec.data.curriculum.function
        asked.append(("data.curriculum.function", skips, "means,step,columns", "curriculum function"))
    found = [
        complaint(field, path, _USER_CODE_SCRIPT, field, path, arguments, kind)
        for field, path, arguments, kind in asked
        if path
    ]
    if spec.agent is not None and spec.agent.function is not None:
        limit_s = spec.agent.timeout_s
        arguments = (spec.agent.function, json.dumps(spec.agent.arguments), str(limit_s))
        found.append(complaint("agent.function", spec.agent.function, _AGENT_SCRIPT, *arguments, more_s=limit_s))
    return [problem for problem in found if problem and not _needs_torch(problem)]


def missing_libraries(spec: JobSpec) -> list[str]:
    """Return the missing libraries that the job needs, one line each; empty if no trainer can run here.

    A warning, not a problem: the trainer may be on another machine.
    """
    if not is_installed("torch", "transformers"):
        return []
    return [*missing_log_libraries(spec.log), *_other_libraries(spec)]


def agent_rows(spec: JobSpec) -> Callable[[str], Iterator[Row]] | None:
    """Return what yields the rows of the job's agent for a split; None without an agent."""
    return rows_of(spec.agent)


class DataFindings(NamedTuple):
    """What the tokenized prompts show."""

    problem: str = ""
    """The first problem, empty if there is none."""
    example: str = ""
    """The first prompt as the model sees it, and what follows it in training; empty if it is unknown."""
    notices: Sequence[str] = ()
    advice: Sequence[str] = ()
    data: Data | None = None
    """The prompts, None if they cannot be tokenized here."""


def check_data(spec: JobSpec) -> DataFindings:
    """Return the findings in the tokenized prompts.

    Does what the trainer does before training: tokenizes every row and compares it with the model's context length.
    """
    sources = [name for rows in spec.rows for name in names_of(rows.source)]
    if not is_installed("torch", "transformers") or any(map(is_remote, sources)):
        return DataFindings()  # only the trainer can tell
    try:
        return _load_data(spec)
    except ConfigError as error:
        return DataFindings(str(error))


def _load_data(spec: JobSpec) -> DataFindings:
    from rlboost.services.trainer.adapters.data import check_teacher, load_data  # noqa: PLC0415 - imports torch
    from rlboost.services.trainer.domain import plan  # noqa: PLC0415 - only where a trainer may run

    data = load_data(spec, Path(spec.model).expanduser())
    if not isinstance(spec, OfflineJob):
        plan.check(spec, data.n_evaluation)
    if spec.teacher is not None and (teacher := Path(spec.teacher_model).expanduser()).is_dir():
        check_teacher(spec, data, teacher)
    notices = []
    if ignored := ", ".join(sorted(data.ignored_keys)):
        notices.append(f"data: the chat template does not show these keys of messages: {ignored}")
    if split := ", ".join(data.split_tokens):
        notices.append(f"model: the chat template writes {split}, which the tokenizer splits into several tokens")
    if spec.data.prompts_per_step > (n_rows := len(data.train)) > 0:
        notices.append(f"data.prompts_per_step: {spec.data.prompts_per_step} of {n_rows} rows: each step repeats some")
    if spec.kind == "rl" and spec.data.eval is not None and spec.eval is None:
        notices.append("data.eval: only rlboost eval reads it, since there is no section eval")
    first = next(iter([*data.train[:1], *data.evaluation[:1]]), None)
    answers = () if first is None else (ints(first.completion), ints(first.rejected))
    what = "what is better" if spec.kind == "reward" else "what it is trained to answer"
    example = "" if first is None else _shown(data, ints(first.tokens), *answers, what=what)
    return DataFindings(example=example, notices=notices, advice=data.advice, data=data)


def check_environment(spec: JobSpec, data: Data | None) -> DataFindings:
    """Return what an environment of the job shows, in a process of its own.

    Its tools, or the prompt that its `reset` returns, change what the model sees: all rows are formatted with the tools
    that it has after the first row. A prompt that `reset` returns is checked for the first row only.

    Args:
        spec: a job with an environment.
        data: the job's prompts; None if they cannot be tokenized here: then an environment is only created.

    """
    environment = spec.environment
    assert environment is not None
    rows = [*data.train, *data.evaluation] if data else []
    style: CallStyle | None = data.call_style if data else None
    with TemporaryDirectory() as folder:
        start = Path(folder, "start")
        if rows:
            row = {"prompt": rows[0].given, **rows[0].columns}
            start.write_bytes(msgpack.packb({"row": row, "seed": spec.trainer.seed}))
        arguments = environment.model_dump_json(), json.dumps(style and asdict(style)), str(start)
        if wrong := complaint(
            _ENVIRONMENT, environment.function, _ENVIRONMENT_SCRIPT, *arguments, more_s=environment.timeout_s
        ):
            return DataFindings(wrong)
        if data is None or not rows:
            return DataFindings()
        answer = msgpack.unpackb(start.read_bytes())
    return _formatted(spec, data, rows, answer)


def _formatted(spec: JobSpec, data: Data, rows: Sequence[Prompt], answer: dict[str, Any]) -> DataFindings:
    """Return the findings in the prompts of an environment that has answered the first row."""
    prompt, tools, formatter = answer["prompt"], answer["tools"], data.chat_formatter
    if formatter is None or (prompt is None and not tools):
        return DataFindings()  # the model sees the rows' own prompts
    example = ""
    for i, row in enumerate(rows if prompt is None else rows[:1]):
        source, number = ("train", i + 1) if i < len(data.train) else ("eval", i + 1 - len(data.train))
        where = f"{_ENVIRONMENT}: with the environment's tools, prompt {number} of data.{source} ({row.given!r:.60})"
        if prompt is not None:
            where = f"{_ENVIRONMENT}: the prompt that reset returns for the first row"
        try:
            tokens = formatter.format_prompt(row.given if prompt is None else prompt, tools, row.columns)
        except EnvironmentFault as fault:
            return DataFindings(f"{where} cannot be formatted: {fault.detail}")
        most, n_new = formatter.max_length, spec.sampling.max_tokens
        if most is not None and len(tokens) + n_new > most:
            return DataFindings(
                f"{where} has {len(tokens)} tokens, which do not fit the model's {most} positions with "
                f"sampling.max_tokens {n_new}: shorten it, or lower sampling.max_tokens"
            )
        example = example or _shown(data, tokens)
    return DataFindings(example=example)


def _shown(data: Data, prompt: list[int], *answers: list[int], what: str = "") -> str:
    """Return the first prompt, and what is trained after it, as text of several lines.

    Args:
        data: the job's prompts.
        prompt: the first one.
        answers: what follows it: one completion, or of a pair both.
        what: describes the first of these.

    """
    lines = [f"the first prompt, as the model sees it ({len(prompt)} tokens):", _shortened(data, prompt)]
    for described, answer in zip((what, "what is worse"), answers, strict=False):
        if answer:
            lines += [f"and {described} ({len(answer)} tokens):", _shortened(data, answer)]
    return "\n".join(lines)


def _shortened(data: Data, tokens: list[int]) -> str:
    """Return the text of tokens for a terminal, without most of its middle if it is long."""
    text = data.decode(tokens, skip_special_tokens=False)
    if len(text) > 2 * _MAX_HALF:
        left_out = len(text) - 2 * _MAX_HALF
        text = f"{text[:_MAX_HALF]}\n[... {left_out} characters ...]\n{text[-_MAX_HALF:]}"
    return "\n".join(f"  | {line}" for line in printable(text).split("\n"))


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


def _check_head(spec: JobSpec, model: Path) -> None:
    config = read_config(model)
    if spec.kind != "reward":
        require_language_model(config)
    elif is_classifier(config):
        require_scores(model)


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
    if spec.kind == "eval" or trainer.backend != "torch" or not is_installed("torch", "transformers"):
        return []
    from rlboost.services.trainer.adapters import model_checks  # noqa: PLC0415 - imports torch

    described = partial(model_checks.require_described_weights, source, scores=spec.kind == "reward")
    if not (keys or adapter) or (model := model_checks.model_without_weights(source)) is None:
        return [described]
    checks: list[Callable[[], object]] = [described, *(partial(model_checks.CHECKS[key], model) for key in keys)]
    if adapter is not None and is_installed("peft"):
        checks.append(partial(model_checks.require_adaptable, source, model, adapter))
    return checks


def _other_libraries(spec: JobSpec) -> Iterator[str]:
    if spec.adapter is not None and not is_installed("peft"):
        yield f"elastic.weights: lora needs PEFT: {pip_install('trainer')}"
    if spec.trainer.backend == "megatron" and not is_installed("megatron"):
        yield f"trainer.backend: megatron needs megatron-core: {pip_install('megatron')}"
    for rows in spec.rows:
        remote = [name for name in names_of(rows.source) if is_remote(name)]
        if remote and not is_installed("datasets"):
            yield f"{rows.field}: {remote[0]} needs the library datasets: {pip_install('data')}"


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


_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def may_have_chat_template(model: Path) -> bool:
    """Return False if a model's folder is here and has no chat template."""
    if not model.is_dir() or any((model / name).exists() for name in _TEMPLATE_FILES):
        return True
    try:
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
