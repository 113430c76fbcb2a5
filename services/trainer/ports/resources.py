"""Everything that one job works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlboost.services.trainer.domain.canary_prompts import CanaryPrompts
from rlboost.services.trainer.domain.curriculum import SkipFunction
from rlboost.services.trainer.domain.loss.inputs import LossFn
from rlboost.services.trainer.domain.utilization import UNKNOWN_HARDWARE, TrainingHardware
from rlboost.services.trainer.ports.data import Data
from rlboost.services.trainer.ports.engine import Critic, PolicyEngine
from rlboost.services.trainer.ports.environments import Environments
from rlboost.services.trainer.ports.rewards import RewardFunction
from rlboost.services.trainer.ports.storage import CheckpointStore, RunFolder, TrainState, WeightPublisher
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.wire.routed_experts import RoutedShape


class Machines(Protocol):
    """The machines that a job's engine runs on, if they are not the trainer's own."""

    async def gather(self) -> None:
        """Wait until enough of them have joined. Call it before the engine loads.

        Raises:
            WaitTimedOut: too few have joined.

        """


@dataclass(frozen=True, slots=True)
class JobResources:
    """The engine, data, user code and storage of one job."""

    engine: PolicyEngine
    model: Path
    """The Hugging Face directory of the base model."""
    loss: LossFn
    data: Data
    rewards: RewardFunction
    checkpoints: CheckpointStore
    weights: WeightPublisher
    folder: RunFolder
    critic: Critic | None = None
    """The engine, if it has a critic."""
    environments: Environments | None = None
    """Set if samples are conversations."""
    predecessor: Callable[[], tuple[TrainState, Path]] | None = None
    """Finds the checkpoint of another job that this one starts from (`trainer.resume` names it). Raises `ConfigError`
    if there is none."""
    hardware: TrainingHardware = UNKNOWN_HARDWARE
    machines: Machines | None = None
    """Set if `trainer.nodes` is more than 1."""
    skip_function: SkipFunction | None = None
    """`data.curriculum.function`, if there is one."""
    canary_prompts: CanaryPrompts | None = None
    """The input of the parity check that each version is published with; None: workers skip the check."""
    replayed: RoutedShape | None = None
    """Shape of the routed experts that training replays; None: routers decide again (`trainer.router_replay`)."""


class JobResourcesFactory(Protocol):
    """Builds the resources of a job."""

    def __call__(self, spec: JobSpec, job_id: str) -> JobResources:
        """Build them. Blocks; downloads the model if it is the id of one on the Hugging Face Hub.

        Raises:
            ConfigError: a file that the job names is missing or invalid.

        """
