"""The interface of verl that `rlboost.verl` implements, as recorded from the real package, and stubs that have it.

    .venv-verl/bin/python -m tests.support.verl_interface --write

verl needs an older transformers than the project, so the tests of every change have no verl.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "golden/verl.json"
CLASSES = {
    "verl.checkpoint_engine.base": ("CheckpointEngine",),
    "verl.workers.rollout.base": ("BaseRollout",),
    "verl.workers.rollout.replica": ("RolloutReplica",),
}
METHODS = ("__init__", "init_standalone", "launch_servers", "resume", "release", "update_weights")


def recorded() -> dict[str, Any]:
    """Return version, and class -> method -> names of its parameters, of what must or may be overridden."""
    found: dict[str, Any] = {"version": metadata.version("verl")}
    for module, names in CLASSES.items():
        for name in names:
            kind = getattr(importlib.import_module(module), name)
            methods = sorted({*kind.__abstractmethods__, *(one for one in METHODS if one in vars(kind))})
            found[name] = {one: list(inspect.signature(getattr(kind, one)).parameters) for one in methods}
    output = importlib.import_module("verl.workers.rollout.replica").TokenOutput
    return {**found, "TokenOutput": sorted(output.model_fields)}


class Registry:
    """verl's registries of replicas and of checkpoint engines."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def register(self, name: str, loader: Any = None) -> Any:
        if loader is not None:
            self.found[name] = loader
            return None
        return lambda kind: self.found.setdefault(name, kind)


def _of_golden(golden: dict[str, Any], name: str) -> type:
    return type(name, (), {"methods": golden[name]})


def with_stubs() -> ModuleType:
    """Return `rlboost.verl` as it is with stubs of verl and Ray, which other modules do not see."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))

    def token_output(**given: Any) -> SimpleNamespace:
        assert set(given) <= set(golden["TokenOutput"])
        return SimpleNamespace(**given)

    modules: dict[str, dict[str, Any]] = {
        "ray": {},
        "verl": {},
        "verl.checkpoint_engine": {},
        "verl.checkpoint_engine.base": {
            "CheckpointEngine": _of_golden(golden, "CheckpointEngine"),
            "CheckpointEngineRegistry": Registry(),
        },
        "verl.utils": {},
        "verl.utils.config": {"omega_conf_to_dataclass": lambda given, **_: given},
        "verl.workers": {},
        "verl.workers.config": {"HFModelConfig": SimpleNamespace},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": {"BaseRollout": _of_golden(golden, "BaseRollout"), "_ROLLOUT_REGISTRY": {}},
        "verl.workers.rollout.replica": {
            "RolloutMode": SimpleNamespace(STANDALONE="standalone"),
            "RolloutReplica": _of_golden(golden, "RolloutReplica"),
            "RolloutReplicaRegistry": Registry(),
            "TokenOutput": token_output,
        },
        "verl.workers.rollout.utils": {"get_max_position_embeddings": lambda config: config.max_position_embeddings},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "rlboost.verl", raising=False)
        made = importlib.import_module("rlboost.verl")
        patch.delitem(sys.modules, "rlboost.verl")
    return made


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    GOLDEN.write_text(json.dumps(recorded(), indent=1) + "\n", encoding="utf-8")
