"""Machines with addresses of their own, as network namespaces of this one. Needs root and iproute2.

The switch is a namespace, too: packets that cross a bridge of the machine itself may be dropped by its firewall.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_N = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Number of this process among those that run tests at the same time: each has a network of its own."""
_SWITCH = f"rlboost-switch{_N}"
HOST_LINK = f"rlboost-host{_N}"
"""This machine's interface in a network."""
_NETWORK = f"10.231.{77 + _N}"


class Namespace(NamedTuple):
    """One machine of a network."""

    name: str

    @property
    def prefix(self) -> Sequence[str]:
        """The command with which programs run there."""
        return ("ip", "netns", "exec", self.name)

    def get(self, url: str) -> str:
        """Return what is at a URL, requested from there."""
        return subprocess.run([*self.prefix, "curl", "-s", url], check=True, capture_output=True, text=True).stdout

    def unplug(self) -> None:
        """Cut it off from the network: packets are lost, and no connection is closed."""
        _ip("-n", _SWITCH, "link", "set", self.name, "down")

    def sent_bytes(self) -> int:
        """Return the number of bytes that it has sent to others."""
        statistics = [*self.prefix, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return int(subprocess.run(statistics, check=True, capture_output=True, text=True).stdout)

    def plug(self) -> None:
        """Connect it again."""
        _ip("-n", _SWITCH, "link", "set", self.name, "up")


@contextmanager
def network(n: int) -> Iterator[tuple[str, list[Namespace]]]:
    """Yield this machine's address in a network, and `n` namespaces in it."""
    machines = [Namespace(f"rlboost-{_N}-{i}") for i in range(n)]
    names = [_SWITCH, *(machine.name for machine in machines)]
    _remove(names)  # what an earlier run has left
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", _SWITCH, "link", "add", "switch", "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "switch", "up")
        _ip("link", "add", HOST_LINK, "type", "veth", "peer", "name", "host", "netns", _SWITCH)
        _ip("address", "add", f"{_NETWORK}.1/24", "dev", HOST_LINK)
        _ip("link", "set", HOST_LINK, "up")
        for i, machine in enumerate(machines):
            at = ("-n", machine.name)
            _ip(*at, "link", "add", "eth0", "type", "veth", "peer", "name", machine.name, "netns", _SWITCH)
            _ip(*at, "address", "add", f"{_NETWORK}.{i + 2}/24", "dev", "eth0")
            _ip(*at, "link", "set", "eth0", "up")
        for end in ("host", *(machine.name for machine in machines)):
            _ip("-n", _SWITCH, "link", "set", end, "master", "switch", "up")
        yield f"{_NETWORK}.1", machines
    finally:
        _remove(names)


class HostLink:
    """The link between this machine and the namespaces, which share it."""

    def __init__(self, bits_per_s: int) -> None:
        """Limit the speed of each direction."""
        shape = f"root tbf rate {bits_per_s}bit burst 128kb latency 100ms".split()
        subprocess.run(["tc", "qdisc", "add", "dev", HOST_LINK, *shape], check=True)
        subprocess.run(["tc", "-n", _SWITCH, "qdisc", "add", "dev", "host", *shape], check=True)

    @staticmethod
    def sent_bytes() -> int:
        """Return the number of bytes that this machine has sent to the namespaces, with the headers of packets."""
        return int(Path(f"/sys/class/net/{HOST_LINK}/statistics/tx_bytes").read_text())

    @staticmethod
    def cut() -> None:
        """Cut it: packets are lost, and no connection is closed. The namespaces reach each other."""
        _ip("-n", _SWITCH, "link", "set", "host", "down")

    @staticmethod
    def heal() -> None:
        """Connect it again."""
        _ip("-n", _SWITCH, "link", "set", "host", "up")


def _remove(namespaces: Sequence[str]) -> None:
    """Remove namespaces and their virtual cables."""
    # A namespace ends with its last process, some time after its name: this machine's end of the cable is in the way.
    subprocess.run(["ip", "link", "delete", HOST_LINK], check=False, capture_output=True)
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
