"""Prices of machines by kind of worker, from a YAML file: for `rlboost plan` and for the manager."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from rlboost.shared.errors import ConfigError
from rlboost.shared.validation import Section, describe, read_yaml

_HOW_TO_WRITE = "write it as 'rlboost prices' does, such as 'workers: {h100: 2.5}'"


_Dollars = Annotated[float, Field(ge=0)]


class Prices(Section):
    """Dollars per hour."""

    as_of: str | int | date = ""
    """Date of the prices, and where they are from; shown to readers only."""
    source: str = ""
    reserved: _Dollars | None = None
    """The whole reserved cluster."""
    workers: dict[str, _Dollars] = Field(default_factory=dict)
    """Kind of worker -> one worker."""


def read_prices(path: Path) -> Prices:
    """Read a price list.

    Raises:
        ConfigError: it cannot be read, or is not a price list; names the line or each key.

    """
    try:
        return Prices.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"prices {path}: {error.strerror}: name a file that exists") from error
    except ValidationError as error:
        problems = "; ".join(describe(error, Prices, "the file"))
        raise ConfigError(f"prices {path}: {problems}: {_HOW_TO_WRITE}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"prices {path} does not parse: {error}: write YAML in UTF-8: {_HOW_TO_WRITE}") from error
