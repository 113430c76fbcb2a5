"""The demo's own state folder: every run starts in an empty one, as no run may go on with another one's job."""

from __future__ import annotations

import shutil

from rlboost.local.state import StateDir
from shared.errors import ConfigError

_MARK = "this-is-a-demo"


def clear(state: StateDir) -> None:
    """Remove what an earlier demo left, and only that.

    Raises:
        ConfigError: a system runs in the folder, or it holds something else than a demo's state.

    """
    state.require_free()
    mark = state.path / _MARK
    try:
        if state.path.exists() and any(state.path.iterdir()):
            if not mark.exists():
                raise ConfigError(f"{state.path} is not empty and no demo's: name another folder with --state")
            shutil.rmtree(state.path)
        state.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise ConfigError(f"state folder {state.path}: {error.strerror}; name another with --state") from error
