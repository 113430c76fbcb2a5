"""Processes that run `forked_probe`, for tests of the fork server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rlboost.local import fork_server
from rlboost.local.processes import ProcessSpec
from tests.support import forked_probe


def use_probes() -> None:
    """Let fork servers of this process start in a moment, and fork probes in place of services."""
    vars(fork_server)["SERVICES"] = (forked_probe.MODULE,)
    fork_server.MODULE = "tests.support.forked_probe_server"


def probe(folder: Path, what: str, env: Mapping[str, str] | None = None, log: str = "") -> ProcessSpec:
    """Return a process that does what `forked_probe` says, with a log of its own in the folder."""
    argv = (sys.executable, "-m", forked_probe.MODULE, what)
    return ProcessSpec("probe", "trainer", argv, folder / (log or f"{what}.log"), env or {})
