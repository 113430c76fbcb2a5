"""A local system with real Redis and a small program in the place of every service.

`python -m tests.support.dummy_cluster STATE_DIR` runs one until it is killed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlboost.local import detached
from rlboost.local.cluster import LocalCluster
from rlboost.local.processes import HttpReady, LaunchContext, LocalOptions, ProcessRole, ProcessSpec, SpecOf, spec_of
from tests.support import dummy_service


def dummies(moods: Mapping[str, str] | None = None, *, limit_s: float = 20.0) -> SpecOf:
    """Return what puts the dummy in every service's place; `moods` are by role, several with spaces between."""

    def of(context: LaunchContext, name: str, role: ProcessRole) -> ProcessSpec:
        real = spec_of(context, name, role)
        if role == "redis":
            return real
        argv = (
            sys.executable,
            "-I",
            "-u",
            dummy_service.__file__,
            str(context.port_of(name)),
            *(moods or {}).get(role, "").split(),
        )
        return replace(real, argv=argv, ready=HttpReady(f"{context.url_of(name)}/readyz"), ready_limit_s=limit_s)

    return of


if __name__ == "__main__":
    options = LocalOptions(state_dir=Path(sys.argv[1]), reserved=0, workers=2)
    detached.serve(LocalCluster(options, spec_of=dummies()), [], lambda config: print(config.url, flush=True))
