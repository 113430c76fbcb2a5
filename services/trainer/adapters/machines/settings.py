"""Settings of a machine that runs ranks of a trainer on another one."""

from __future__ import annotations

import socket
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rlboost.shared.settings import ServiceSettings


class MachineSettings(ServiceSettings):
    """Environment prefix `RLBOOST_MACHINE_`."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_MACHINE_")
    prefix: ClassVar[str] = "RLBOOST_MACHINE_"

    url: str = Field(
        "tcp://127.0.0.1:8702", description="the trainer: tcp://HOST:PORT, or tls:// if it has a certificate"
    )
    name: str = Field("", description="name that orders the ranks and appears in messages; if empty, the host name")
    address: str = Field(
        "",
        description="address at which the trainer's other machines reach this one; if empty, the one that the "
        "trainer sees",
    )
    outage_limit_s: float = Field(600.0, gt=0, description="exit after the trainer has been unreachable for this time")

    @property
    def machine_name(self) -> str:
        """Return the name, or the host's."""
        return self.name or socket.gethostname()
