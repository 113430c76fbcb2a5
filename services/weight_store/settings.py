"""Settings of the weight store."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rlboost.shared.settings import ServiceSettings


class Settings(ServiceSettings):
    """Environment prefix `RLBOOST_WEIGHT_STORE_`."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_WEIGHT_STORE_")
    prefix: ClassVar[str] = "RLBOOST_WEIGHT_STORE_"

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8701, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    dir: Path = Field(Path(".rlboost/weights"), description="directory of the chunks and manifests")
    origin: str = Field(
        "", description="object store instead of the directory: s3://BUCKET/PREFIX, gs://... or az://..."
    )
    redirect: Literal["auto", "off"] = Field(
        "auto", description="auto: redirect readers to the object store if it can sign URLs; off: proxy all chunks"
    )
    lease_s: float = Field(
        15.0,
        ge=0.5,
        description="lease on an object store: a writer that does not renew it for this time may be succeeded",
    )
    max_bytes: int = Field(
        0, ge=0, description="total size of the chunks above which uploads are rejected with 507; 0: no limit"
    )
    keep_versions: int = Field(
        4, ge=1, description="number of newest versions retained of each job; with deltas also the first"
    )
    keep_deltas: int = Field(16, ge=1, description="number of newest versions of each job whose deltas are retained")
