"""The tables of `docs/settings.md`, generated from the services' settings classes.

python -m tests.support.settings_reference --write
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args, get_origin

from rlboost.services.trainer.adapters.machines.agent import MachineSettings
from rlboost.shared.settings import ServiceSettings
from tests.support.generated_docs import ROOT, run

PAGE = ROOT / "docs" / "settings.md"
BLOCK = "settings"
_TITLES = {
    "rollout_manager": "Rollout manager",
    "weight_store": "Weight store",
    "trainer": "Trainer",
    "rollout_worker": "Rollout worker",
}


def tables() -> str:
    """Return one section with a table for the common settings and for each service."""
    parts = [_section("All services", ServiceSettings, set(ServiceSettings.model_fields))]
    for service, title in _TITLES.items():
        settings: type[ServiceSettings] = importlib.import_module(f"rlboost.services.{service}.settings").Settings
        own = {name for name in settings.model_fields if name not in ServiceSettings.model_fields}
        parts.append(_section(f"{title}: `python -m rlboost.services.{service}`", settings, own))
    own = set(MachineSettings.model_fields) - set(ServiceSettings.model_fields)
    parts.append(_section("Trainer machine: `rlboost trainer join`", MachineSettings, own))
    return "\n\n".join(parts)


def _section(title: str, settings: type[ServiceSettings], names: set[str]) -> str:
    lines = [f"## {title}", "", "| variable | default | |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        if name in names:
            text = "; ".join(part for part in (field.description, _choices(field.annotation)) if part)
            default = _default(field.get_default(call_default_factory=True))
            lines.append(f"| `{settings.prefix}{name.upper()}` | {default} | {text} |")
    return "\n".join(lines)


def _default(value: Any) -> str:
    shown = value.get_secret_value() if hasattr(value, "get_secret_value") else value
    return "unset" if shown is None else f"`{shown}`" if shown != "" else "empty"


def _choices(annotation: Any) -> str:
    values = get_args(annotation) if get_origin(annotation) is Literal else ()
    return " or ".join([", ".join(f"`{value}`" for value in values[:-1]), f"`{values[-1]}`"]) if values else ""


if __name__ == "__main__":
    run(PAGE, BLOCK, tables)
