"""Settings of the weight store."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.settings import ServiceSettings


class Settings(ServiceSettings):
    """Environment prefix `RLBOOST_WEIGHT_STORE_`."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_WEIGHT_STORE_")
    prefix: ClassVar[str] = "RLBOOST_WEIGHT_STORE_"

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8701, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    dir: Path = Field(Path(".rlboost/weights"), description="directory of the chunks and manifests")
    origin: str = Field("", description="s3://BUCKET/PREFIX, gs:// or az:// in place of the directory")
    redirect: Literal["auto", "off"] = Field(
        "auto", description="off: chunks pass through the store though the object store could serve them"
    )
    lease_s: float = Field(15.0, ge=0.5, description="an object store's writer silent for so long may be succeeded")
    keep_versions: int = Field(4, ge=1, description="newest versions kept of each job, besides pinned ones")
    keep_deltas: int = Field(16, ge=1, description="newest versions of each job whose deltas are kept")
