"""Providers of workers: one contract for the fake, a shell command and Kubernetes."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import botocore.session
import pytest

from rlboost.services.rollout_manager.adapters.providers import Kubernetes, ShellCommand
from rlboost.services.rollout_manager.ports import FleetProvider, ProviderFailed
from rlboost.shared.errors import ConfigError
from tests.support import aws_cli
from tests.support.eventually import eventually
from tests.support.kubernetes_server import KubernetesServer
from tests.support.manager_fakes import FakeProvider
from tests.support.s3_server import S3Server


class Site(NamedTuple):
    """A provider, and how many workers of kind `spot` its machines were told to run."""

    provider: FleetProvider
    workers: Callable[[], int]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesServer:
    server = KubernetesServer(tmp_path, spot=1)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture(params=["fake", "command", "kubernetes"])
async def site(request: pytest.FixtureRequest, tmp_path: Path, server: KubernetesServer) -> AsyncIterator[Site]:
    if request.param == "fake":
        fake = FakeProvider({"spot"})
        fake.requests.append(("spot", 1))
        site = Site(fake, lambda: [workers for kind, workers in fake.requests if kind in fake.kinds][-1])
    elif request.param == "command":
        folder = tmp_path / "scaled"
        folder.mkdir()
        (folder / "spot").write_text("1")
        known = f"cd {shlex.quote(str(folder))} && test -f $RLBOOST_KIND || {{ echo $RLBOOST_KIND not found; exit 3; }}"
        command = f"{known}; echo $RLBOOST_WORKERS > $RLBOOST_KIND"
        site = Site(ShellCommand(command), lambda: int((folder / "spot").read_text()))
    else:
        site = Site(Kubernetes.of_pod("", server.account), lambda: server.replicas["spot"])
    yield site
    await site.provider.close()
    server.stop()


async def test_provider_runs_the_number_that_was_requested_last(site: Site) -> None:
    for workers in (3, 3, 0, 12):
        await site.provider.scale("spot", workers)
        assert site.workers() == workers


async def test_provider_without_such_a_kind_fails_and_names_it(site: Site) -> None:
    with pytest.raises(ProviderFailed, match=r"gone.* not found"):
        await site.provider.scale("gone", 3)
    assert site.workers() == 1


# --- shell command ------------------------------------------------------------------------------------------------


async def test_command_gets_no_secret_of_the_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_TOKEN", "a-secret")
    monkeypatch.setenv("RLBOOST_MANAGER_JOIN_TOKEN", "a-secret")
    monkeypatch.setenv("RLBOOST_REDIS_URL", "redis://:a-secret@host")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "for the provider")
    await ShellCommand(f"env > {shlex.quote(str(tmp_path / 'env'))}").scale("spot", 1)
    env = (tmp_path / "env").read_text()
    assert "a-secret" not in env
    assert "AWS_ACCESS_KEY_ID=for the provider" in env


async def test_command_that_cannot_be_started_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_shell", refuse)
    with pytest.raises(ProviderFailed, match="temporarily unavailable"):
        await ShellCommand("true").scale("spot", 1)


@pytest.mark.parametrize("end", ["wait", "exit"])
async def test_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path, end: str) -> None:
    file = shlex.quote(str(tmp_path / "pid"))
    with pytest.raises(ProviderFailed, match="did not end"):
        await ShellCommand(f"sleep 60 & echo $! > {file}; {end}", limit_s=1.0).scale("spot", 1)
    pid = int((tmp_path / "pid").read_text())
    await eventually(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# --- documented commands ------------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[3] / "docs/autoscaling.md").read_text(encoding="utf-8")
DOCUMENTED = {
    **dict(re.findall(r"^\| ([\w ]+) \| `(.*RLBOOST_WORKERS.*)` \|$", PAGE, re.MULTILINE)),
    **dict(re.findall(r"^(SkyPilot|Slurm)\b.*(?:\n.+)*:\n\n```sh\n([^`]+)```", PAGE, re.MULTILINE)),
}
REQUESTS = {
    "AWS": ["aws autoscaling set-desired-capacity --auto-scaling-group-name h100 --desired-capacity 3"],
    "Google Cloud": ["gcloud compute instance-groups managed resize h100 --size 3 --zone ZONE"],
    "Azure": ["az vmss scale --name h100 --new-capacity 3 --resource-group GROUP --no-wait"],
    "SkyPilot": ["sky jobs pool apply --async --yes --pool h100 --workers 3"],
    "Slurm": ["squeue -h -n h100 -o %A", *["sbatch -J h100 deploy/slurm/worker.sh"] * 2],
}


@pytest.mark.parametrize("service", REQUESTS)
async def test_documented_command_requests_the_number_of_its_kind(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "requests"
    for program in ("aws", "gcloud", "az", "sky", "squeue", "sbatch"):
        file = tmp_path / program
        file.write_text(f'#!/bin/sh\necho "{program} $*" >> {shlex.quote(str(log))}\n')
        file.chmod(0o755)
    with (tmp_path / "squeue").open("a") as running:
        running.write("echo 7001\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = DOCUMENTED[service].replace("/tmp/", f"{tmp_path}/")
    await ShellCommand(command).scale("h100", 17)  # on 3 machines with 8 workers each
    assert log.read_text().splitlines() == REQUESTS[service]


async def test_documented_command_for_skypilot_makes_no_version_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, program = tmp_path / "requests", tmp_path / "sky"
    program.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(log))}\n[ "$9" != 9 ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    provider = ShellCommand(DOCUMENTED["SkyPilot"].replace("/tmp/", f"{tmp_path}/"))
    for workers in (17, 24, 0, 17):  # 3, 3, 0 and 3 machines with 8 workers each
        await provider.scale("h100", workers)
    assert [line.rpartition(" ")[2] for line in log.read_text().splitlines()] == ["3", "0", "3"]
    for _ in range(2):
        with pytest.raises(ProviderFailed):
            await provider.scale("h100", 72)
    assert log.read_text().count("--workers 9") == 2


async def test_documented_command_for_aws_scales_its_auto_scaling_group(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is moto's, which has all services of AWS."""
    for name, value in (s3_server.env | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    client = botocore.session.get_session().create_client("autoscaling")
    client.create_launch_configuration(
        LaunchConfigurationName="spot", ImageId="ami-12c6146b", InstanceType="p5.48xlarge", SpotPrice="30"
    )
    sizes = {"MinSize": 0, "MaxSize": 4, "DesiredCapacity": 1, "AvailabilityZones": ["us-east-1a"]}
    client.create_auto_scaling_group(AutoScalingGroupName="h100", LaunchConfigurationName="spot", **sizes)
    program = tmp_path / "aws"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(aws_cli.__file__)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for workers, machines in ((17, 3), (0, 0)):
        await ShellCommand(DOCUMENTED["AWS"]).scale("h100", workers)
        (group,) = client.describe_auto_scaling_groups(AutoScalingGroupNames=["h100"])["AutoScalingGroups"]
        assert group["DesiredCapacity"] == len(group["Instances"]) == machines


# --- Kubernetes ---------------------------------------------------------------------------------------------------


async def test_kubernetes_reads_its_token_again_for_each_request(server: KubernetesServer) -> None:
    provider = Kubernetes.of_pod("", server.account)
    await provider.scale("spot", 2)
    server.token = "renewed"
    with pytest.raises(ProviderFailed, match="401"):
        await provider.scale("spot", 3)
    server.mount()
    await provider.scale("spot", 3)
    assert server.replicas == {"spot": 3}
    await provider.close()
    server.stop()


async def test_kubernetes_that_does_not_answer_fails(server: KubernetesServer) -> None:
    provider = Kubernetes.of_pod("", server.account)
    server.stop()
    with pytest.raises(ProviderFailed, match="PATCH https://127"):
        await provider.scale("spot", 2)
    await provider.close()


def test_kubernetes_outside_of_a_pod_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a pod with a mounted service account"):
        Kubernetes.of_pod("rl", tmp_path)
