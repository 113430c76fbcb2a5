"""Check a job file before it is submitted: its fields, the files and code it names, and how it fits on the GPUs."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlboost.jobs import memory
from rlboost.jobs.hub import is_hub_id, nearest
from rlboost.jobs.memory import size_of
from rlboost.jobs.model_check import (
    DataFindings,
    MissingHere,
    agent_rows,
    check_data,
    check_environment,
    code_problems,
    complaint,
    may_have_chat_template,
    missing_libraries,
    model_problems,
    n_parameters,
    path_warning,
)
from rlboost.local.layout import DeviceSummary, n_gpus
from rlboost.shared.data.examples import examples_of, hidden_part, labelled_of, margin_of, pair_of, prompt_of
from rlboost.shared.data.images import conversation_key, split_images
from rlboost.shared.data.messages import Messages
from rlboost.shared.data.rows import (
    BadRow,
    Row,
    exists_locally,
    format_source,
    is_messages,
    is_remote,
    names_of,
    read_rows,
)
from rlboost.shared.data.vision import FAMILIES, vision_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import TEACHER
from rlboost.shared.job.data import (
    DpoDataSpec,
    OfflineDataSpec,
    PromptDataSpec,
    RewardDataSpec,
    Rows,
    SftDataSpec,
    require_splits,
)
from rlboost.shared.job.file import load
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.reward import column_problem
from rlboost.shared.job.spec import GeneratingJob, InvalidJob, JobSpec, RlJob, parse
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.model.experts import count_in_experts
from rlboost.shared.model.folder import (
    REWARD_MODEL,
    count_in_tower,
    count_parameters,
    read_config,
    require_model_files,
    require_served_model,
)
from rlboost.shared.user_code import ForbiddenFunction, check_arguments

# --- Check a job whose model is a folder against the GPUs of the system, before anything loads ------------------------

_GIB = 1 << 30


class Fit(NamedTuple):
    """How a job fits on the GPUs, one line each."""

    problems: list[str]
    advice: list[str]


def fit(spec: JobSpec, devices: DeviceSummary) -> Fit:
    """Return what does not fit for certain, and what probably wastes a GPU or runs out of memory.

    Sizes that the model's files do not give are not checked.
    """
    found = Fit([], [])
    try:
        config = read_config(Path(spec.model).expanduser())
        n_parameters = count_parameters(Path(spec.model).expanduser())
        n_in_experts = count_in_experts(Path(spec.model).expanduser())
        n_in_tower = count_in_tower(Path(spec.model).expanduser())
    except ConfigError:
        return found
    if devices.tensor_parallel:
        _check_engines(spec, config.get("text_config", config), n_parameters, devices, found)
    if spec.kind != "eval" and spec.trainer.nodes == 1:  # the GPUs of other machines are not known here
        added = _added_parameters(spec, config)
        trains_tower = config.get("model_type") in FAMILIES
        model = memory.trained_model(
            spec, n_parameters, n_in_experts, *added, n_in_tower=n_in_tower, trains_tower=trains_tower
        )
        _check_trainer(spec, model, devices, found)
    return found


def _added_parameters(spec: JobSpec, config: dict[str, Any]) -> tuple[int, int, int]:
    """Return the parameters of adapter and critic, teacher, and reward models; 0 in a family of unknown sizes."""
    try:
        added = memory.added_parameters(spec, size_of(config))
        return added, memory.teacher_parameters(spec), memory.scoring_parameters(spec)
    except ConfigError:
        return 0, 0, 0


def _check_engines(
    spec: JobSpec, config: dict[str, Any], n_parameters: int, devices: DeviceSummary, found: Fit
) -> None:
    if isinstance(spec, OfflineJob):
        return
    split = devices.tensor_parallel
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % split:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        found.problems.append(
            f"model: its {heads} attention heads cannot be divided by --tensor-parallel {split}: use one of {divisors}"
        )
    budget = devices.engine_memory_bytes
    if not budget:
        return
    n_tokens = spec.sampling.max_tokens
    needed = memory.engine_bytes(n_parameters, _kv_token_bytes(config), n_tokens, split)
    if needed > budget:
        found.problems.append(
            f"model: an engine needs {_gib(needed)} per GPU for weights and one sample of {n_tokens} tokens, and has "
            f"{_gib(budget)}: raise --gpu-memory-utilization or --tensor-parallel, or take a smaller model"
        )


def _check_trainer(spec: JobSpec, model: memory.TrainedModel, devices: DeviceSummary, found: Fit) -> None:
    trainer = spec.trainer
    n_ranks = trainer.n_ranks
    if n_ranks > devices.trainer_gpus:
        found.problems.append(
            f"{_ranks(trainer)}: the job trains in {n_ranks} processes with a GPU each, and the trainer has "
            f"{n_gpus(devices.trainer_gpus)}: lower one, or give more --trainer-gpus"
        )
    elif n_ranks < devices.trainer_gpus:
        found.advice.append(
            f"{_ranks(trainer)}: the job trains on {n_ranks} of the trainer's {n_gpus(devices.trainer_gpus)}: "
            "raise one to use them all"
        )
    available = devices.trainer_memory_bytes
    if not available:
        return
    needed = memory.state_bytes(model, trainer)
    if needed > available:
        found.problems.append(
            f"model: the trainer needs {_gib(needed)} per GPU for weights, optimizer and gradients, and a GPU has "
            f"{_gib(available)}: {_more_shards(trainer)}, or see docs/gpu-memory.md"
        )
        return
    resident = memory.generating_bytes(model, trainer)
    if (n_others := devices.n_time_sharing - 1) and needed + n_others * resident > available:
        offload = "set it to all" if trainer.offload != "all" else "lower --trainers"
        found.problems.append(
            f"trainer.offload: {devices.n_time_sharing} trainers use a GPU of {_gib(available)} in turns. One of a job "
            f"like this needs {_gib(needed)} while it trains, and each of the others keeps {_gib(resident)}: {offload}"
        )
    if devices.shared_memory_bytes and resident + devices.shared_memory_bytes > available:
        found.advice.append(
            f"trainer.offload: the trainer keeps {_gib(resident)} on a GPU of {_gib(available)} while its engines use "
            f"{_gib(devices.shared_memory_bytes)}: set it to all, or lower --gpu-memory-utilization"
        )


def _ranks(trainer: TrainerSpec) -> str:
    """Return the keys whose product is the number of ranks."""
    split = "tensor_parallel x pipeline_parallel x " if trainer.backend == "megatron" else ""
    return f"trainer.data_parallel x {split}context_parallel"


def _more_shards(trainer: TrainerSpec) -> str:
    return "raise trainer.fsdp_size, or remove it" if trainer.fsdp_size else f"raise {_ranks(trainer)}"


def _kv_token_bytes(config: dict[str, Any]) -> int:
    """Return the KV cache of one token, 0 if the configuration does not give it."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    layers = config.get("num_hidden_layers")
    if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)) or not heads:
        return 0
    head_dim = config.get("head_dim") or hidden // heads
    return memory.kv_token_bytes(layers, config.get("num_key_value_heads") or heads, head_dim)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f} GiB"


# --- Warn about learning rates that usually ruin a model --------------------------------------------------------------


SMALL_MODEL = 10_000_000
"""Parameters; models below it, trained from scratch for tests, need and bear rates of 1e-3."""
_RATES = {
    ("rl", "full"): ("1e-6", 1e-4),
    ("rl", "lora"): ("1e-5", 1e-3),
    ("sft", "full"): ("1e-5", 1e-3),
    ("sft", "lora"): ("1e-4", 5e-3),
    ("dpo", "full"): ("1e-6", 1e-4),
    ("dpo", "lora"): ("1e-5", 1e-3),
    ("reward", "full"): ("1e-5", 1e-3),
    ("reward", "lora"): ("1e-4", 5e-3),
}
"""Usual and highest learning rate of AdamW by kind of job and of weights; the highest is ten times the usual or more.

Usual are 1e-6 for RL and DPO of all weights, the default of TRL's and verl's GRPO and of TRL's DPO, and 1e-5 for
fine-tuning and reward models; LoRA takes ten times these or more, as its product starts at zero.
"""


def lr_advice(spec: JobSpec, n_parameters: int | None) -> str:
    """Return a warning about `optimizer.lr`, empty if there is none.

    Args:
        spec: any job.
        n_parameters: size of the model; None if unknown, as for a Hugging Face id, which is taken for a large one.

    """
    if spec.kind == "eval" or spec.optimizer.name != "adamw":
        return ""  # Muon's updates are orthogonalized: its rates are larger
    if n_parameters is not None and n_parameters < SMALL_MODEL:
        return ""
    case = (spec.kind, "full" if spec.adapter is None else "lora")
    usual, highest = _RATES[case]
    if spec.optimizer.lr <= highest:
        return ""
    size = "a pretrained model" if n_parameters is None else f"a model of {n_parameters / 1e6:.0f} M parameters"
    return (
        f"optimizer.lr: {spec.optimizer.lr:g} is likely to ruin {size}: start with {usual}, which is usual for "
        f"{'all weights' if case[1] == 'full' else 'LoRA'} with kind: {spec.kind}"
    )


# --- The check --------------------------------------------------------------------------------------------------------


_REWARD_SCRIPT = """
import json, sys
from rlboost.shared.user_code import (
    load, detect_style, describe_import_error, hidden_argument, missing_columns
)
part, arguments, rows = json.loads(sys.argv[1]), json.loads(sys.argv[1])["arguments"], json.loads(sys.argv[2])
try:
    function = load(part["function"], "reward function")
    style = detect_style(function, arguments, part["style"])
except BaseException as error:
    sys.exit("reward.function: " + describe_import_error(part["function"], "reward function", error))
for place, columns in rows:
    if hidden := hidden_argument(arguments, style, columns, place):
        sys.exit(hidden)
    if missing := missing_columns(function, arguments, style, columns):
        sys.exit(
            f"reward.function: {part['function']} needs {missing}, but {place} has "
            f"{', '.join(columns) or 'none besides the prompt'}: rename the parameter or the column, "
            "give the parameter a default, or set it in reward.arguments"
        )
"""
_MAX_KINDS_OF_ROWS = 100
_OWN_REWARDS = "rlboost.rewards."
_MAX_REWARD_ROWS = 1000
"""Of each source, this many rows are given to the `check_row` of a reward of ours."""


class _Seen:
    """What the check of rewards needs of the data."""

    def __init__(self) -> None:
        self.columns: dict[tuple[str, ...], str] = {}
        """The columns of a row, without the prompt -> where the first such row is."""
        self.rows: list[Row] = []
        """The first rows of each source."""
        self.hidden = ""
        """Which column may be a part of the prompts that the model does not see; empty if none is."""


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
    example: str = ""
    """The first prompt as the model sees it, as text of several lines; empty if it is unknown."""


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
        policies = {name: spec.policy_job(name, "") for name in spec.policies} if isinstance(spec, RlJob) else {}
    except InvalidJob as error:
        return Found(error.problems, [])
    found = _check(spec, on_part, devices)
    for name, policy in policies.items():
        on_part(f"checking policies.{name}")
        more = _check(policy, on_part, devices)
        new = [problem for problem in more.problems if problem not in found.problems]
        found = found._replace(
            problems=[*found.problems, *(type(problem)(f"policies.{name}: {problem}") for problem in new)],
            advice=[*found.advice, *(f"policies.{name}: {advice}" for advice in more.advice)],
        )
    return found


def _check(spec: JobSpec, on_part: Callable[[str], None], devices: DeviceSummary | None) -> Found:
    found: list[str | None] = [_model(spec.model), _resume(spec.trainer, spec.steps)]
    if spec.held_teacher:
        found.append(_model(spec.held_teacher, TEACHER))
    found += [_other_model(model, REWARD_MODEL, scores=True) for model in spec.held_reward_models]
    if not isinstance(spec, OfflineJob):
        for name, other in spec.models.items():
            found.append(_other_model(other.model, f"models.{name}.model", scores=name in spec.served_reward_models))
    on_part("reading the data")
    seen = _Seen()
    is_offline = isinstance(spec, OfflineJob)
    used = [rows for rows in spec.rows if not is_offline or spec.eval or rows.field == "data.train"]
    try:
        require_splits(spec.rows)
    except ConfigError as error:
        found.append(str(error))
    for rows in used:
        is_rewarded = not is_offline or rows.field != "data.train"
        found.append(_data(spec, rows, seen if is_rewarded else _Seen()))
    found += [] if isinstance(spec, OfflineJob) else _judges(spec, seen)
    # Only the trainer can check a reward service.
    on_part("importing the functions that it names")
    functions = [(part, part.function) for part in spec.reward_parts if part.function is not None]
    kinds = json.dumps([(place, given) for given, place in seen.columns.items()])
    found += [
        complaint("reward.function", function, _REWARD_SCRIPT, part.model_dump_json(), kinds)
        for part, function in functions
    ]
    own = [function for _, function in functions if function.startswith(_OWN_REWARDS)]
    unrewarded = [] if any(found) else [_unrewarded(function, seen.rows) for function in own]
    found += [why for why, n_rows in unrewarded if n_rows == len(seen.rows)]
    model_is_here = found[0] is None and Path(spec.model).expanduser().is_dir()
    found += [*(model_problems(spec) if model_is_here else ()), *code_problems(spec)]
    fits = fit(spec, devices) if model_is_here and devices is not None else Fit([], [])
    found += fits.problems
    data = DataFindings()
    if model_is_here and not any(found):
        on_part("loading the tokenizer, then tokenizing the prompts")
        data = check_data(spec)
        found.append(data.problem)
    if spec.environment is not None:
        on_part("starting a conversation with the environment")
        started = check_environment(spec, data.data)
        found.append(started.problem)
        data = data._replace(example=started.example or data.example)
    # None for a Hugging Face id; a folder that is missing or damaged here may hold a model of any size.
    size = n_parameters(spec) if model_is_here else None
    advice = "" if found[0] or (model_is_here and size is None) else lr_advice(spec, size)
    nucleus = spec.sampling.advice if spec.kind == "rl" else ""
    some = [why for why, n_rows in unrewarded if 0 < n_rows < len(seen.rows)]
    if seen.hidden:
        some.append(f"data: {seen.hidden}: put it into the prompt, unless only the reward uses it")
    return Found(
        list(dict.fromkeys(filter(None, found))),
        [*missing_libraries(spec), *filter(None, [path_warning(spec)])],
        [
            *filter(None, [advice, _warm_up_advice(spec), _isolation_advice(spec), nucleus]),
            *fits.advice,
            *data.advice,
            *some,
        ],
        [*_notices(spec), *data.notices],
        data.example,
    )


def _unrewarded(function: str, rows: Sequence[Row]) -> tuple[str, int]:
    """Return why rows get no reward of a function of ours, and how many of these there are."""
    try:
        module = importlib.import_module(function.partition(":")[0])
    except ImportError:  # said by the function's own check
        return "", 0
    if (check_row := getattr(module, "check_row", None)) is None:
        return "", 0
    whys = [(row, why) for row in rows if (why := check_row(row.values))]
    if not whys:
        return "", 0
    row, why = whys[0]
    return (
        f"reward.function: {function} gives no reward to {len(whys)} of the {len(rows)} rows that were tried, such as "
        f"{row.source} {row.place}: {why}"
    ), len(whys)


def _warm_up_advice(spec: JobSpec) -> str:
    if spec.kind == "eval" or spec.optimizer.warmup_steps < spec.steps:
        return ""
    return (
        f"optimizer.warmup_steps: {spec.optimizer.warmup_steps} is not below the job's {spec.steps} steps, so the "
        "learning rate never reaches optimizer.lr: lower it"
    )


def _isolation_advice(spec: JobSpec) -> str:
    try:
        for part in spec.reward_parts:
            check_arguments(part.function or "", part.arguments)
    except ForbiddenFunction as error:
        return f"reward.arguments: {error}"
    return ""


def _notices(spec: JobSpec) -> list[str]:
    """Return a line for each model and source that is taken for an id of Hugging Face, which may be a typing error."""
    models = [("model", spec.model), *((REWARD_MODEL, model) for model in spec.held_reward_models)]
    if spec.held_teacher:
        models.append((TEACHER, spec.held_teacher))
    if not isinstance(spec, OfflineJob):
        models += [(f"models.{name}.model", other.model) for name, other in spec.models.items()]
    data = [(rows.field, name) for rows in spec.rows for name in names_of(rows.source) if is_remote(name)]
    return [
        *(
            f"{field}: {model} is not a folder here: it is taken for a Hugging Face id"
            for field, model in models
            if not Path(model).expanduser().exists() and is_hub_id(model)
        ),
        *(
            f"{field}: {name} is not a file or folder here: it is taken for a Hugging Face id, and its rows are not "
            "checked"
            for field, name in data
        ),
    ]


def _model(model: str, field: str = "model") -> str | None:
    folder = Path(model).expanduser()
    if not folder.exists():
        if is_hub_id(model):
            return None  # only the trainer can check it
        return MissingHere(
            f"{field}: there is no folder {model}: name a Hugging Face model directory or id ({nearest(model)})"
        )
    try:
        require_model_files(folder)
    except ConfigError as error:
        return f"{field}: {error}"
    return None


def _other_model(model: str, field: str, *, scores: bool) -> str | None:
    try:
        if (problem := _model(model, field)) is None and (folder := Path(model).expanduser()).is_dir():
            require_served_model(folder, field, scores=scores)
    except ConfigError as error:
        return str(error)
    return problem


def _judges(spec: GeneratingJob, seen: _Seen) -> Iterator[str]:
    for judge in (part.judge for part in spec.served_parts if part.judge is not None):
        model = spec.models[judge.model].model
        if not may_have_chat_template(Path(model).expanduser()):
            yield (
                f"models.{judge.model}.model: {model} has no chat template, with which a judge is asked: use a model "
                "that has one, or put its chat_template.jinja there"
            )
        problems = (column_problem(judge.prompt, columns, place) for columns, place in seen.columns.items())
        yield from [problem for problem in problems if problem][:1]


def _resume(trainer: TrainerSpec, steps: int) -> str | None:
    place = trainer.resume
    if not trainer.starts_from_checkpoint or "://" in place:
        return None
    if (folder := Path(place)).exists():
        names = [path.name for path in (folder, *folder.glob("checkpoints/*"))]
        done = max((int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name))), default=0)
        nothing_left = f"trainer.resume: {place} has {done} steps, and steps is {steps}: raise steps above {done}"
        return nothing_left if done >= steps else None
    return MissingHere(
        f"trainer.resume: there is no {place}: give auto, never, or another job's folder (.rlboost/runs/JOB) or one of "
        "its checkpoints"
    )


def _data(spec: JobSpec, rows: Rows, seen: _Seen) -> str | None:
    """Return the problem of a source, and add its rows to those seen."""
    here = tuple(name for name in names_of(rows.source) if not is_remote(name))
    if not here:
        return None  # only the trainer can check it
    try:
        wrong = _rows(spec, rows._replace(source=here), seen)
    except BadRow as error:
        wrong = f"{error.source} {error.place} is not a JSON object: {error.why}"
    except ConfigError as error:
        wrong = str(error)
    if not wrong:
        return None
    found = f"{rows.field}: {wrong}"
    return found if all(map(exists_locally, here)) else MissingHere(found)


def _rows(spec: JobSpec, rows: Rows, seen: _Seen) -> str | None:
    chat, n_rows = "", 0
    folder = Path(spec.model).expanduser()
    # A model that is not here may see images: the trainer refuses those of a text model.
    sees_images = not (folder / "config.json").is_file() or vision_of(read_config(folder)) is not None
    for n_rows, row in enumerate(read_rows(rows.source, rows.split, rows.subset, agent_rows(spec)), 1):
        if n_rows <= _MAX_REWARD_ROWS:
            seen.rows.append(row)
        try:
            prompt = _prompt(spec.data, rows.prompt_key, row, sees_images=sees_images)
        except ConfigError as error:
            return f"{row.source} {row.place}: {error}"
        given = tuple(name for name in row.values if name != rows.prompt_key)
        if given not in seen.columns and len(seen.columns) < _MAX_KINDS_OF_ROWS:
            seen.columns[given] = f"{row.source} {row.place}"
        if is_messages(prompt):
            chat = chat or f"{row.source} {row.place}"
        if not (seen.hidden or isinstance(spec, OfflineJob) or spec.agent or spec.data.system_prompt is not None):
            seen.hidden = hidden_part(row.values, rows.prompt_key, prompt)
    if not n_rows:
        return f"{format_source(rows.source)} is empty: it needs one JSON object per line, or one row per problem"
    if chat and not may_have_chat_template(folder):
        return (
            f"{chat} has chat messages, but {spec.model} has no chat template: use a model that has one, "
            "put its chat_template.jinja there, or give prompts as text"
        )
    return None


def _prompt(spec: PromptDataSpec | OfflineDataSpec, key: str, row: Row, *, sees_images: bool) -> str | Messages:
    if isinstance(spec, SftDataSpec):
        shown = split_images(row.values, conversation_key(row.values, key)).values if sees_images else row.values
        return examples_of(shown, key, spec.completion_key, every_turn=spec.assistant_only_loss)[-1].prompt
    if isinstance(spec, RewardDataSpec):
        if (labelled := labelled_of(row.values, key, spec.chosen_key)) is not None:
            return labelled[0].prompt
        margin_of(row.values)
    if isinstance(spec, DpoDataSpec):
        return pair_of(row.values, key, spec.chosen_key, spec.rejected_key)[0].prompt
    values = split_images(row.values, key).values if sees_images else row.values
    return prompt_of(values, key, spec.system_prompt).given
