"""Job files: resolve one for submission (defaults, validation, absolute local paths), or derive an evaluation job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlboost.shared.data.rows import exists_locally
from rlboost.shared.errors import ConfigError
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.file import read_override
from rlboost.shared.job.fleet import EvalSpec


def resolved(file: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved job of a file; see `complete`.

    Raises:
        ConfigError: names the file and each invalid field.

    """
    try:
        return complete(raw)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def complete(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved job of a mapping, every default filled in.

    Model and data paths are relative to the current folder. The trainer may run in another folder, so existing paths
    become absolute; others stay, as they may be a Hugging Face id or a path on the trainer's machine.

    Raises:
        ConfigError: names each invalid field.

    """
    spec = job_spec.parse(raw)
    job: dict[str, Any] = json.loads(job_spec.to_json(spec))
    if spec.adapter is not None:  # it names the model as the job file does
        job["lora"] = spec.adapter.model_dump(mode="json")
    teacher = job["algorithm"]["teacher"] if spec.held_teacher else None
    reward = job.get("reward") or {}
    scored = [one for one in (reward, *(reward.get("functions") or ())) if one.get("model") in spec.held_reward_models]
    others = [*(job.get("models") or {}).values(), *(job.get("policies") or {}).values()]
    for section in (job, teacher, *others, *scored):
        if section and section.get("model"):
            section["model"] = _absolute(section["model"])
    sets = (job.get("eval") or {}).get("sets", {}).values()
    for section, key in ((job["data"], "train"), (job["data"], "eval"), *((one, "data") for one in sets)):
        if (given := section.get(key)) is not None:
            section[key] = _absolute(given) if isinstance(given, str) else [_absolute(one) for one in given]
    return job


def as_yaml(job: dict[str, Any]) -> str:
    """Format a job as a YAML job file."""
    return yaml.safe_dump(job, sort_keys=False, default_flow_style=None, width=120)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if exists_locally(path) else path


# --- Derive an evaluation job from a training job ---------------------------------------------------------------------

_NAMES = ("name", "model")
_COPIED = ("environment", "agent", "models", "reward", "sampling")
_COPIED_FROM = {
    "data": (
        "eval",
        "eval_split",
        "subset",
        "prompt_key",
        "system_prompt",
        "chat_template_kwargs",
        "max_prompt_tokens",
    ),
    "trainer": (
        "backend",
        "dtype",
        "seed",
        "offload",
        "data_parallel",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "sequence_parallel",
    ),
    "elastic": ("seeding", "share"),
    "eval": ("samples", "pass_reward", "sets"),
}
_SUFFIX = "-eval"
_NAME_CHARS = 64


def evaluation_of(job: Mapping[str, Any], model: str | None = None, samples: int | None = None) -> dict[str, Any]:
    """Return a job file of `kind: eval` for a job: its held-out data, reward and sampling, without training settings.

    Does not validate: errors of the input job remain in the output.

    Args:
        job: a job file as a mapping, of any kind.
        model: evaluated instead of the job's own model.
        samples: number of completions of each set; None for the job's own number, or the default.

    Raises:
        ConfigError: the job has no reward or no held-out data.

    """
    made: dict[str, Any] = {"kind": "eval", "name": _name(str(job.get("name", "job")))}
    if (evaluated := model or job.get("model")) is not None:
        made["model"] = evaluated
    made |= {name: job[name] for name in _COPIED if job.get(name) is not None}
    for section, names in _COPIED_FROM.items():
        given = job.get(section) or {}
        is_section = isinstance(given, Mapping)
        made[section] = {name: given[name] for name in names if given.get(name) is not None} if is_section else given
    _drop_unneeded_parallelism(made["trainer"])
    if not made.keys() & {"reward", "environment", "agent"}:
        raise ConfigError("there is no reward: give a job file that has one, and --model to evaluate")
    sets = made["eval"].get("sets") if isinstance(made["eval"], dict) else None
    if isinstance(made["data"], dict) and "eval" not in made["data"] and not sets:
        raise ConfigError("data.eval is not set: name held-out prompts, such as data.eval=test.jsonl")
    if isinstance(made["eval"], dict):
        made["eval"].setdefault("samples", EvalSpec().samples)
        if samples is not None:
            made["eval"]["samples"] = samples
            if isinstance(sets, Mapping):
                own = {name: one for name, one in sets.items() if isinstance(one, Mapping)}
                made["eval"]["sets"] = {**sets, **{name: {**one, "samples": samples} for name, one in own.items()}}
    return made


def require_read(override: str) -> None:
    """Refuse an override that no evaluation reads, for example because of a misspelled name.

    Raises:
        ConfigError: no evaluation reads it, or it is not of the form `a.b=v`.

    """
    (section, *keys), value = read_override(override)
    if section in (*_NAMES, *_COPIED):
        return
    inner = keys[:1] or (value if isinstance(value, Mapping) else [])
    if section in _COPIED_FROM and all(key in _COPIED_FROM[section] for key in inner):
        return
    read = [*_NAMES, *_COPIED, *(f"{name} ({', '.join(keys)})" for name, keys in _COPIED_FROM.items())]
    raise ConfigError(f"override {override!r}: an evaluation reads {', '.join(read)}: omit it, or correct its name")


def _drop_unneeded_parallelism(trainer: object) -> None:
    """Reduce Megatron's data parallelism to what divides the experts: unlike FSDP2's, it divides nothing else."""
    if isinstance(trainer, dict) and trainer.get("backend") == "megatron" and "data_parallel" in trainer:
        trainer["data_parallel"] = trainer.get("expert_parallel", 1)


def _name(name: str) -> str:
    return name if name.endswith(_SUFFIX) else name[: _NAME_CHARS - len(_SUFFIX)] + _SUFFIX
