"""What is wrong with a job file, found before it costs anything: its fields, and the files and code it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from shared.jobspec import JobSpec, load
from shared.validation import describe

_IMPORT_LIMIT_S = 60.0
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_IMPORT_SCRIPT = """
import importlib, sys
module, _, name = sys.argv[1].partition(":")
function = getattr(importlib.import_module(module), name)
if not callable(function):
    raise TypeError(f"{name} is not a function")
"""


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
    found = [_model(spec.model), _data("data.train", spec.data.train, spec.data.prompt_key)]
    if spec.data.eval is not None:
        found.append(_data("data.eval", spec.data.eval, spec.data.prompt_key))
    found.append(_reward(spec.reward.function))
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


def _data(field: str, path: str, prompt_key: str) -> str | None:
    number = 0
    try:
        with Path(path).expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and prompt_key not in json.loads(line):
                    return f"{field}: {path} line {number} has no key {prompt_key!r}: mend it, or set data.prompt_key"
    except OSError as error:
        return f"{field}: {path}: {error.strerror}: name a .jsonl file that can be read"
    except (ValueError, TypeError) as error:
        return f"{field}: {path} line {number} is not a JSON object: {error}"
    return None if number else f"{field}: {path} is empty: it needs one JSON object a line"


def _reward(function: str) -> str | None:
    # In a process of its own, as in the trainer: it may be slow, print, or hold on to anything.
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(  # noqa: S603 - our own script; the user's module is what is to be tried
            [sys.executable, "-c", _IMPORT_SCRIPT, function],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"reward.function: importing {function} took more than {_IMPORT_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip().splitlines() or ["it exited without a message"])[-1]
    return f"reward.function: {function} cannot be imported from {Path.cwd()}: {reason}"
