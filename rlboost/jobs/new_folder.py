"""Make a job folder from a recipe, or from the example `sums`: data, reward, job files and a small model."""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from pathlib import Path

from rlboost import examples, recipes
from rlboost.examples.sums import make_data
from rlboost.jobs.hub import is_hub_id
from rlboost.shared.errors import ConfigError

MODEL = "model"
"""The folder of the small model."""
_LEFT_OUT = ("__init__.py", "make_model.py")
_RL_RATE, _SFT_RATE = "1.0e-6", "1.0e-5"
"""Learning rates for a model given by the user; a template's are for its small model."""
_OF_INIT = re.compile(rf"^model: {MODEL}\b", re.MULTILINE)
"""A recipe's job for the small model of `rlboost init`, which `--model` does not concern."""
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)[^)]*\)")
_SHOWN = 5


def make(folder: Path, model: str | None = None, recipe: str | None = None) -> list[str]:
    """Write a job folder; return the names of its entries.

    Args:
        folder: new, or empty except for hidden entries, such as `.git`.
        model: a Hugging Face id or folder that the job files name instead of the template's model.
        recipe: the name of one of `names`; the example `sums` if not given.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or there is no such model folder or recipe.

    """
    template = Path(str(examples.__file__)).parent / "sums" if recipe is None else _recipe(recipe)
    given = None if model is None else _checked_model(model)
    files = [file for file in template.iterdir() if file.is_file() and file.name not in _LEFT_OUT]
    is_small = (template / MODEL).is_dir()
    try:
        _require_empty(folder, [file.name for file in files])
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            text = file.read_text(encoding="utf-8")
            if given is not None and file.suffix == ".yaml" and (is_small or not _OF_INIT.search(text)):
                text = with_model(text, given, own_rate=not is_small)
            if file.suffix == ".md":
                text = _without_links(text, f"{template.parent.name}/{template.name}")
            (folder / file.name).write_text(text, encoding="utf-8")
        if recipe is None:
            make_data.main(folder)
        if given is None and is_small:
            shutil.copytree(template / MODEL, folder / MODEL)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}: name another folder") from error
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def start_command(folder: Path) -> str:
    """Return the command that starts a system for the job of a new folder, as its README has it."""
    readme = folder / "README.md"
    found = re.search(r"^rlboost up\b[^#\n]*", readme.read_text(encoding="utf-8"), re.MULTILINE)
    return found[0].strip() if found else "rlboost up --detach"


def names() -> list[str]:
    """Return the names of the recipes."""
    return sorted(file.parent.name for file in Path(str(recipes.__file__)).parent.glob("*/job.yaml"))


def _recipe(name: str) -> Path:
    known = names()
    if (spelled := name.replace("-", "_")) not in known:
        raise ConfigError(f"--recipe {name}: there is no such recipe: name one of {', '.join(known)}")
    return Path(str(recipes.__file__)).parent / spelled


def with_model(job_file: str, model: str, *, own_rate: bool) -> str:
    """Return the text of a job file for another model; without `own_rate`, with AdamW at a learning rate for it."""
    text = re.sub(r"^model: .*$", lambda _: f"model: {json.dumps(model)}", job_file, count=1, flags=re.MULTILINE)
    if own_rate:
        return text
    text = re.sub(r"^(trainer: .*)$", r"\1  # on a GPU also: dtype: bfloat16, offload: all", text, flags=re.MULTILINE)
    lr = _SFT_RATE if re.search(r"^kind: sft$", text, re.MULTILINE) else _RL_RATE
    return re.sub(r"^optimizer: .*$", f"optimizer: {{lr: {lr}, warmup_steps: 5}}", text, count=1, flags=re.MULTILINE)


def _without_links(text: str, place: str) -> str:
    """Return a README with the paths of RLBoost's files in place of links to them, which the new folder lacks."""
    return _LINK.sub(lambda found: f"{found[1]} (`{posixpath.normpath(f'{place}/{found[2]}')}` of RLBoost)", text)


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


def _require_empty(folder: Path, names_of_files: list[str]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a new folder")
    there = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not there:
        return
    ours = [name for name in there if name in {*names_of_files, *make_data.FILES, MODEL}]
    what = f"a new job would overwrite {', '.join(ours)}" if ours else f"it has {', '.join(there[:_SHOWN])}"
    raise ConfigError(f"{folder} is not empty, {what}: name a new folder")
