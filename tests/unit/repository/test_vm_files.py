"""The systemd units of deploy/systemd, and the cloud-init files that configure machines with them."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlboost.local.node import grace_s
from rlboost.local.spec_file import MachineSpec, NodeSpec, SystemSpec, load
from rlboost.services.rollout_worker.settings import Settings
from tests.support.programs import output_of, require_program

ROOT = Path(__file__).parents[3]
UNITS = {path.stem: path for path in (ROOT / "deploy/systemd").glob("*.service")}
CLOUD_CONFIGS = {path.stem: path for path in (ROOT / "deploy/cloud-init").glob("*.yaml")}
INSTALL = ROOT / "deploy/systemd/install.sh"


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS[name])
    return parser


def cloud_config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CLOUD_CONFIGS[name].read_text(encoding="utf-8"))
    return loaded


def files_of(name: str) -> dict[str, str]:
    return {file["path"]: file["content"] for file in cloud_config(name)["write_files"]}


def drop_ins(unit_name: str) -> dict[str, str]:
    """Return the files that cloud-init adds to a unit."""
    folder = f"/etc/systemd/system/{unit_name}.service.d/"
    return {path: text for name in CLOUD_CONFIGS for path, text in files_of(name).items() if path.startswith(folder)}


def test_spot_machine_powers_off_after_its_workers_have_left() -> None:
    (text,) = drop_ins("rlboost-worker").values()
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    assert {section: dict(parser[section]) for section in parser.sections()} == {"Unit": {"SuccessAction": "poweroff"}}


@pytest.mark.parametrize("name", UNITS)
def test_unit_has_only_keys_that_systemd_knows(name: str, tmp_path: Path) -> None:
    verify = require_program("systemd-analyze")
    text = UNITS[name].read_text(encoding="utf-8")
    (tmp_path / UNITS[name].name).write_text(text.replace("/opt/rlboost/bin/rlboost", sys.executable))
    for path, content in drop_ins(name).items():
        (tmp_path / f"{UNITS[name].name}.d").mkdir()
        (tmp_path / f"{UNITS[name].name}.d" / Path(path).name).write_text(content)
    assert output_of(verify, "verify", str(tmp_path / UNITS[name].name)) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_unit_reads_options_from_files_that_cloud_init_writes(name: str) -> None:
    service = unit(name)["Service"]
    (config,) = [config for config in CLOUD_CONFIGS if any(f"{name}\n" in f"{line}\n" for line in runs(config))]
    command = service["ExecStart"].split()
    assert command[0] == "/opt/rlboost/bin/rlboost"
    assert command[-1] in files_of(config)
    environment = service["EnvironmentFile"]
    assert environment.startswith("-") or environment in files_of(config)


def runs(config: str) -> list[str]:
    return [line for line in cloud_config(config)["runcmd"] if line.startswith("systemctl enable")]


def test_unit_gives_workers_time_to_hand_off() -> None:
    assert int(unit("rlboost-worker")["Service"]["TimeoutStopSec"]) >= grace_s({}) + 5
    assert unit("rlboost-worker")["Service"]["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize("name", CLOUD_CONFIGS)
def test_cloud_config_is_valid(name: str) -> None:
    code, text = output_of(require_program("cloud-init"), "schema", "--config-file", str(CLOUD_CONFIGS[name]))
    assert code == 0, text


@pytest.mark.parametrize("name", CLOUD_CONFIGS)
def test_cloud_config_runs_valid_commands_with_extras_that_exist(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    commands: list[str] = cloud_config(name)["runcmd"]
    for command in commands:
        subprocess.run(["sh", "-n"], input=command, text=True, check=True)
    (installs,) = [command for command in commands if INSTALL.name in command]
    named = installs.rpartition(f"{INSTALL.name} ")[2].partition(";")[0].split(",")
    assert set(named) <= set(extras)


@pytest.mark.parametrize(
    ("name", "path", "spec"),
    [
        ("spot-worker", "/etc/rlboost/worker.yaml", NodeSpec),
        ("reserved", "/etc/rlboost/system.yaml", SystemSpec),
    ],
)
def test_options_of_a_cloud_config_are_valid(name: str, path: str, spec: type[MachineSpec], tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(files_of(name)[path] + ("host: 10.0.0.5\n" if name == "reserved" else ""))
    assert load(spec, tmp_path / "options.yaml", {}).gpus == "all"


def test_secrets_of_a_spot_machine_are_readable_by_root_only() -> None:
    (environment,) = [file for file in cloud_config("spot-worker")["write_files"] if file["path"].endswith(".env")]
    assert environment["permissions"] == "0600"
    settings = dict(line.split("=", 1) for line in environment["content"].splitlines() if line[0] != "#")
    own = {name.removeprefix(Settings.prefix).lower() for name in settings if name.startswith(Settings.prefix)}
    assert own <= set(Settings.model_fields)
    assert settings.keys() - {f"{Settings.prefix}{name.upper()}" for name in own} == {"RLBOOST_URL", "RLBOOST_TOKEN"}


def test_installer_is_a_valid_script() -> None:
    subprocess.run(["sh", "-n", INSTALL], check=True)
    assert INSTALL.stat().st_mode & 0o111
