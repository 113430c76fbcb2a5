"""What is wrong with a job file, found before it costs anything: its fields, and the files and code it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from rlboost.modelcheck import code_problems, data_problem, missing_libraries, model_problems
from rlboost.tried import complaints
from shared.errors import ConfigError
from shared.examples import example_of
from shared.jobspec import JobSpec, WrongJob, load, parse
from shared.jobspec_data import DataSpec, Rows, SftDataSpec
from shared.rows import BadRow, Row, is_messages, is_remote, read_rows
from shared.shards import Source, names, shown
from shared.training import TrainerSpec
from shared.validation import Section

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_REWARD_SCRIPT = """
import json, sys
from shared.reward_call import load, style_of
part = json.loads(sys.argv[1])
style_of(load(part["function"]), part["arguments"], part["style"])
"""
_ENVIRONMENT_SCRIPT = """
import json, sys
from shared.environment import maker
spec = json.loads(sys.argv[1])
maker(spec["function"], spec["arguments"])
"""
_UNFIT = "shared.reward_call.Unfit: "
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class Found(NamedTuple):
    """What is to be told of a job file, one line each."""

    problems: list[str]
    warnings: list[str]
    """Of this machine, on which the job may not be meant to be trained."""


def check(file: Path, overrides: list[str]) -> Found:
    """Look for all that may be wrong with a job file; paths are relative to the current folder.

    Raises:
        ConfigError: the file cannot be read or parsed at all.

    """
    raw = load(str(file), overrides)
    try:
        spec = parse(raw)
    except WrongJob as error:
        return Found(error.problems, [])
    found = [_model(spec.model), _resume(spec.trainer)]
    found += [_data(spec, rows) for rows in spec.data.rows if spec.kind != "sft" or rows.field == "data.train"]
    # Of a service only the trainer can tell whether it is there.
    functions = [(part, part.function) for part in spec.reward_parts if part.function is not None]
    found += [_tried(_REWARD_SCRIPT, part, function, "reward function") for part, function in functions]
    if (environment := spec.environment) is not None:
        found.append(_tried(_ENVIRONMENT_SCRIPT, environment, environment.function, "environment"))
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
        return f"model: there is no folder {model}: name a Hugging Face model directory"
    if not (folder / "config.json").is_file():
        return f"model: {model} has no config.json: it is no Hugging Face model directory"
    if not any(folder.glob("*.safetensors")):
        return f"model: {model} has no *.safetensors file: save the model's weights there"
    return None


def _resume(trainer: TrainerSpec) -> str | None:
    place = trainer.resume
    if not trainer.begins_elsewhere or "://" in place or Path(place).exists():
        return None
    return (
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
    return f"{field}: {wrong}" if wrong else None


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


def _tried(script: str, section: Section, function: str, what: str) -> str | None:
    """Return what is wrong with the user's function that a section names."""
    field = f"{what.partition(' ')[0]}.function"
    try:
        lines = complaints(field, function, script, section.model_dump_json())
    except ConfigError as error:
        return str(error)
    if not lines:
        return None
    reason = lines[-1]
    if reason.startswith(_UNFIT):
        return f"{field}: {function} is no {what}: {reason.removeprefix(_UNFIT)}"
    return f"{field}: {function} cannot be imported from {Path.cwd()}: {reason}"
