"""Make a job folder from the example `sums`: data, reward, job files and a small model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from rlboost import examples
from rlboost.examples.sums import make_data
from rlboost.jobs.model_path import is_hub_id
from rlboost.shared.errors import ConfigError

MODEL = "model"
"""The folder of the small model."""
JOB_FILES = ("job.yaml", "warmup.yaml")
_COPIED = (*JOB_FILES, "reward.py", "test_reward.py", "make_data.py", "README.md")
_LEARNING_RATES = {"job.yaml": "1.0e-6", "warmup.yaml": "1.0e-5"}
"""Learning rates for a model given by the user; the template's are for the small model."""
_SHOWN = 5


def make(folder: Path, model: str | None = None) -> list[str]:
    """Write a job folder; return the names of its entries.

    Args:
        folder: new, or empty except for hidden entries, such as `.git`.
        model: a Hugging Face id or folder that the job files name instead of a copy of the small model.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or there is no such model folder.

    """
    given = None if model is None else _checked_model(model)
    template = Path(str(examples.__file__)).parent / "sums"
    try:
        _require_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            text = (template / name).read_text(encoding="utf-8")
            if given is not None and name in JOB_FILES:
                text = with_model(text, given, _LEARNING_RATES[name])
            (folder / name).write_text(text, encoding="utf-8")
        make_data.main(folder)
        if given is None:
            shutil.copytree(template / MODEL, folder / MODEL)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}: name another folder") from error
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def with_model(job_file: str, model: str, lr: str) -> str:
    """Return the text of a job file of the template for another model, with AdamW at a learning rate for it."""
    text = re.sub(r"^model: .*$", lambda _: f"model: {json.dumps(model)}", job_file, count=1, flags=re.MULTILINE)
    text = re.sub(r"^(trainer: .*)$", r"\1  # on a GPU also: dtype: bfloat16, offload: all", text, flags=re.MULTILINE)
    return re.sub(r"^optimizer: .*$", f"optimizer: {{lr: {lr}, warmup_steps: 5}}", text, count=1, flags=re.MULTILINE)


def _checked_model(model: str) -> str:
    """Return the model as a job file in another folder names it."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder.absolute())
    if is_hub_id(model):
        return model
    raise ConfigError(
        f"--model {model}: there is no such folder: name one, or a Hugging Face id such as Qwen/Qwen3-0.6B"
    )


def _require_empty(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a new folder")
    there = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not there:
        return
    ours = [name for name in there if name in {*_COPIED, *make_data.FILES, MODEL}]
    what = f"a new job would overwrite {', '.join(ours)}" if ours else f"it has {', '.join(there[:_SHOWN])}"
    raise ConfigError(f"{folder} is not empty, {what}: name a new folder")
