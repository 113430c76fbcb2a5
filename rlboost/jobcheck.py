"""What is wrong with a job file, found before it costs anything: its fields, and the files and code it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from rlboost.modelcheck import code_problems, data_problem, machine_problems, model_problems
from shared.errors import ConfigError
from shared.examples import example_of
from shared.jobspec import DataSpec, JobSpec, load
from shared.rows import BadRow, Row, is_messages, is_remote, read_rows
from shared.validation import Section, describe

_IMPORT_LIMIT_S = 60.0
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


def problems(file: Path, overrides: list[str]) -> list[str]:
    """Return one line a problem; paths are relative to the current folder.

    Raises:
        ConfigError: the file cannot be read or parsed at all.

    """
    raw = load(str(file), overrides)
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        return describe(error)
    found = [_model(spec.model)]
    if spec.data.train is not None:
        found.append(_data("data.train", spec, spec.data.train, spec.data.train_split))
    if spec.data.eval is not None and spec.kind != "sft":
        found.append(_data("data.eval", spec, spec.data.eval, spec.data.eval_split))
    # Of a service only the trainer can tell whether it is there.
    functions = [(part, part.function) for part in spec.reward_parts if part.function is not None]
    found += [_tried(_REWARD_SCRIPT, part, function, "reward function") for part, function in functions]
    if (environment := spec.environment) is not None:
        found.append(_tried(_ENVIRONMENT_SCRIPT, environment, environment.function, "environment"))
    model_is_here = found[0] is None and Path(spec.model).expanduser().is_dir()
    found += [*(model_problems(spec) if model_is_here else ()), *code_problems(spec), *machine_problems(spec)]
    if model_is_here and not any(found):
        found.append(data_problem(spec))
    return [problem for problem in found if problem]


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


def _data(field: str, spec: JobSpec, source: str, split: str) -> str | None:
    if is_remote(source):
        return None  # only the trainer can tell
    try:
        wrong = _rows(spec, source, split)
    except BadRow as error:
        wrong = f"{source} {error.place} is not a JSON object: {error.why}"
    except ConfigError as error:
        wrong = str(error)
    return f"{field}: {wrong}" if wrong else None


def _rows(spec: JobSpec, source: str, split: str) -> str | None:
    chat, empty = "", True
    for row in read_rows(source, split, spec.data.subset):
        empty = False
        try:
            prompt = _prompt(spec.data, row, imitates=spec.kind == "sft")
        except ConfigError as error:
            return f"{source} {row.place}: {error}"
        if is_messages(prompt):
            chat = chat or row.place
    if empty:
        return f"{source} is empty: it needs one JSON object a line, or one row a problem"
    if chat and not _may_have_chat_template(Path(spec.model).expanduser()):
        return (
            f"{source} {chat} has chat messages, but {spec.model} has no chat template: use a model that has one, "
            "put its chat_template.jinja there, or give prompts as text"
        )
    return None


def _prompt(spec: DataSpec, row: Row, *, imitates: bool) -> object:
    key = spec.prompt_key
    if imitates:
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
    # In a process of its own, as in the trainer: it may be slow, print, or hold on to anything.
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(  # noqa: S603 - our own script; the user's module is what is to be tried
            [sys.executable, "-c", script, section.model_dump_json()],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{field}: importing {function} took more than {_IMPORT_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip().splitlines() or ["it exited without a message"])[-1]
    if reason.startswith(_UNFIT):
        return f"{field}: {function} is no {what}: {reason.removeprefix(_UNFIT)}"
    return f"{field}: {function} cannot be imported from {Path.cwd()}: {reason}"
