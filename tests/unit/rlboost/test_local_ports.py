from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rlboost.local.cluster import Ports
from rlboost.local.state import StateDir
from rlboost.shared.errors import ConfigError


def test_a_port_is_taken_again_by_the_next_system(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.owned(), Ports(state.ports()) as ports:
        first = ports.of("manager")
        state.write_ports(ports.by_name())
    with state.owned(), Ports(state.ports()) as ports:
        assert ports.of("manager") == first


def test_a_preferred_port_in_use_is_replaced() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with Ports({"manager": taken}) as ports:
            assert ports.of("manager") != taken
        with Ports() as ports, pytest.raises(ConfigError):
            ports.of("manager", taken)
