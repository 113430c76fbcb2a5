"""The provider of workers that is a shell command of the operator's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from rlboost.services.rollout_manager.ports import ProviderFailed

COMMAND_LIMIT_S = 300.0
_SECRET = ("RLBOOST_TOKEN", "RLBOOST_REDIS_URL", "RLBOOST_MANAGER_")
_SHOWN_CHARACTERS = 500


class ShellCommand:
    """Runs a shell command with the kind in `RLBOOST_KIND` and the number in `RLBOOST_WORKERS`.

    The command has the manager's environment, without its settings, the system's token and the URL of Redis.
    """

    def __init__(self, command: str, limit_s: float = COMMAND_LIMIT_S) -> None:
        self._command, self._limit_s = command, limit_s

    async def scale(self, kind: str, workers: int) -> None:
        """See `FleetProvider.scale`."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_SECRET)}
        try:
            process = await asyncio.create_subprocess_shell(
                self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=env | {"RLBOOST_KIND": kind, "RLBOOST_WORKERS": str(workers)},
                start_new_session=True,  # so that its children can be killed with it
            )
        except OSError as error:
            raise ProviderFailed(f"the provider command cannot be started: {error.strerror or error}") from error
        has_ended = False
        try:
            async with asyncio.timeout(self._limit_s):
                output, _ = await process.communicate()
            has_ended = True
        except TimeoutError as error:
            raise ProviderFailed(
                f"the provider command did not end in {self._limit_s:g} s: let it return without waiting for machines"
            ) from error
        finally:
            if not has_ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            text = output.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:] or "it wrote nothing"
            raise ProviderFailed(f"the provider command exited with {process.returncode}: {text}")

    async def close(self) -> None:
        """See `FleetProvider.close`."""
