"""Check a job file before it is submitted: its fields, and the files and code it names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlboost.jobs.device_check import Fit, fit
from rlboost.jobs.learning_rates import lr_advice
from rlboost.jobs.model_check import code_problems, data_problem, missing_libraries, model_problems, n_parameters
from rlboost.jobs.model_path import is_hub_id, nearest
from rlboost.jobs.user_code_check import MissingHere, complaint
from rlboost.local.layout import DeviceSummary
from rlboost.shared.data.examples import example_of
from rlboost.shared.data.rows import BadRow, Row, is_messages, is_remote, read_rows
from rlboost.shared.data.shards import Source, exists_locally, format_source, names_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.data import DataSpec, Rows, SftDataSpec
from rlboost.shared.job.file import load
from rlboost.shared.job.spec import InvalidJob, JobSpec, parse
from rlboost.shared.job.training import TrainerSpec

_REWARD_SCRIPT = """
import json, sys
from rlboost.shared.user_code.reward_call import load, detect_style, describe_import_error, missing_columns
part, arguments, rows = json.loads(sys.argv[1]), json.loads(sys.argv[1])["arguments"], json.loads(sys.argv[2])
try:
    function = load(part["function"])
    style = detect_style(function, arguments, part["style"])
except BaseException as error:
    sys.exit("reward.function: " + describe_import_error(part["function"], "reward function", error))
for place, columns in rows:
    if missing := missing_columns(function, arguments, style, columns):
        sys.exit(
            f"reward.function: {part['function']} needs {missing}, but {place} has "
            f"{', '.join(columns) or 'none besides the prompt'}: rename the parameter or the column, "
            "give the parameter a default, or set it in reward.arguments"
        )
"""
_MAX_KINDS_OF_ROWS = 100
_CODE_REWARD = "rlboost.rewards.code:score"
_ENVIRONMENT_SCRIPT = """
import json, sys
from rlboost.shared.job.environment import environment_factory
from rlboost.shared.user_code.reward_call import describe_import_error
spec = json.loads(sys.argv[1])
try:
    environment_factory(spec["function"], spec["arguments"])
except BaseException as error:
    sys.exit("environment.function: " + describe_import_error(spec["function"], "environment", error))
"""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


_Columns = dict[tuple[str, ...], str]
"""The columns of a row, without the prompt -> where the first such row is."""


class Found(NamedTuple):
    """Problems and warnings of a job file, one line each."""

    problems: list[str]
    """A file or module that is missing on this machine is a `MissingHere`."""
    warnings: list[str]
    """About this machine, which may not be the one that trains the job."""
    advice: Sequence[str] = ()
    """Warnings about the job itself."""
    notices: Sequence[str] = ()
    """How an ambiguous value was understood."""


def _ignore(_: str) -> None:
    pass


def check(
    file: Path,
    overrides: list[str],
    on_part: Callable[[str], None] = _ignore,
    devices: DeviceSummary | None = None,
) -> Found:
    """Return all problems of a job file; see `check_job`.

    Raises:
        ConfigError: the file cannot be read or parsed at all.

    """
    on_part(f"reading {file}")
    return check_job(load(str(file), overrides), on_part, devices)


def check_job(raw: object, on_part: Callable[[str], None] = _ignore, devices: DeviceSummary | None = None) -> Found:
    """Return all problems of the job that a mapping describes; paths are relative to the current folder.

    Args:
        raw: the mapping.
        on_part: called before each part that may take seconds, with what it does.
        devices: GPUs of the system that will run the job, None if unknown.

    Raises:
        ConfigError: it is not a mapping.

    """
    try:
        spec = parse(raw)
    except InvalidJob as error:
        return Found(error.problems, [])
    found: list[str | None] = [_model(spec.model), _resume(spec.trainer)]
    on_part("reading the data")
    columns: _Columns = {}
    found += [_data(spec, rows, columns) for rows in spec.data.rows if spec.kind != "sft" or rows.field == "data.train"]
    # Only the trainer can check a reward service.
    on_part("importing the functions that it names")
    functions = [(part, part.function) for part in spec.reward_parts if part.function is not None]
    kinds = json.dumps([(place, given) for given, place in columns.items()])
    found += [
        complaint("reward.function", function, _REWARD_SCRIPT, part.model_dump_json(), kinds)
        for part, function in functions
    ]
    if (environment := spec.environment) is not None:
        given = environment.model_dump_json()
        found.append(complaint("environment.function", environment.function, _ENVIRONMENT_SCRIPT, given))
    model_is_here = found[0] is None and Path(spec.model).expanduser().is_dir()
    found += [*(model_problems(spec) if model_is_here else ()), *code_problems(spec)]
    fits = fit(spec, devices) if model_is_here and devices is not None else Fit([], [])
    found += fits.problems
    if model_is_here and not any(found):
        on_part("loading the tokenizer, then tokenizing the prompts")
        found.append(data_problem(spec))
    # None for a Hugging Face id; a folder that is missing here may hold a model of any size.
    advice = "" if found[0] else lr_advice(spec, n_parameters(spec) if model_is_here else None)
    return Found(
        [problem for problem in found if problem],
        missing_libraries(spec),
        [*filter(None, [advice, _isolation_advice(spec)]), *fits.advice],
        _notices(spec.model),
    )


def _isolation_advice(spec: JobSpec) -> str:
    if all(part.arguments.get("isolated", True) for part in spec.reward_parts if part.function == _CODE_REWARD):
        return ""
    return (
        "reward.arguments: isolated: false lets generated programs do what the trainer's user may do, such as read the "
        "state folder with its token: use it only on machines that have nothing to protect"
    )


def _notices(model: str) -> list[str]:
    if Path(model).expanduser().exists() or not is_hub_id(model):
        return []
    return [f"model: {model} is not a folder here: it is taken for a Hugging Face id"]


def _model(model: str) -> str | None:
    folder = Path(model).expanduser()
    if not folder.exists():
        if is_hub_id(model):
            return None  # only the trainer can check it
        return MissingHere(
            f"model: there is no folder {model}: name a Hugging Face model directory or id ({nearest(model)})"
        )
    if not (folder / "config.json").is_file():
        return f"model: {model} has no config.json: it is not a Hugging Face model directory"
    if not any(folder.glob("*.safetensors")):
        return f"model: {model} has no *.safetensors file: save the model's weights there"
    return None


def _resume(trainer: TrainerSpec) -> str | None:
    place = trainer.resume
    if not trainer.starts_from_checkpoint or "://" in place or Path(place).exists():
        return None
    return MissingHere(
        f"trainer.resume: there is no {place}: give auto, never, or another job's folder (.rlboost/runs/JOB) or one of "
        "its checkpoints"
    )


def _data(spec: JobSpec, rows: Rows, columns: _Columns) -> str | None:
    """Return the problem of a source, and add the columns of its rows."""
    field, source, split = rows
    here = tuple(name for name in names_of(source) if not is_remote(name))
    if not here:
        return None  # only the trainer can check it
    try:
        wrong = _rows(spec, here, split, columns)
    except BadRow as error:
        wrong = f"{error.source} {error.place} is not a JSON object: {error.why}"
    except ConfigError as error:
        wrong = str(error)
    if not wrong:
        return None
    return f"{field}: {wrong}" if all(map(exists_locally, here)) else MissingHere(f"{field}: {wrong}")


def _rows(spec: JobSpec, source: Source, split: str, columns: _Columns) -> str | None:
    chat, empty = "", True
    for row in read_rows(source, split, spec.data.subset):
        empty = False
        try:
            prompt = _prompt(spec.data, row)
        except ConfigError as error:
            return f"{row.source} {row.place}: {error}"
        given = tuple(name for name in row.values if name != spec.data.prompt_key)
        if given not in columns and len(columns) < _MAX_KINDS_OF_ROWS:
            columns[given] = f"{row.source} {row.place}"
        if is_messages(prompt):
            chat = chat or f"{row.source} {row.place}"
    if empty:
        return f"{format_source(source)} is empty: it needs one JSON object per line, or one row per problem"
    if chat and not _may_have_chat_template(Path(spec.model).expanduser()):
        return (
            f"{chat} has chat messages, but {spec.model} has no chat template: use a model that has one, "
            "put its chat_template.jinja there, or give prompts as text"
        )
    return None


def _prompt(spec: DataSpec, row: Row) -> object:
    key = spec.prompt_key
    if isinstance(spec, SftDataSpec):
        return example_of(row.values, key, spec.completion_key).prompt
    if key not in row.values:
        raise ConfigError(f"no key {key!r}: fix the data, or set data.prompt_key")
    prompt = row.values[key]
    if not is_messages(prompt) and not isinstance(prompt, str):
        raise ConfigError(f"{key!r} is neither text nor a list of chat messages with a role")
    return prompt


def _may_have_chat_template(model: Path) -> bool:
    if not model.is_dir() or any((model / name).exists() for name in _TEMPLATE_FILES):
        return True
    try:
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
