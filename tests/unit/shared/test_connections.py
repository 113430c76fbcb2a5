"""Connections of clients that are silent make room for others; of a real server, see the integration tests."""

from __future__ import annotations

import resource

import pytest

from rlboost.shared.http.connections import MAX_CONNECTIONS, Connections, max_connections
from rlboost.shared.process.system import raise_open_files_limit


class Client:
    """A `Connection` whose state a test sets."""

    def __init__(self, address: str, *, has_request: bool = False) -> None:
        self.address, self.has_request = address, has_request
        self.silent_since = 0.0
        self.is_closed = False

    def is_overdue(self, now: float) -> bool:
        return now - self.silent_since > 10.0

    def abort(self) -> None:
        self.is_closed = True


def test_connection_beyond_the_limit_replaces_the_oldest_without_a_request() -> None:
    connections = Connections(4)
    busy, *idle = clients = [Client("a", has_request=True), Client("b"), Client("c"), Client("d")]
    assert all(connections.add(client) for client in clients)
    assert connections.add(Client("e"))
    assert [client.is_closed for client in (busy, *idle)] == [False, True, False, False]
    assert len(connections) == 4


def test_connection_is_refused_while_all_others_have_requests() -> None:
    connections = Connections(2)
    assert connections.add(Client("a", has_request=True))
    assert connections.add(Client("b", has_request=True))
    assert not connections.add(Client("c"))
    assert len(connections) == 2


def test_one_address_leaves_a_quarter_of_the_places_to_others() -> None:
    connections = Connections(8)
    assert [connections.add(Client("a", has_request=True)) for _ in range(8)] == [True] * 6 + [False] * 2
    assert connections.add(Client("b"))
    idle = Connections(8)
    first, *rest = [Client("a") for _ in range(20)]
    assert all(idle.add(client) for client in (first, *rest))
    assert (len(idle), first.is_closed, rest[-1].is_closed) == (6, True, False)


def test_sweep_closes_only_connections_that_are_silent_for_too_long() -> None:
    now = 100.0
    connections = Connections(8, clock=lambda: now)
    silent, talking = Client("a"), Client("a")
    talking.silent_since = 95.0
    assert connections.add(silent)
    assert connections.add(talking)
    connections.sweep()
    assert (silent.is_closed, talking.is_closed) == (True, False)


@pytest.mark.parametrize(("files", "places"), [(64, 16), (1024, 768), (1 << 20, MAX_CONNECTIONS)])
def test_places_of_connections_leave_open_files_to_the_rest(files: int, places: int) -> None:
    assert max_connections(files) == places


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 4096), (4096, 4096)),
        ((256, resource.RLIM_INFINITY), (1 << 20, resource.RLIM_INFINITY)),
        ((1024, 1024), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_soft_limit_of_open_files_is_raised_to_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: set_to.append(values))
    limit = raise_open_files_limit()
    assert set_to == ([raised] if raised else [])
    assert limit == (
        raised[0] if raised else min(limits[0], 1 << 20) if limits[0] != resource.RLIM_INFINITY else 1 << 20
    )


def test_limit_that_the_system_refuses_is_raised_as_far_as_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, values: tuple[int, int]) -> None:
        if values[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_open_files_limit() == 10_240
