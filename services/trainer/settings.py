"""Settings of the trainer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from rlboost.shared.http.server_url import origin_of
from rlboost.shared.messages.codec import HourlyPrice
from rlboost.shared.settings import ServiceSettings


class Settings(ServiceSettings):
    """Environment prefix `RLBOOST_TRAINER_`."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_TRAINER_")
    prefix: ClassVar[str] = "RLBOOST_TRAINER_"

    name: str = Field(
        "",
        description="name that reserved workers on this trainer's device set as `RLBOOST_WORKER_TRAINER`; if empty, "
        "the host name",
    )
    host: str = Field("127.0.0.1", description="address of the health routes")
    port: int = Field(0, ge=0, le=65535, description="port of the health routes; 0 takes a free one")
    weight_store_url: str = Field(
        "http://127.0.0.1:8701", description="URL of the weight store, where weights are published"
    )
    dir: Path = Field(
        Path(".rlboost/runs"), description="folder with one folder per job: checkpoints, metrics, the final model"
    )
    checkpoints: str = Field(
        "",
        description="folder of checkpoints, or s3://BUCKET/PREFIX, gs://..., az://...; if empty, `RLBOOST_TRAINER_DIR`",
    )
    device: str = Field(
        "cpu", description="torch device of the trained model; with cuda, rank r uses the r-th visible GPU"
    )
    shared_device: str = Field(
        "",
        description="name of a device that several trainers of one machine use in turns, the same for each of them; "
        "if empty, this trainer has its device alone",
    )
    device_call_limit_s: float = Field(
        900.0,
        gt=0,
        description="exit if one computation takes longer than this while a job of another trainer waits for the "
        "shared device",
    )
    price_per_hour: HourlyPrice = Field(
        0.0,
        description="dollars per hour of the trainer's machines, beyond what the prices of its reserved workers cover",
    )
    cpus: str = Field("", description="CPUs to use, such as 0-15,32-47; if empty, all")
    folders: str = Field(
        "",
        description="folders, separated by `:`, in which job files may name models, data and checkpoints, in addition "
        "to the folder in which the trainer runs and `RLBOOST_TRAINER_DIR`; `/` allows all that the trainer can read",
    )
    user_modules: str = Field(
        "", description="installed packages, separated by commas, whose functions job files may name as user code"
    )
    unisolated_programs: bool = Field(
        False,
        description="whether job files may have generated programs run without isolation "
        "(`reward.arguments: {isolated: false}`), for machines that have nothing to protect",
    )
    reward_token_origins: str = Field(
        "",
        description="services that get `REWARD_TOKEN` from jobs with `reward.url`, separated by commas: "
        "https://HOST[:PORT]; if empty, none",
    )
    machines_port: int = Field(
        0, ge=0, le=65535, description="port where machines join with `rlboost trainer join`; 0: none can join"
    )
    machines_wait_s: float = Field(
        60.0, ge=0, description="how long a job waits for all `trainer.nodes` before it starts on `trainer.min_nodes`"
    )
    outage_limit_s: float = Field(
        600.0, gt=0, description="exit after Redis or the weight store has been unavailable for this time"
    )
    samples_limit_s: float = Field(3600.0, gt=0, description="a job fails after this time without a sample")

    @field_validator("reward_token_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        return ",".join(origin_of(each) for each in value.replace(" ", "").split(",") if each)

    @property
    def job_folders(self) -> list[str]:
        """Return the operator's folders that job files may name."""
        checkpoints = [] if "://" in self.checkpoints else [self.checkpoints]
        return [one for one in (*self.folders.split(":"), *checkpoints) if one]

    @property
    def trainer_name(self) -> str:
        """Return the name, or the host's."""
        return self.name or socket.gethostname()
