"""Providers of workers: one contract for the fake, a shell command, Kubernetes and AWS."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import botocore.session
import pytest
import uvloop

from rlboost.services.rollout_manager.adapters.aws import EXCESS_S, Aws
from rlboost.services.rollout_manager.adapters.providers import Kubernetes, ShellCommand
from rlboost.services.rollout_manager.domain.offers import AWS_IDLE_S, NO_CAPACITY, UNFILLED_S, Failure
from rlboost.services.rollout_manager.ports import FleetProvider, ProviderFailed
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import modules_hidden
from tests.support import aws_cli
from tests.support.ec2_server import ZONE, Ec2Server
from tests.support.eventually import eventually
from tests.support.kubernetes_server import KubernetesServer
from tests.support.manager_fakes import FakeProvider
from tests.support.ports import reserve_port
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


@pytest.fixture(scope="module")
def ec2_server() -> Iterator[Ec2Server]:
    server = Ec2Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        server.make_template()
    yield server
    server.stop()


@pytest.fixture
def ec2(ec2_server: Ec2Server, monkeypatch: pytest.MonkeyPatch) -> Ec2Server:
    """Return a server that refuses nothing yet, and has machines of other tests' systems."""
    for name, value in ec2_server.env.items():
        monkeypatch.setenv(name, value)
    ec2_server.reset()
    return ec2_server


@pytest.fixture(params=["fake", "command", "kubernetes", "aws"])
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
    elif request.param == "aws":
        ec2: Ec2Server = request.getfixturevalue("ec2")
        kinds = {"spot": ec2.machine(), "gone": ec2.machine(launch_template="gone")}
        site = Site(Aws(kinds, "contract", None, excess_s=0.0), lambda: len(ec2.machines("contract", "spot")))
        await site.provider.scale("spot", 1)
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
    with pytest.raises(ProviderFailed, match=r"gone.* (not found|does not exist)"):
        await site.provider.scale("gone", 3)
    assert site.workers() == 1


async def test_provider_tells_a_price_or_none(site: Site) -> None:
    price = await site.provider.price("spot")
    assert price is None or price > 0


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


async def test_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    file = shlex.quote(str(tmp_path / "pid"))
    with pytest.raises(ProviderFailed, match="did not end"):
        await ShellCommand(f"sleep 60 & echo $! > {file}; wait", limit_s=1.0).scale("spot", 1)
    pid = int((tmp_path / "pid").read_text())
    await eventually(lambda: not _runs(pid))


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_command_may_leave_a_process_in_the_background(tmp_path: Path, loop: Callable[[Any], None]) -> None:
    file = shlex.quote(str(tmp_path / "pid"))
    try:
        loop(ShellCommand(f"sleep 60 & echo $! > {file}", limit_s=30).scale("spot", 1))
        pid = int((tmp_path / "pid").read_text())
        assert _runs(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProviderFailed, match=r"exited with 3: no quota$"):
        loop(ShellCommand("echo no quota; exit 3").scale("spot", 1))


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
    "a group of AWS": ["aws autoscaling set-desired-capacity --auto-scaling-group-name h100 --desired-capacity 3"],
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
        await ShellCommand(DOCUMENTED["a group of AWS"]).scale("h100", workers)
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


# --- AWS ----------------------------------------------------------------------------------------------------------


USER_DATA = Path(__file__).parents[3] / "deploy/cloud-init/spot-worker.yaml"


async def test_machines_of_aws_get_what_the_pool_says(ec2: Ec2Server, tmp_path: Path) -> None:
    kind = ec2.machine(workers=8, instance_type="g6.48xlarge")
    user_data = tmp_path / "spot-worker.yaml"
    user_data.write_text(USER_DATA.read_text().replace("rlb_...", "rlb_token"))
    provider = Aws({"l4": kind}, "said", user_data)
    await provider.scale("l4", 17)
    first, *others = ec2.machines("said", "l4")
    assert len(others) == 2
    assert (first["InstanceType"], first["Placement"]["AvailabilityZone"]) == (kind.instance_type, kind.zone)
    assert first["InstanceLifecycle"] == "spot"
    (launch,) = ec2.launches
    assert launch["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert launch["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    found, given = base64.b64decode(launch["UserData"]).decode().splitlines(), user_data.read_text().splitlines()
    changed = [one.strip() for one, before in zip(found, given, strict=True) if one != before]
    assert changed == ["RLBOOST_WORKER_KIND=l4", "RLBOOST_WORKER_PRICE_PER_HOUR=0"]
    await provider.close()


async def test_restarted_manager_finds_its_machines_of_aws_and_no_others(ec2: Ec2Server) -> None:
    machines = {"l4": ec2.machine(), "l4-b": ec2.machine()}
    await Aws(machines, "ours", None).scale("l4", 2)
    await Aws(machines, "ours", None).scale("l4-b", 1)
    await Aws(machines, "theirs", None).scale("l4", 1)
    restarted = Aws(machines, "ours", None)
    await restarted.scale("l4", 3)
    assert [len(ec2.machines(*one)) for one in (("ours", "l4"), ("ours", "l4-b"), ("theirs", "l4"))] == [3, 1, 1]


async def test_launch_whose_reply_is_lost_is_not_repeated(ec2: Ec2Server) -> None:
    """The machines of such a launch may also be missing in the next list, after a restart of the manager, too."""
    ec2.replies, ec2.hides_new = False, True
    with pytest.raises(ProviderFailed, match="did not answer run_instances"):
        await Aws({"l4": ec2.machine()}, "lost", None, wall=lambda: 0.0).scale("l4", 2)
    ec2.replies = True
    provider = Aws({"l4": ec2.machine()}, "lost", None, wall=lambda: 0.0)
    await provider.scale("l4", 2)
    await provider.scale("l4", 2)
    ec2.hides_new = False
    assert len(ec2.machines("lost", "l4")) == 2
    assert len({launch["ClientToken"] for launch in ec2.launches}) == 1


async def test_launch_whose_error_is_of_the_server_is_repeated_with_its_token(ec2: Ec2Server) -> None:
    provider = Aws({"l4": ec2.machine()}, "server-error", None)
    ec2.status, ec2.errors = "503 Service Unavailable", {"RunInstances": "Unavailable"}
    with pytest.raises(ProviderFailed, match="Unavailable"):
        await provider.scale("l4", 1)
    ec2.errors = {}
    await provider.scale("l4", 1)
    assert len({launch["ClientToken"] for launch in ec2.launches}) == 1


async def test_restarted_manager_launches_after_aws_has_forgotten_the_machines_before(ec2: Ec2Server) -> None:
    """AWS would answer a token that it knows with machines that have ended."""
    machines, now = {"l4": ec2.machine()}, 1e9
    await Aws(machines, "later", None, wall=lambda: now).scale("l4", 1)
    (before,) = ec2.machines("later", "l4")
    ec2.client().terminate_instances(InstanceIds=[before["InstanceId"]])
    now, ec2.hides_new = now + 2 * 3600, True
    await Aws(machines, "later", None, wall=lambda: now).scale("l4", 1)
    ec2.hides_new = False
    assert len(ec2.machines("later", "l4")) == 1


async def test_machine_in_a_subnet_is_launched_in_the_zone_whose_price_counts(ec2: Ec2Server) -> None:
    subnets = ec2.client().describe_subnets(Filters=[{"Name": "availability-zone", "Values": [ZONE]}])["Subnets"]
    await Aws({"l4": ec2.machine(subnet=subnets[0]["SubnetId"])}, "subnet", None).scale("l4", 1)
    (launch,) = ec2.launches
    assert (launch["SubnetId"], launch["Placement.AvailabilityZone"]) == (subnets[0]["SubnetId"], ZONE)


async def test_preempted_machine_of_aws_is_replaced(ec2: Ec2Server) -> None:
    provider = Aws({"l4": ec2.machine()}, "preempted", None)
    await provider.scale("l4", 2)
    taken = ec2.machines("preempted", "l4")[0]["InstanceId"]
    ec2.client().terminate_instances(InstanceIds=[taken])
    await provider.scale("l4", 2)
    alive = [one["InstanceId"] for one in ec2.machines("preempted", "l4")]
    assert len(alive) == 2
    assert taken not in alive


async def test_surplus_machines_of_aws_have_time_to_end_by_themselves(ec2: Ec2Server) -> None:
    now = 0.0
    provider = Aws({"l4": ec2.machine()}, "surplus", None, clock=lambda: now)
    await provider.scale("l4", 3)
    await provider.scale("l4", 1)
    drained = ec2.machines("surplus", "l4")[0]["InstanceId"]
    assert len(ec2.machines("surplus", "l4")) == 3
    ec2.client().terminate_instances(InstanceIds=[drained])
    now = EXCESS_S
    await provider.scale("l4", 1)
    assert len(ec2.machines("surplus", "l4")) == 1


async def test_surplus_machines_of_aws_with_workers_end_last(ec2: Ec2Server) -> None:
    provider = Aws({"l4": ec2.machine()}, "used", None, excess_s=0.0)
    await provider.scale("l4", 1)
    (old,) = ec2.machines("used", "l4")
    await provider.scale("l4", 2)
    (new,) = (one for one in ec2.machines("used", "l4") if one["InstanceId"] != old["InstanceId"])
    await provider.scale("l4", 1, [new["PrivateDnsName"]])
    assert [one["InstanceId"] for one in ec2.machines("used", "l4")] == [new["InstanceId"]]


async def test_machine_of_aws_without_a_worker_for_long_is_replaced(ec2: Ec2Server) -> None:
    now = 0.0
    provider = Aws({"l4": ec2.machine()}, "idle", None, clock=lambda: now)
    await provider.scale("l4", 2)
    idle, used = ec2.machines("idle", "l4")
    for now in (1.0, AWS_IDLE_S):  # noqa: B007 - the provider's clock
        await provider.scale("l4", 2, [used["PrivateDnsName"].partition(".")[0]])
        assert len(ec2.machines("idle", "l4")) == 2
    now = AWS_IDLE_S + 1
    await provider.scale("l4", 2, ["another-naming"])
    assert idle["InstanceId"] in [one["InstanceId"] for one in ec2.machines("idle", "l4")]
    await provider.scale("l4", 2, [used["PrivateDnsName"]])
    for now in (2 * AWS_IDLE_S, 2 * AWS_IDLE_S + 1):  # noqa: B007
        await provider.scale("l4", 2, [used["PrivateDnsName"]])
    after = [one["InstanceId"] for one in ec2.machines("idle", "l4")]
    assert len(after) == 2
    assert used["InstanceId"] in after
    assert idle["InstanceId"] not in after


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("InsufficientInstanceCapacity", "has no capacity"),
        ("MaxSpotInstanceCountExceeded", "is at the quota of the AWS account"),
        ("UnauthorizedOperation", "is not permitted by AWS"),
        ("RequestLimitExceeded", "waits for AWS, which limits requests"),
        ("InvalidSubnetID.NotFound", "starts no workers"),
    ],
)
async def test_refusal_of_aws_has_a_reason_and_the_next_launch_is_another(ec2: Ec2Server, code: str, why: str) -> None:
    provider = Aws({"l4": ec2.machine()}, code, None)
    await provider.scale("l4", 1)
    ec2.errors = {"RunInstances": code}
    with pytest.raises(ProviderFailed, match=f"refused run_instances for l4 in {ZONE}: {code}") as failed:
        await provider.scale("l4", 2)
    assert (failed.value.failure.why, failed.value.failure.workers) == (why, 1)
    ec2.errors = {}
    await provider.scale("l4", 2)
    assert len(ec2.machines(code, "l4")) == 2
    assert len({launch["ClientToken"] for launch in ec2.launches}) == 3


async def test_zone_of_aws_that_has_fewer_machines_says_how_many(ec2: Ec2Server) -> None:
    ec2.capacity = 1
    with pytest.raises(ProviderFailed, match=r"started 1 of 3 x g6\.xlarge for l4") as failed:
        await Aws({"l4": ec2.machine(workers=2)}, "few", None).scale("l4", 6)
    assert failed.value.failure == Failure(NO_CAPACITY, UNFILLED_S, workers=2)


async def test_spot_price_is_divided_among_the_workers_of_a_machine(ec2: Ec2Server) -> None:
    ec2.prices = {ZONE: 4.0, "us-east-1b": 2.0}
    machines = {"a": ec2.machine(workers=8), "b": ec2.machine(zone="us-east-1b"), "c": ec2.machine(zone="us-east-1c")}
    provider = Aws(machines, "prices", None)
    assert [await provider.price(kind) for kind in ("a", "b")] == [0.5, 2.0]
    with pytest.raises(ProviderFailed, match=r"no spot price of g6\.xlarge in us-east-1c: .* or set price_per_hour"):
        await provider.price("c")


async def test_region_of_aws_that_hangs_delays_no_other(ec2: Ec2Server, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [f"l4-{i}" for i in range(40)]  # more than the threads of asyncio
    provider, together = Aws({kind: ec2.machine() for kind in kinds}, "many", None), threading.Barrier(len(kinds))

    def hang(_kind: str) -> float:
        together.wait(30)
        return 1.0

    monkeypatch.setattr(provider, "_price", hang)
    assert await asyncio.gather(*map(provider.price, kinds)) == [1.0] * len(kinds)
    await provider.close()


async def test_aws_that_does_not_answer_fails(ec2: Ec2Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{reserve_port(ec2)}")
    with pytest.raises(ProviderFailed, match="did not answer describe_instances"):
        await Aws({"l4": ec2.machine()}, "away", None).scale("l4", 1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("#!/bin/sh\nrlboost worker join", "has no line RLBOOST_WORKER_KIND="),
        ("RLBOOST_WORKER_KIND=a\n" + "#" * 16384, "AWS takes 16384"),
        (USER_DATA.read_text(), "has the token rlb_"),
        (None, "cannot be read"),
    ],
)
def test_unusable_user_data_is_refused(tmp_path: Path, text: str | None, error: str) -> None:
    file = tmp_path / "user-data"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=error):
        Aws({}, "system", file)


def test_provider_aws_without_its_library_says_how_to_install_it() -> None:
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "boto3"}
    for name in loaded:
        del sys.modules[name]
    try:
        with modules_hidden("boto3"), pytest.raises(ConfigError, match=r"needs boto3: pip install .*\[aws\]"):
            Aws({}, "system", None)
    finally:
        sys.modules |= loaded
