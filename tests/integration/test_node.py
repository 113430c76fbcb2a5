"""Workers of one machine under one supervisor: small programs that exit, die and drain."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from rlboost.local import supervisor
from rlboost.local.node import serve
from rlboost.local.processes import ProcessSpec
from rlboost.local.state import StateDir
from rlboost.local.supervisor import Backoff, ClusterEvent
from rlboost.shared.errors import ConfigError, Fatal

DRAINS = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
DRAINED, REFUSES, CRASHES = "print('drained')", "import sys; sys.exit('a wrong setting' and 2)", "raise SystemExit(1)"


class Node:
    """Runs workers with these programs until they end, or until an event of `until` arrives: then SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder / "node")
        self.events: list[tuple[str, str]] = []

    def run(self, programs: dict[str, str], until: tuple[str, str] | None = None) -> None:
        def watch(event: ClusterEvent) -> None:
            self.events.append((event.name, event.kind))
            if (event.name, event.kind) == until:
                threading.Timer(0, os.kill, (os.getpid(), signal.SIGTERM)).start()

        specs = [
            ProcessSpec(
                name=name,
                role="preemptible",
                argv=(sys.executable, "-I", "-S", "-c", program),
                log=self.state.log_of(name),
                restart_after_success=False,
            )
            for name, program in programs.items()
        ]
        serve(specs, self.state, 10.0, watch)


def test_node_ends_when_every_worker_was_drained(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run({"n-1": DRAINED, "n-2": DRAINED})
    assert sorted(node.events) == [(name, kind) for name in ("n-1", "n-2") for kind in ("left", "started")]
    assert [record.restarts for record in node.state.processes()] == [0, 0]


def test_node_drains_every_worker_on_sigterm(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run({"n-1": DRAINS, "n-2": DRAINS, "n-3": DRAINED}, until=("n-3", "left"))
    assert [event for event in node.events if event[1] in {"left", "killed", "died"}].count(("n-1", "left")) == 1
    assert ("n-2", "left") in node.events


def test_node_restarts_a_worker_that_dies_and_reports_a_crash_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "Backoff", lambda: Backoff(first_s=0.01, most=2))
    node = Node(tmp_path)
    with pytest.raises(Fatal, match="n-1: crash loop"):
        node.run({"n-1": CRASHES})
    assert node.events.count(("n-1", "died")) >= 1
    assert node.state.processes()[0].restarts >= 1


def test_node_whose_worker_rejects_its_settings_reports_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="n-1: ended with exit code 2"):
        Node(tmp_path).run({"n-1": REFUSES, "n-2": DRAINED})


def test_second_node_in_a_folder_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with node.state.owned(), pytest.raises(ConfigError, match="already runs in"):
        node.run({"n-1": DRAINED})
