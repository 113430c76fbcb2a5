"""A kind of spot worker that autoscaling may start: a setting."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Pool(BaseModel):
    """A kind of preemptible worker that a provider can start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """`RLBOOST_WORKER_KIND` of its workers, and the provider's name for it."""
    max_workers: int = Field(ge=0)
    price_per_hour: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Dollars for one worker without a price of its own, unless the price file has its kind."""
