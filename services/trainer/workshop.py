"""Builds what one job works with. Imports torch and transformers: import it late, and on the device's thread."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from services.trainer.adapters.checkpoint import CheckpointFolder
from services.trainer.adapters.data import find_model, load_data
from services.trainer.adapters.megatron.policy import MegatronPolicy
from services.trainer.adapters.megatron.weights import RanksPublisher
from services.trainer.adapters.own_loss import own_loss
from services.trainer.adapters.reward_pool import RewardPool
from services.trainer.adapters.run_folder import JobFolder
from services.trainer.adapters.torch_policy import TorchPolicy
from services.trainer.adapters.weights import StorePublisher
from services.trainer.domain.loss import job_loss
from services.trainer.ports import Workshop
from services.trainer.settings import Settings
from shared.jobspec import JobSpec
from shared.waiting import Waits
from shared.weights.client import StoreClient


def build(config: Settings, waits: Waits, spec: JobSpec, job_id: str) -> Workshop:
    """Return a job's workshop. Blocks.

    Raises:
        ConfigError: a file that the job names is missing or wrong.

    """
    folder = config.dir / job_id
    model = find_model(spec.model)
    data = load_data(spec, model)
    token = config.token.get_secret_value()
    client = StoreClient(config.weight_store_url, token)
    config_json = (model / "config.json").read_text(encoding="utf-8")
    engine = _engine(config, spec, folder)
    publisher = partial(RanksPublisher, engine, token) if isinstance(engine, MegatronPolicy) else StorePublisher
    return Workshop(
        engine=engine,
        model=model,
        loss=job_loss(spec, own_loss(spec.algorithm.loss) if spec.algorithm.loss else None),
        data=data,
        rewards=RewardPool(spec.reward, waits),
        checkpoints=CheckpointFolder(folder / "checkpoints"),
        weights=publisher(
            client,
            job_id,
            config_json,
            folder / "pulled",
            waits,
            config.outage_limit_s,
            deltas=spec.elastic.weights == "delta",
            small=spec.elastic.link == "slow",
        ),
        folder=JobFolder(folder, model),
    )


def _engine(config: Settings, spec: JobSpec, folder: Path) -> TorchPolicy | MegatronPolicy:
    temperature, reference = spec.sampling.temperature, spec.algorithm.kl_coef > 0
    if spec.trainer.backend == "megatron":
        return MegatronPolicy(
            spec.trainer,
            spec.optimizer,
            temperature=temperature,
            device=config.device,
            reference=reference,
            folder=folder,
        )
    return TorchPolicy(
        spec.optimizer,
        temperature=temperature,
        dtype=spec.trainer.dtype,
        device=config.device,
        lora=spec.adapter,
        seed=spec.trainer.seed,
        reference=reference,
    )
