"""The demo's state folder, empty at the start of each run so that no earlier job continues."""

from __future__ import annotations

import shutil

from rlboost.local.state import StateDir
from rlboost.shared.errors import ConfigError

_MARK = "this-is-a-demo"


def clear(state: StateDir) -> None:
    """Remove the state of an earlier demo, and nothing else.

    Raises:
        ConfigError: a system runs in the folder, or it holds something other than a demo's state.

    """
    state.require_free()
    mark = state.path / _MARK
    try:
        if state.path.exists() and any(state.path.iterdir()):
            if not mark.exists():
                raise ConfigError(f"{state.path} is not empty and not a demo's state: name another folder with --state")
            shutil.rmtree(state.path)
        state.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise ConfigError(f"state folder {state.path}: {error.strerror}; name another with --state") from error
