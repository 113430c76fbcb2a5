"""From a job to the evaluation of a model on its held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import ConfigError
from shared.jobspec import read_override
from shared.jobspec_fleet import EvalSpec

_NAMES = ("name", "model")
_KEPT = ("environment", "reward", "sampling")
_KEPT_OF = {
    "data": ("eval", "eval_split", "subset", "prompt_key", "max_prompt_tokens"),
    "trainer": ("backend", "dtype", "seed", "offload", "data_parallel", "tensor_parallel", "pipeline_parallel"),
    "elastic": ("seeding", "share"),
    "eval": ("samples", "pass_reward"),
}
_SUFFIX = "-eval"
_NAME_CHARS = 64


def evaluation_of(job: Mapping[str, Any], model: str | None = None, samples: int | None = None) -> dict[str, Any]:
    """Return the job file of `kind: eval` for a job: its held-out data, reward and sampling, and nothing of training.

    Nothing is validated: what is missing or wrong of the job's own is so in the job file that comes out.

    Args:
        job: a job file as a mapping, of any kind.
        model: what to evaluate in place of the job's own model.
        samples: how many completions in all; None for the job's own number, or else the default.

    Raises:
        ConfigError: the job has nothing to evaluate on.

    """
    made: dict[str, Any] = {"kind": "eval", "name": _name(str(job.get("name", "job")))}
    if (evaluated := model or job.get("model")) is not None:
        made["model"] = evaluated
    made |= {name: job[name] for name in _KEPT if job.get(name) is not None}
    for section, names in _KEPT_OF.items():
        given = job.get(section) or {}
        is_section = isinstance(given, Mapping)
        made[section] = {name: given[name] for name in names if given.get(name) is not None} if is_section else given
    _cut_no_more_than_is_needed(made["trainer"])
    if "reward" not in made and "environment" not in made:
        raise ConfigError("there is no reward: give a job file that has one, and --model for what it shall score")
    if isinstance(made["data"], dict) and "eval" not in made["data"]:
        raise ConfigError("data.eval is not set: name held-out prompts, such as data.eval=test.jsonl")
    if isinstance(made["eval"], dict):
        made["eval"].setdefault("samples", EvalSpec().samples)
        if samples is not None:
            made["eval"]["samples"] = samples
    return made


def require_read(override: str) -> None:
    """Refuse a value that wins where nothing is read, be it for its misspelt name.

    Raises:
        ConfigError: no evaluation reads what it sets, or it is not of the form `a.b=v`.

    """
    (section, *keys), value = read_override(override)
    if section in (*_NAMES, *_KEPT):
        return
    inner = keys[:1] or (value if isinstance(value, Mapping) else [])
    if section in _KEPT_OF and all(key in _KEPT_OF[section] for key in inner):
        return
    read = [*_NAMES, *_KEPT, *(f"{name} ({', '.join(keys)})" for name, keys in _KEPT_OF.items())]
    raise ConfigError(f"override {override!r}: an evaluation reads {', '.join(read)}: leave it out, or mend its name")


def _cut_no_more_than_is_needed(trainer: object) -> None:
    """Leave megatron's copies out: only with torch (FSDP2) do they hold a part of the model each."""
    if isinstance(trainer, dict) and trainer.get("backend") == "megatron":
        trainer.pop("data_parallel", None)


def _name(name: str) -> str:
    return name if name.endswith(_SUFFIX) else name[: _NAME_CHARS - len(_SUFFIX)] + _SUFFIX
