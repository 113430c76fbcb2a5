"""Secrets as the environment, files and options give them: checked once, and never shown.

Secrets that other tools write often end with a newline, as those of Kubernetes do, or have one inside. An HTTP library
then refuses the whole header, in an error that quotes it. So every secret passes `clean_secret` before it is used, and
only `bearer` puts one into a header.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from rlboost.shared.errors import ConfigError
from rlboost.shared.variables import PREFIX

_SECRET = re.compile(r"[!-~]*")
_URL = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]*")
REWARD_TOKEN = "REWARD_TOKEN"  # noqa: S105 - a name
"""Environment variable of the trainer with the bearer token of reward services."""
OTHER_SECRETS = (
    REWARD_TOKEN,
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_TOKEN",
    "AZURE_CLIENT_SECRET",
)
"""Environment variables of other tools that libraries put into headers."""


def clean_secret(given_by: str, secret: str) -> str:
    """Return a secret without the white space around it.

    Args:
        given_by: the variable, option or file that has it, for the error.
        secret: the secret; empty if there is none.

    Raises:
        ConfigError: a character is no printable ASCII, or is a space.

    """
    secret = secret.strip()
    found = _SECRET.match(secret)
    if found is None or found.end() < len(secret):
        place = found.end() if found else 0
        raise ConfigError(
            f"{given_by} has a character that no secret may have, at position {place + 1} of {len(secret)} "
            f"({_kind(secret[place])}): set it again, without line breaks, spaces and accents"
        )
    return secret


def clean_url(given_by: str, url: str) -> str:
    """Return a URL, which may have a password, without the white space around it.

    Raises:
        ConfigError: it has white space or a control character inside; the text does not quote it.

    """
    url = url.strip()
    found = _URL.match(url)
    if found is None or found.end() < len(url):
        place = found.end() if found else 0
        raise ConfigError(
            f"{given_by} has {_kind(url[place])} at position {place + 1} of {len(url)}: set it again without white "
            "space and control characters"
        )
    return url


def bearer(given_by: str, secret: str) -> str:
    """Return the value of an `Authorization` header.

    Raises:
        ConfigError: see `clean_secret`.

    """
    return f"Bearer {clean_secret(given_by, secret)}"


def clean_environment(environment: MutableMapping[str, str] | None = None) -> None:
    """Clean all secrets of an environment in place, by default this process's, for libraries and child processes.

    Raises:
        ConfigError: see `clean_secret`.

    """
    variables = os.environ if environment is None else environment
    for name in [name for name in variables if is_secret(name)]:
        clean = clean_secret(name, variables[name])
        if clean != variables[name]:
            variables[name] = clean
    for name in [name for name in variables if name.startswith(PREFIX) and name.endswith("_URL")]:
        clean = clean_url(name, variables[name])
        if clean != variables[name]:
            variables[name] = clean


def secrets_of_environment() -> list[str]:
    """Return the values of this process's environment that must not appear in logs."""
    return [os.environ[name] for name in os.environ if is_secret(name) and os.environ[name]]


def is_secret(variable: str) -> bool:
    """Return True if an environment variable has a secret that is put into a header as it is."""
    return variable in OTHER_SECRETS or (variable.startswith(PREFIX) and variable.endswith(("TOKEN", "_RANK_KEY")))


def _kind(char: str) -> str:
    if char in "\r\n":
        return "a line break"
    if char.isspace():
        return "white space"
    return "a character that is not ASCII" if ord(char) > 0x9F else "a control character"
