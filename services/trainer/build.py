"""Builds the resources of one job. Imports torch and transformers: import it late, and on the device's thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from rlboost.services.trainer.adapters.checkpoint_bucket import CheckpointLocations
from rlboost.services.trainer.adapters.data import check_teacher, find_model, load_data
from rlboost.services.trainer.adapters.environment_pool import EnvironmentPool
from rlboost.services.trainer.adapters.images import ImageUploads
from rlboost.services.trainer.adapters.machines.registry import JobMachines, TrainerMachines
from rlboost.services.trainer.adapters.megatron.policy import MegatronPolicy
from rlboost.services.trainer.adapters.model_checks import hardware_of
from rlboost.services.trainer.adapters.named_paths import check_named_paths, check_processes
from rlboost.services.trainer.adapters.other_models import other_models
from rlboost.services.trainer.adapters.reward_pool import NoReward, RewardModelSource, RewardPool
from rlboost.services.trainer.adapters.run_folder import LocalRunFolder, RewardModel
from rlboost.services.trainer.adapters.run_log import openers
from rlboost.services.trainer.adapters.torch.models import classifier_of
from rlboost.services.trainer.adapters.torch.policy import RanksPolicy, TorchPolicy
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.services.trainer.adapters.user_code import UserCodeLog, load_loss, load_skip_function
from rlboost.services.trainer.adapters.weights import RanksPublisher
from rlboost.services.trainer.domain.canary_prompts import build_canary_prompts
from rlboost.services.trainer.domain.loss.function import LossFn, sft_loss
from rlboost.services.trainer.domain.loss.policy import PAIR_LOSS, PolicyLoss, job_loss
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.samples import Data, Prompt
from rlboost.services.trainer.ports.storage import JobResources, OtherModel
from rlboost.services.trainer.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.agent import session_key
from rlboost.shared.job.algorithm import TEACHER
from rlboost.shared.job.images import require_supported
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.model.experts import require_replayable
from rlboost.shared.model.folder import (
    REWARD_MODEL,
    digest_of_weights,
    read_config,
    require_reward_model,
    require_teachable,
)
from rlboost.shared.model.tool_calls import CallStyle
from rlboost.shared.process.torch_device import require_device
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.access import RecordKey
from rlboost.shared.weights.client import StoreClient

IMAGES = "images"
"""The folder of a job's images, in its own."""


def build_resources(
    config: Settings, waits: Waits, machines: TrainerMachines | None, spec: JobSpec, job_id: str, created: datetime
) -> JobResources:
    """Build a job's resources. Blocks.

    Args:
        config: the trainer's settings.
        waits: registry of waits.
        machines: the machines that join this trainer; None if none can.
        spec: the job file.
        job_id: the job's id.
        created: when the job was created.

    Raises:
        ConfigError: a file that the job names is missing or invalid.

    """
    check_named_paths(spec, config.dir, config.job_folders)
    check_processes(spec, os.cpu_count() or 1)
    folder = config.dir / job_id
    model = find_model(spec.model)
    require_supported(spec, read_config(model))
    data = load_data(spec, model, created, folder / IMAGES)
    prompts = (*data.train, *data.evaluation)
    has_images = any(prompt.images for prompt in prompts)
    places = CheckpointLocations(folder, config.outage_limit_s)
    token = config.token.get_secret_value()
    client = StoreClient(config.weight_store_url, token)
    config_json = (model / "config.json").read_text(encoding="utf-8")
    own_machines = _machines(config, waits, machines, spec.trainer)
    loss = _loss(spec)
    replayed = None
    if spec.trainer.router_replay != "none" and spec.kind == "rl":
        replayed = require_replayable(model, spec.sampling.max_tokens)
    aggregation = loss.aggregation if isinstance(loss, PolicyLoss) else "token_mean"
    policy = PolicySettings.of(
        spec, aggregation, replayed, _teacher(spec, model, data), str(folder / IMAGES) if has_images else ""
    )
    engine = _engine(config, spec.trainer, folder, own_machines, policy)
    skip_function = spec.data.curriculum.function if spec.data.curriculum else None
    others = other_models(
        spec,
        job_id,
        created,
        prompts,
        connect=lambda: StoreClient(config.weight_store_url, token),
        folder=folder,
        waits=waits,
        limit_s=config.outage_limit_s,
    )
    return JobResources(
        engine=engine,
        model=model,
        loss=loss,
        data=data,
        rewards=_rewards(config, spec, waits, folder, prompts, created, others),
        environments=_environments(spec, waits, folder, data.call_style),
        session_key=None if spec.agent is None else partial(session_key, token),
        checkpoints=places.store(spec.trainer.checkpoints or config.checkpoints, job_id),
        weights=RanksPublisher(
            client,
            job_id,
            config_json,
            folder / "pulled",
            waits,
            config.outage_limit_s,
            deltas=spec.elastic.weights == "delta",
            token=token,
        ),
        folder=LocalRunFolder(
            folder, model, RecordKey(token), openers(spec, job_id, folder), _reward_model(spec, model, data)
        ),
        predecessor=places.predecessor(spec.trainer.resume),
        critic=engine if policy.critic else None,
        hardware=hardware_of(spec, model, config.device),
        machines=own_machines,
        skip_function=load_skip_function(skip_function, data.train) if skip_function else None,
        models=others,
        canary_prompts=build_canary_prompts(
            data.vocab_size,
            temperature=spec.sampling.scored_temperature,
            dtype=spec.trainer.dtype,
            top_p=spec.sampling.top_p if spec.kind == "rl" else 1.0,
        ),
        images=ImageUploads(client, folder / IMAGES, waits, config.outage_limit_s) if has_images else None,
        replayed=replayed,
    )


def _rewards(
    config: Settings,
    spec: JobSpec,
    waits: Waits,
    folder: Path,
    prompts: Sequence[Prompt],
    created: datetime,
    others: Mapping[str, OtherModel],
) -> RewardPool | NoReward:
    if spec.reward is None:
        return NoReward()
    token_origins = config.reward_token_origins.split(",")
    columns = {name for prompt in prompts for name in prompt.columns}
    has_chats = any(not isinstance(prompt.given, str) for prompt in prompts)
    log = UserCodeLog(folder / "reward.log")
    models = {model: _scorer(config, spec, model, created, has_chats=has_chats) for model in spec.held_reward_models}
    served = {name: model.scores.digest for name, model in others.items() if model.scores}
    return RewardPool(
        spec.reward, waits, log, token_origins=token_origins, columns=columns, models=models, served=served
    )


def _scorer(config: Settings, spec: JobSpec, name: str, created: datetime, *, has_chats: bool) -> RewardModelSource:
    """Return a reward model of the job, once its files are checked."""
    folder, trainer = find_model(name, REWARD_MODEL), spec.trainer
    require_reward_model(folder)
    scorer = {
        "folder": str(folder),
        "device": config.device,
        "dtype": trainer.dtype,
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "created": created.isoformat(),
        "chat_template_kwargs": spec.data.chat_template_kwargs,
        "has_chats": has_chats,
    }
    return RewardModelSource(scorer, digest_of_weights(folder))


def _environments(spec: JobSpec, waits: Waits, folder: Path, style: CallStyle) -> EnvironmentPool | None:
    if spec.agent is not None and not spec.agent.runs_here:
        return None
    if spec.agent is not None:
        return EnvironmentPool(spec.agent, waits, UserCodeLog(folder / "agent.log"), style)
    if spec.environment is None:
        return None
    return EnvironmentPool(spec.environment, waits, UserCodeLog(folder / "environment.log"), style)


def _loss(spec: JobSpec) -> LossFn:
    if spec.kind == "sft":
        return sft_loss
    if spec.kind == "dpo" or spec.kind == "reward":  # noqa: PLR1714 - mypy narrows by these
        return PAIR_LOSS
    return job_loss(spec, load_loss(spec.algorithm.loss) if spec.algorithm.loss else None)


def _reward_model(spec: JobSpec, model: Path, data: Data) -> RewardModel | None:
    """Return what the final model's folder says of a reward model."""
    if spec.kind != "reward":
        return None
    return RewardModel(classifier_of(model), data.pad_id)


def _machines(
    config: Settings, waits: Waits, machines: TrainerMachines | None, spec: TrainerSpec
) -> JobMachines | None:
    if spec.nodes == 1:
        return None
    if config.shared_device:
        raise ConfigError(
            f"trainer.nodes is {spec.nodes}, but this trainer shares its device {config.shared_device} with trainers "
            "of its machine (RLBOOST_TRAINER_SHARED_DEVICE), and no other machine takes part: set trainer.nodes to 1"
        )
    if machines is None:
        raise ConfigError(
            f"trainer.nodes is {spec.nodes}, but no machine can join this trainer: set RLBOOST_TRAINER_MACHINES_PORT"
        )
    return JobMachines(machines, spec, waits, device=config.device, shrink_after_s=config.machines_wait_s)


def _teacher(spec: JobSpec, model: Path, data: Data) -> str:
    """Return the directory of a teacher that the trainer holds, empty if it has none."""
    if not spec.teacher_model:
        return ""
    teacher = find_model(spec.teacher_model, TEACHER)
    require_teachable(model, teacher)
    check_teacher(spec, data, teacher)
    return str(teacher) if spec.held_teacher else ""


def _engine(
    config: Settings, spec: TrainerSpec, folder: Path, machines: JobMachines | None, settings: PolicySettings
) -> RanksPolicy:
    if spec.offload != "none" and config.device == "cpu":
        raise ConfigError(
            f"trainer.offload: {spec.offload} needs a GPU that the trainer shares, but the "
            "trainer's device is cpu (RLBOOST_TRAINER_DEVICE): leave it out"
        )
    if spec.deterministic and config.device != "cpu":
        raise ConfigError(
            f"trainer.deterministic is for a trainer on CPUs, and this one's device is {config.device} "
            "(RLBOOST_TRAINER_DEVICE): the order of sums on a GPU is not fixed: leave it out"
        )
    if spec.in_one_process:
        require_device(config.device, "RLBOOST_TRAINER_DEVICE")
    kind = MegatronPolicy if spec.backend == "megatron" else TorchPolicy
    return kind(settings, Layout.of(spec), device=config.device, folder=folder, launcher=machines)
