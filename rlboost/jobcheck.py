"""What is wrong with a job file, found before it costs anything: its fields, and the files and code it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from rlboost.modelcheck import code_problems, data_problem, missing_libraries, model_problems
from rlboost.tried import NotHere, complaint
from shared.errors import ConfigError
from shared.examples import example_of
from shared.jobspec import JobSpec, WrongJob, load, parse
from shared.jobspec_data import DataSpec, Rows, SftDataSpec
from shared.rows import BadRow, Row, is_messages, is_remote, read_rows
from shared.shards import Source, is_here, names, shown
from shared.training import TrainerSpec

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_REWARD_SCRIPT = """
import json, sys
from shared.reward_call import load, style_of, why_not
part = json.loads(sys.argv[1])
try:
    style_of(load(part["function"]), part["arguments"], part["style"])
except BaseException as error:
    sys.exit("reward.function: " + why_not(part["function"], "reward function", error))
"""
_ENVIRONMENT_SCRIPT = """
import json, sys
from shared.environment import maker
from shared.reward_call import why_not
spec = json.loads(sys.argv[1])
try:
    maker(spec["function"], spec["arguments"])
except BaseException as error:
    sys.exit("environment.function: " + why_not(spec["function"], "environment", error))
"""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class Found(NamedTuple):
    """What is to be told of a job file, one line each."""

    problems: list[str]
    """What is not here is a `NotHere`."""
    warnings: list[str]
    """Of this machine, on which the job may not be meant to be trained."""


def check(file: Path, overrides: list[str]) -> Found:
    """Look for all that may be wrong with a job file; see `check_job`.

    Raises:
        ConfigError: the file cannot be read or parsed at all.

    """
    return check_job(load(str(file), overrides))


def check_job(raw: object) -> Found:
    """Look for all that may be wrong with the job that a mapping describes; paths are relative to the current folder.

    Raises:
        ConfigError: it is no mapping.

    """
    try:
        spec = parse(raw)
    except WrongJob as error:
        return Found(error.problems, [])
    found: list[str | None] = [_model(spec.model), _resume(spec.trainer)]
    found += [_data(spec, rows) for rows in spec.data.rows if spec.kind != "sft" or rows.field == "data.train"]
    # Of a service only the trainer can tell whether it is there.
    functions = [(part, part.function) for part in spec.reward_parts if part.function is not None]
    found += [
        complaint("reward.function", function, _REWARD_SCRIPT, part.model_dump_json()) for part, function in functions
    ]
    if (environment := spec.environment) is not None:
        given = environment.model_dump_json()
        found.append(complaint("environment.function", environment.function, _ENVIRONMENT_SCRIPT, given))
    model_is_here = found[0] is None and Path(spec.model).expanduser().is_dir()
    found += [*(model_problems(spec) if model_is_here else ()), *code_problems(spec)]
    if model_is_here and not any(found):
        found.append(data_problem(spec))
    return Found([problem for problem in found if problem], missing_libraries(spec))


def _model(model: str) -> str | None:
    folder = Path(model).expanduser()
    if not folder.exists():
        if _HUB_ID.fullmatch(model) and not folder.parent.exists():
            return None  # a Hugging Face id: only the trainer can tell
        return NotHere(f"model: there is no folder {model}: name a Hugging Face model directory")
    if not (folder / "config.json").is_file():
        return f"model: {model} has no config.json: it is no Hugging Face model directory"
    if not any(folder.glob("*.safetensors")):
        return f"model: {model} has no *.safetensors file: save the model's weights there"
    return None


def _resume(trainer: TrainerSpec) -> str | None:
    place = trainer.resume
    if not trainer.begins_elsewhere or "://" in place or Path(place).exists():
        return None
    return NotHere(
        f"trainer.resume: there is no {place}: give auto, never, or another job's folder (.rlboost/runs/JOB) or one of "
        "its checkpoints"
    )


def _data(spec: JobSpec, rows: Rows) -> str | None:
    field, source, split = rows
    here = tuple(name for name in names(source) if not is_remote(name))
    if not here:
        return None  # only the trainer can tell
    try:
        wrong = _rows(spec, here, split)
    except BadRow as error:
        wrong = f"{error.source} {error.place} is not a JSON object: {error.why}"
    except ConfigError as error:
        wrong = str(error)
    if not wrong:
        return None
    return f"{field}: {wrong}" if all(map(is_here, here)) else NotHere(f"{field}: {wrong}")


def _rows(spec: JobSpec, source: Source, split: str) -> str | None:
    chat, empty = "", True
    for row in read_rows(source, split, spec.data.subset):
        empty = False
        try:
            prompt = _prompt(spec.data, row)
        except ConfigError as error:
            return f"{row.source} {row.place}: {error}"
        if is_messages(prompt):
            chat = chat or f"{row.source} {row.place}"
    if empty:
        return f"{shown(source)} is empty: it needs one JSON object a line, or one row a problem"
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
        raise ConfigError(f"no key {key!r}: mend it, or set data.prompt_key")
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
