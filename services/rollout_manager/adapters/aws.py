"""Provider of workers: spot machines of AWS EC2, started and terminated by its API.

Machines carry two tags from their launch on: the system's name and the kind. So a manager that was restarted, or a
standby, finds them. Each launch has a client token that follows from the machines that are known: after a lost reply,
it is repeated without starting more.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rlboost.services.rollout_manager.domain.offers import (
    AWS_IDLE_S,
    NO_CAPACITY,
    RETRY_S,
    UNFILLED_S,
    AwsMachine,
    Failure,
)
from rlboost.services.rollout_manager.ports import ProviderFailed
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import is_installed, pip_install

SYSTEM_TAG, KIND_TAG = "rlboost-system", "rlboost-kind"
EXCESS_S = 50.0
"""How long there must be too many machines until some are terminated: those of drained workers shut down themselves."""
_VISIBLE_AFTER_S = 60.0
"""Time after a launch in which a machine may be missing in AWS's lists, and counts nevertheless."""
_USER_DATA_LIMIT_BYTES = 16384
_PLACEHOLDER = "rlb_..."
_SHOWN_CHARACTERS = 500
_KIND = re.compile(r"^(\s*(?:export\s+)?RLBOOST_WORKER_KIND=)\S*", re.MULTILINE)
_PRICE = re.compile(r"^(\s*(?:export\s+)?RLBOOST_WORKER_PRICE_PER_HOUR=)\S*", re.MULTILINE)


class _Machine(NamedTuple):
    """A machine that AWS lists, or that was launched just now."""

    is_living: bool = True
    launched_at: str = "9999"
    names: frozenset[str] = frozenset()
    """Host names that it may have, without domains."""


class _Refusal(NamedTuple):
    """What an error code of AWS means for an offer."""

    why: str
    """Continues the offer's name: "L4 in us-east-1a ..."."""
    remedy: str
    retry_s: float = RETRY_S


_NO_CAPACITY = _Refusal(NO_CAPACITY, "add pools of other zones or instance types", UNFILLED_S)
_QUOTA = _Refusal("is at the quota of the AWS account", "lower max_workers, or have AWS raise the quota", UNFILLED_S)
_NOT_PERMITTED = _Refusal(
    "is not permitted by AWS",
    "the manager's credentials need the permissions of docs/autoscaling.md#machines-of-aws",
)
_LIMITED = _Refusal("waits for AWS, which limits requests", "it is tried again later")
_NO_TEMPLATE = _Refusal("starts no workers", "create its launch_template in this region")
_OTHER = _Refusal("starts no workers", "see the error codes of EC2")
_REFUSALS = {
    "InsufficientInstanceCapacity": _NO_CAPACITY,
    "SpotMaxPriceTooLow": _Refusal("costs more than the launch template allows", "remove MaxPrice from it", UNFILLED_S),
    "MaxSpotInstanceCountExceeded": _QUOTA,
    "InstanceLimitExceeded": _QUOTA,
    "VcpuLimitExceeded": _QUOTA,
    "UnauthorizedOperation": _NOT_PERMITTED,
    "AuthFailure": _NOT_PERMITTED,
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": _NOT_PERMITTED,
    "OptInRequired": _NOT_PERMITTED,
    "RequestLimitExceeded": _LIMITED,
    "Throttling": _LIMITED,
    "InvalidLaunchTemplateName.NotFoundException": _NO_TEMPLATE,
    "InvalidLaunchTemplateId.NotFound": _NO_TEMPLATE,
    "Unsupported": _Refusal("has no such instance type", "choose another zone or instance_type", UNFILLED_S),
}
"""By error code of EC2."""


class Aws:
    """`FleetProvider` of all pools with spot machines of EC2. Credentials are those that boto3 finds.

    Args:
        machines: kind -> its machines.
        system: name of this system in the tags of its machines.
        user_data: file that machines get as user data, with their kind and without a price; None: that of their launch
            template.
        excess_s: see `EXCESS_S`.
        clock: seconds.
        wall: Unix seconds.

    Raises:
        ConfigError: boto3 is not installed, or the file cannot be used.

    """

    def __init__(
        self,
        machines: Mapping[str, AwsMachine],
        system: str,
        user_data: Path | None,
        *,
        excess_s: float = EXCESS_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not is_installed("boto3"):
            raise ConfigError(f"provider aws needs boto3: {pip_install('aws')}")
        self._machines, self._system, self._excess_s, self._clock, self._wall = machines, system, excess_s, clock, wall
        self._user_data = None if user_data is None else _read_user_data(user_data)
        # As many as there are calls at a time, so that an AWS that hangs delays nothing else of the process.
        self._threads = ThreadPoolExecutor(max(1, len(machines)), "aws")
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        """By region."""
        self._answered: Counter[str] = Counter()
        """Kind -> launches that AWS has answered: the next one is another launch."""
        self._launched: dict[str, dict[str, float]] = {kind: {} for kind in machines}
        """Kind -> machine -> when it was launched, for the last ones."""
        self._excess_since: dict[str, float] = {}
        """Kind -> since when there are too many machines."""
        self._idle_since: dict[str, dict[str, float]] = {kind: {} for kind in machines}
        """Kind -> machine -> since when no worker is on it."""

    async def scale(self, kind: str, workers: int, hosts: Collection[str] = (), /) -> None:
        if kind not in self._machines:
            raise ProviderFailed(f"pool {kind} not found: there are {', '.join(self._machines)}")
        names = {host.partition(".")[0] for host in hosts}
        await asyncio.get_running_loop().run_in_executor(self._threads, self._scale, kind, workers, names)

    async def price(self, kind: str, /) -> float | None:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._price, kind)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def _scale(self, kind: str, workers: int, hosts: Collection[str]) -> None:
        machine = self._machines[kind]
        needed = math.ceil(workers / machine.workers)
        known = self._find(kind)
        used = {one for one, found in known.items() if found.is_living and not found.names.isdisjoint(hosts)}
        # Those without a worker end first.
        order = sorted(known, key=lambda one: (one not in used, known[one].launched_at))
        living = [one for one in order if known[one].is_living]
        now = self._clock()
        before = self._idle_since[kind]
        # If no host is a machine's, it is unknown which machine has workers.
        idle = [one for one in living if one not in used] if used or not hosts else []
        self._idle_since[kind] = since = {one: before.get(one, now) for one in idle}
        if lost := [one for one in idle if now - since[one] >= AWS_IDLE_S]:
            self._call(kind, "terminate_instances", InstanceIds=lost)
            living = [one for one in living if one not in lost]
        if len(living) <= needed:
            self._excess_since.pop(kind, None)
        if len(living) < needed:
            self._launch(kind, needed - len(living), known, len(living))
        elif len(living) > needed and now - self._excess_since.setdefault(kind, now) >= self._excess_s:
            self._call(kind, "terminate_instances", InstanceIds=living[needed:])

    def _find(self, kind: str) -> dict[str, _Machine]:
        """Return the machines of a kind by id; AWS lists ended ones for an hour."""
        filters = [
            {"Name": f"tag:{SYSTEM_TAG}", "Values": [self._system]},
            {"Name": f"tag:{KIND_TAG}", "Values": [kind]},
        ]
        found: dict[str, _Machine] = {}
        token: dict[str, str] = {}
        while True:
            page = self._call(kind, "describe_instances", Filters=filters, MaxResults=1000, **token)
            for one in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
                is_living = one["State"]["Name"] in {"pending", "running"}
                names = frozenset({one["InstanceId"], one.get("PrivateDnsName", "").partition(".")[0]} - {""})
                found[one["InstanceId"]] = _Machine(is_living, one["LaunchTime"].isoformat(), names)
            if not page.get("NextToken"):
                break
            token = {"NextToken": page["NextToken"]}
        launched = self._launched[kind]
        for one, at in list(launched.items()):
            if one in found or self._clock() - at > _VISIBLE_AFTER_S:
                del launched[one]
        return found | dict.fromkeys(launched, _Machine())

    def _launch(self, kind: str, n: int, known: Mapping[str, object], n_living: int) -> None:
        machine = self._machines[kind]
        tags = {SYSTEM_TAG: self._system, KIND_TAG: kind, "Name": f"{self._system} {kind}"}
        is_id = machine.launch_template.startswith("lt-")
        place: dict[str, Any] = {"SubnetId": machine.subnet} if machine.subnet else {}
        if self._user_data is not None:
            place["UserData"] = _KIND.sub(rf"\g<1>{kind}", self._user_data)
        # The hour: AWS remembers tokens for a day, and lists ended machines for an hour only.
        identity = [self._system, kind, str(self._wall() // 3600), str(self._answered[kind]), *sorted(known)]
        answer = self._call(
            kind,
            "run_instances",
            n_living,
            MinCount=1,
            MaxCount=n,
            ClientToken=hashlib.sha256("\0".join(identity).encode()).hexdigest(),
            LaunchTemplate={"LaunchTemplateId" if is_id else "LaunchTemplateName": machine.launch_template},
            InstanceType=machine.instance_type,
            Placement={"AvailabilityZone": machine.zone},  # AWS refuses a subnet of another zone
            InstanceMarketOptions={
                "MarketType": "spot",
                "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
            },
            InstanceInitiatedShutdownBehavior="terminate",
            TagSpecifications=[
                {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
            ],
            **place,
        )
        self._answered[kind] += 1
        started = [one["InstanceId"] for one in answer["Instances"]]
        self._launched[kind] |= dict.fromkeys(started, self._clock())
        if len(started) < n:
            text = f"AWS started {len(started)} of {n} x {machine.instance_type} for {kind} in {machine.zone}"
            raise ProviderFailed(
                f"{text}: {_NO_CAPACITY.remedy}",
                Failure(NO_CAPACITY, UNFILLED_S, (n_living + len(started)) * machine.workers),
            )

    def _price(self, kind: str) -> float:
        machine = self._machines[kind]
        answer = self._call(
            kind,
            "describe_spot_price_history",
            InstanceTypes=[machine.instance_type],
            ProductDescriptions=["Linux/UNIX"],
            Filters=[{"Name": "availability-zone", "Values": [machine.zone]}],
            StartTime=self._wall(),
        )
        if not answer["SpotPriceHistory"]:
            raise ProviderFailed(
                f"AWS lists no spot price of {machine.instance_type} in {machine.zone}: choose another instance_type "
                "or zone, or set price_per_hour"
            )
        newest = max(answer["SpotPriceHistory"], key=lambda one: one["Timestamp"])
        return float(newest["SpotPrice"]) / machine.workers

    def _call(self, kind: str, operation: str, n_living: int | None = None, /, **fields: Any) -> Any:
        """Return AWS's answer.

        Args:
            kind: whose machines it is about.
            operation: a method of boto3's client.
            n_living: machines that a failed launch leaves; None: it is no launch.
            fields: its arguments.

        Raises:
            ProviderFailed: AWS refused it, or was not reached.

        """
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - an optional library

        machine = self._machines[kind]
        workers = None if n_living is None else n_living * machine.workers
        try:
            return getattr(self._client(machine.region), operation)(**fields)
        except ClientError as error:
            code, text = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
            # An unknown error of the server leaves open whether the launch took effect: it is repeated with its token.
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if n_living is not None and (status < 500 or code in _REFUSALS):
                self._answered[kind] += 1
            why, remedy, retry_s = _REFUSALS.get(code, _OTHER)
            text = (
                f"AWS refused {operation} for {kind} in {machine.zone}: {code}: {text[:_SHOWN_CHARACTERS]} ({remedy})"
            )
            raise ProviderFailed(text, Failure(why, retry_s, workers)) from error
        except BotoCoreError as error:
            text = f"AWS did not answer {operation} for {kind} in {machine.zone}: {error}"
            raise ProviderFailed(f"{text} (check the network and credentials)", Failure(workers=workers)) from error

    def _client(self, region: str) -> Any:
        import boto3  # noqa: PLC0415 - an optional library
        from botocore.config import Config  # noqa: PLC0415 - an optional library

        with self._lock:
            if region not in self._clients:
                limits = Config(
                    connect_timeout=10, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 2}
                )
                self._clients[region] = boto3.session.Session().client("ec2", region_name=region, config=limits)
            return self._clients[region]


def _read_user_data(file: Path) -> str:
    name = f"RLBOOST_MANAGER_AWS_USER_DATA: {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if not _KIND.search(text):
        raise ConfigError(f"{name} has no line RLBOOST_WORKER_KIND=..., in which each machine gets its kind: add it")
    if _PLACEHOLDER in text:
        raise ConfigError(f"{name} has the token {_PLACEHOLDER} of the example: write that of your system")
    if (size := len(text.encode())) > _USER_DATA_LIMIT_BYTES - 256:
        raise ConfigError(f"{name} has {size} bytes, and AWS takes {_USER_DATA_LIMIT_BYTES}: download the rest in it")
    return _PRICE.sub(r"\g<1>0", text)  # a worker without a price has that of its pool
