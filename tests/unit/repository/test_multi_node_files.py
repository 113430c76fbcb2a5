"""The files that start machines of a trainer and workers: deploy/multi-node and deploy/slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlboost.local.spec_file import SystemSpec, load
from rlboost.services.trainer.adapters.machines.agent import MachineSettings
from rlboost.services.trainer.settings import Settings

FOLDER = Path(__file__).parents[3] / "deploy" / "multi-node"


def known(settings: type[MachineSettings | Settings]) -> set[str]:
    return {f"{settings.prefix}{name.upper()}" for name in settings.model_fields} | {"RLBOOST_TOKEN"}


def test_system_file_sets_known_settings() -> None:
    spec = load(SystemSpec, FOLDER / "system.yaml", {})
    assert set(spec.env) <= known(Settings)
    assert (spec.reserved, spec.workers) == (0, 0)


def test_kubernetes_machines_set_known_settings_and_are_replaced() -> None:
    *services, machines = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert machines["spec"]["serviceName"] in [service["metadata"]["name"] for service in services]
    spec = machines["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert {variable["name"] for variable in container["env"]} <= known(MachineSettings)
    assert container["command"] == ["rlboost", "trainer", "join"]
    # A Job would count a machine that is evicted, and so ends in order, as complete.
    assert machines["kind"] == "StatefulSet"
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


@pytest.mark.parametrize("script", ["slurm.sh", "../slurm/worker.sh", "setup", "run"])
def test_script_of_a_launch_file_is_valid_bash(script: str) -> None:
    task: Any = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))
    text = task[script] if script in task else (FOLDER / script).read_text(encoding="utf-8")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
