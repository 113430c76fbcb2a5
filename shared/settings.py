"""Settings of a service, read once from flags (`--redis-url`) and the environment; unknown names are rejected.

Each service has a prefix (`RLBOOST_MANAGER_`). Settings that all services share also have a short name without it
(`RLBOOST_TOKEN`).
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import AliasChoices, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rlboost.shared.errors import ConfigError
from rlboost.shared.secrets import clean_secret, clean_url
from rlboost.shared.tls import ServerCertificate, server_certificate
from rlboost.shared.validation import describe
from rlboost.shared.variables import COMMON, PREFIX, RENAMED

_SIMILAR = 0.7
"""Least similarity of a name to a setting's that makes it a suggestion, as `difflib` measures it."""
_environment: ContextVar[Mapping[str, str] | None] = ContextVar("environment", default=None)
"""What is read instead of this process's environment."""


def environment_without_settings(*kept: str) -> dict[str, str]:
    """Return this process's environment for a child, without our settings (some are secrets) but those kept."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in kept}


class ServiceSettings(BaseSettings):
    """The settings that all services have."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    prefix: ClassVar[str] = PREFIX

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="URL of Redis")
    token: SecretStr = Field(
        SecretStr(""), description="bearer token of the HTTP interfaces; if empty, all requests are rejected"
    )
    tls_cert: str = Field("", description="PEM file of the certificate for HTTPS; if empty, plain HTTP")
    tls_key: str = Field("", description="PEM file of the certificate's key")
    tls_ca: str = Field("", description="PEM file of authorities that clients trust in addition to the system's")
    proxy: str = Field(
        "",
        description="URL of a proxy for connections between RLBoost's own processes; if empty, they are direct. "
        "`HTTPS_PROXY` and the like count only for other servers",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"

    @model_validator(mode="before")
    @classmethod
    def _strip(cls, given: Any) -> Any:
        """Remove white space around texts: files and other tools' secrets end with a newline."""
        if not isinstance(given, dict):
            return given
        return {name: value.strip() if isinstance(value, str) else value for name, value in given.items()}

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        """Refuse what could not be sent in a header or to Redis."""
        for name in type(self).model_fields:
            value, variable = getattr(self, name), f"{self.prefix}{name}".upper()
            if isinstance(value, SecretStr):
                clean_secret(variable, value.get_secret_value())
            elif isinstance(value, str) and name.endswith("url"):
                clean_url(variable, value)
        return self

    @property
    def secrets(self) -> list[str]:
        """Return the values that must not appear in logs."""
        values = [getattr(self, name) for name in type(self).model_fields]
        return [value.get_secret_value() for value in values if isinstance(value, SecretStr)]

    @property
    def certificate(self) -> ServerCertificate | None:
        """Return the certificate to serve, None for plain HTTP; raises `ConfigError`."""
        return server_certificate(self.tls_cert, self.tls_key)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read only variables with the project's prefix, so that an alias does not match a bare `TOKEN`."""
        del env_settings, dotenv_settings, file_secret_settings
        return init_settings, _ProjectEnvironment(settings_cls)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Add the short environment names of the common fields."""
        super().__pydantic_init_subclass__(**kwargs)
        for name in COMMON:
            upper = name.upper()
            cls.model_fields[name].validation_alias = AliasChoices(name, f"{cls.prefix}{upper}", f"RLBOOST_{upper}")
        cls.model_rebuild(force=True)


class _ProjectEnvironment(EnvSettingsSource):
    def _load_env_vars(self) -> Mapping[str, str | None]:
        given = _environment.get()
        everything = super()._load_env_vars() if given is None else {name.lower(): given[name] for name in given}
        return {name: value for name, value in everything.items() if name.startswith(PREFIX.lower())}


S = TypeVar("S", bound=ServiceSettings)


def read(cls: type[S], args: list[str] | None = None) -> S:
    """Return a service's settings from command-line flags, then from the environment.

    Args:
        cls: the service's settings class, whose `prefix` is the environment's.
        args: the flags; those of the process when None.

    Raises:
        ConfigError: a value is invalid, or a variable with the service's prefix names no setting.

    """
    given = _environment.get()
    _require_known_names(cls, os.environ if given is None else given)
    try:
        source: CliSettingsSource[S] = CliSettingsSource(
            cls,
            cli_parse_args=sys.argv[1:] if args is None else args,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_prog_name=f"python -m {cls.__module__.removesuffix('.settings')}",
        )
        return cls(_cli_settings_source=source)
    except ValidationError as error:
        lines = describe(error) if given is None else [_with_variable(cls, line, given) for line in describe(error)]
        raise ConfigError("settings: " + "; ".join(lines)) from error
    except SettingsError as error:
        found = re.search(r'field "(\w+)"', str(error))
        what = f"{cls.prefix}{found[1]}".upper() if found else str(error)
        raise ConfigError(f"settings: {what} should be JSON: correct its quotes and brackets") from error


def check(cls: type[ServiceSettings], environment: Mapping[str, str]) -> None:
    """Check the settings with which a service would start in this environment.

    Raises:
        ConfigError: see `read`.

    """
    token = _environment.set(environment)
    try:
        read(cls, [])
    finally:
        _environment.reset(token)


def _require_known_names(cls: type[ServiceSettings], environment: Mapping[str, str]) -> None:
    names = [name.upper() for name in cls.model_fields]
    for variable in sorted(environment):
        name = variable.removeprefix(cls.prefix)
        if cls.prefix == PREFIX or name == variable or name in names:
            continue
        # Without the prefix, with which every name is similar.
        similar = difflib.get_close_matches(name, names, 1, _SIMILAR)
        known = RENAMED.get(variable) or (f"{cls.prefix}{similar[0]}" if similar else "")
        raise ConfigError(
            f"environment variable {variable} names no setting; "
            + (f"did you mean {known}?" if known else "remove it or fix its spelling")
        )


def _with_variable(cls: type[ServiceSettings], line: str, environment: Mapping[str, str]) -> str:
    """Return an error about a field with the variable that gave its value."""
    field, _, text = line.partition(": ")
    variables = (f"{cls.prefix}{field}".upper(), f"{PREFIX}{field}".upper())
    return next((f"{variable}: {text}" for variable in variables if variable in environment), line)
