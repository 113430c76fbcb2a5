"""Providers of workers: Deployments of a Kubernetes cluster, and a shell command of the operator's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

import aiohttp

from rlboost.services.rollout_manager.ports import ProviderFailed
from rlboost.shared.errors import ConfigError
from rlboost.shared.http.server_url import server_url
from rlboost.shared.proxies import aiohttp_session, direct
from rlboost.shared.secrets import bearer

# --- Kubernetes -------------------------------------------------------------------------------------------------------


REQUEST_LIMIT_S = 30.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's credentials."""
_SHOWN_CHARACTERS = 500


class Kubernetes:
    """`FleetProvider` that sets the `scale` subresource of the Deployment that is named as the kind.

    Args:
        url: the API server's URL.
        namespace: namespace of the Deployments.
        token_file: has the bearer token, which Kubernetes renews.
        tls: verifies the API server.

    """

    def __init__(self, url: str, namespace: str, token_file: Path, tls: ssl.SSLContext) -> None:
        self._url = f"{url}/apis/apps/v1/namespaces/{namespace}/deployments"
        self._token_file = token_file
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of_pod(cls, namespace: str, account: Path = SERVICE_ACCOUNT) -> Kubernetes:
        """Return the provider with the credentials of this pod's service account.

        Raises:
            ConfigError: this is no pod, or its account's token is not mounted.

        """
        try:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            namespace = namespace or (account / "namespace").read_text(encoding="utf-8").strip()
            tls = ssl.create_default_context(cafile=account / "ca.crt")
        except (KeyError, OSError) as error:
            raise ConfigError(
                f"provider kubernetes needs a pod with a mounted service account (missing: {error}): run the manager "
                "in one, or set RLBOOST_MANAGER_PROVIDER to command"
            ) from error
        return cls(server_url(host, int(port), tls=True), namespace, account / "token", tls)

    async def scale(self, kind: str, workers: int, _hosts: Collection[str] = (), /) -> None:
        url = f"{self._url}/{kind}/scale"
        try:
            headers = {
                "Authorization": bearer(str(self._token_file), self._token_file.read_text(encoding="utf-8")),
                "Content-Type": "application/merge-patch+json",
            }
            if self._session is None:
                timeout = aiohttp.ClientTimeout(REQUEST_LIMIT_S)
                self._session = aiohttp_session(direct, self._url, timeout=timeout)
            patch = {"spec": {"replicas": workers}}
            async with self._session.patch(url, json=patch, headers=headers, ssl=self._tls) as answer:
                text = (await answer.text())[:_SHOWN_CHARACTERS]
                if not answer.ok:
                    raise ProviderFailed(
                        f"PATCH {url} was answered with {answer.status}: {text}. The Deployment must exist, and the "
                        "service account needs the verb patch on deployments/scale"
                    )
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            raise ProviderFailed(f"PATCH {url} failed: {error or type(error).__name__}") from error

    async def price(self, _kind: str, /) -> float | None:
        return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


# --- shell command ----------------------------------------------------------------------------------------------------


COMMAND_LIMIT_S = 300.0
_SECRET = ("RLBOOST_TOKEN", "RLBOOST_REDIS_URL", "RLBOOST_MANAGER_")


class ShellCommand:
    """`FleetProvider`: a shell command with the kind in `RLBOOST_KIND` and the number in `RLBOOST_WORKERS`.

    The command has the manager's environment, without its settings, the system's token and the URL of Redis.
    """

    def __init__(self, command: str, limit_s: float = COMMAND_LIMIT_S) -> None:
        self._command, self._limit_s = command, limit_s

    async def scale(self, kind: str, workers: int, _hosts: Collection[str] = (), /) -> None:
        # A file, and no pipe: a process that the command leaves in the background may hold that open.
        with tempfile.TemporaryFile() as output:
            code = await self._run(kind, workers, output)
            if not code:
                return
            output.seek(0)
            text = output.read().decode(errors="replace").strip()[-_SHOWN_CHARACTERS:] or "it wrote nothing"
        raise ProviderFailed(f"the provider command exited with {code}: {text}")

    async def _run(self, kind: str, workers: int, output: IO[bytes]) -> int:
        """Return the command's exit code."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_SECRET)}
        try:
            process = await asyncio.create_subprocess_shell(
                self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=env | {"RLBOOST_KIND": kind, "RLBOOST_WORKERS": str(workers)},
                start_new_session=True,  # so that its children can be killed with it
            )
        except OSError as error:
            raise ProviderFailed(f"the provider command cannot be started: {error.strerror or error}") from error
        has_ended = False
        try:
            async with asyncio.timeout(self._limit_s):
                code = await process.wait()
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
        return code

    async def price(self, _kind: str, /) -> float | None:
        return None

    async def close(self) -> None:
        """See `FleetProvider.close`."""
