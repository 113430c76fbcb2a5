"""Prices of machines by kind of worker, from a YAML file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, ValidationError

from rlboost.shared.errors import ConfigError

SHIPPED = Path(str(files("rlboost.simulation") / "prices.yaml"))
"""A dated list, as an example."""


class Prices(BaseModel):
    """Dollars per hour."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    as_of: str = ""
    source: str = ""
    reserved: NonNegativeFloat | None = None
    """The whole reserved cluster."""
    workers: dict[str, NonNegativeFloat] = {}
    """Kind of worker -> one worker."""


def read_prices(path: Path) -> Prices:
    """Read a price list.

    Raises:
        ConfigError: it cannot be read, or is not a price list; names the line or the key.

    """
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Prices.model_validate(raw)
    except OSError as error:
        raise ConfigError(f"prices {path}: {error.strerror}: name a file that exists") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"prices {path}, line {line}: {error.problem}: write YAML, like {SHIPPED}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"prices {path}: {place}: {first['msg']}: write it like {SHIPPED}") from error
