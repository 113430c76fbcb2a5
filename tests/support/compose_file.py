"""The compose file, and the settings that it gives each service."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlboost.shared.settings import ServiceSettings, read

ROOT = Path(__file__).parents[2]


SECRETS = {"RLBOOST_TOKEN": "t0ken", "RLBOOST_JOIN_TOKEN": "j0in", "REDIS_PASSWORD": "passw0rd"}


_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?+])([^}]*))?\}")


_DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")


class Unset(Exception):
    """A variable that compose refuses to do without."""


def compose(variables: dict[str, str], file: str = "docker-compose.yml") -> dict[str, Any]:
    """Return a file as compose reads it, with `${NAME}`, `:-default`, `:+if set` and `:?error` filled in."""

    def fill(found: re.Match[str]) -> str:
        name, kind, text = found.groups()
        if kind == "?" and not variables.get(name):
            raise Unset(f"{name}: {text}")
        assert kind or name in variables, f"{name} has no default"
        value = variables.get(name, "")
        return (text if value else "") if kind == "+" else value or text

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return _VARIABLE.sub(fill, node) if isinstance(node, str) else node

    loaded: dict[str, Any] = walk(yaml.safe_load((ROOT / file).read_text(encoding="utf-8")))
    return loaded


FILE = compose(SECRETS)


OURS = [name for name, service in FILE["services"].items() if "build" in service]


def stage_of(service: str) -> str:
    """Return the lines of the Dockerfile's stage that a service is built from."""
    build = FILE["services"][service]["build"]
    assert ROOT / build["context"] / build["dockerfile"] == ROOT / "deploy/docker/Dockerfile"
    return stage_named(build["target"])


def stage_named(target: str) -> str:
    """Return the lines of a stage of the Dockerfile."""
    (_, stage) = re.split(rf"^FROM \S+ AS {target}$", _DOCKERFILE, flags=re.MULTILINE)
    return re.split(r"^FROM ", stage, flags=re.MULTILINE)[0]


def module_of(service: str) -> str:
    """Return the module that a service's image runs."""
    assert "command" not in FILE["services"][service]
    assert "entrypoint" not in FILE["services"][service]
    return module_in(stage_of(service))


def module_in(stage: str) -> str:
    """Return the module that a stage of the Dockerfile runs."""
    (entry_point,) = re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)
    python, flag, module = json.loads(entry_point)  # the exec form: SIGTERM reaches the process itself
    assert (python, flag) == ("python", "-m")
    return str(module)


def settings_of(service: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """Return what the service's settings class makes of the environment that compose gives it."""
    cls: type[ServiceSettings] = importlib.import_module(f"{module_of(service)}.settings").Settings
    for name in [name for name in os.environ if name.startswith("RLBOOST_")]:
        monkeypatch.delenv(name)
    for name, value in FILE["services"][service]["environment"].items():
        assert isinstance(value, str), f"{name} is not a string"
        monkeypatch.setenv(name, value)
    return read(cls, [])
