"""Builds what one job works with. Imports torch and transformers: import it late, and on the device's thread."""

from __future__ import annotations

from services.trainer.adapters.checkpoint import CheckpointFolder
from services.trainer.adapters.data import find_model, load_data
from services.trainer.adapters.reward_pool import RewardPool
from services.trainer.adapters.run_folder import JobFolder
from services.trainer.adapters.torch_policy import TorchPolicy
from services.trainer.adapters.weights import StorePublisher
from services.trainer.domain.loss import clipped_loss, decoupled_loss
from services.trainer.ports import LossFn, Workshop
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
    client = StoreClient(config.weight_store_url, config.token.get_secret_value())
    config_json = (model / "config.json").read_text(encoding="utf-8")
    return Workshop(
        engine=TorchPolicy(
            spec.optimizer, temperature=spec.sampling.temperature, dtype=spec.trainer.dtype, device=config.device
        ),
        model=model,
        loss=_loss(spec),
        data=data,
        rewards=RewardPool(spec.reward, waits),
        checkpoints=CheckpointFolder(folder / "checkpoints"),
        weights=StorePublisher(
            client,
            job_id,
            config_json,
            folder / "pulled",
            waits,
            config.outage_limit_s,
            deltas=spec.elastic.weights == "delta",
        ),
        folder=JobFolder(folder, model),
    )


def _loss(spec: JobSpec) -> LossFn:
    algorithm = spec.algorithm
    if spec.elastic.max_staleness == 0:
        return clipped_loss(algorithm.clip_low, algorithm.clip_high)
    cap = None if algorithm.tis_cap == "off" else algorithm.tis_cap
    return decoupled_loss(algorithm.clip_low, algorithm.clip_high, cap)
