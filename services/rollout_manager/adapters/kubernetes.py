"""The provider of workers that scales Deployments of a Kubernetes cluster."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import aiohttp

from rlboost.services.rollout_manager.ports import ProviderFailed
from rlboost.shared.errors import ConfigError
from rlboost.shared.http.server_url import server_url

REQUEST_LIMIT_S = 30.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's credentials."""
_SHOWN_CHARACTERS = 500


class Kubernetes:
    """Sets the `scale` subresource of the Deployment that is named as the kind.

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

    async def scale(self, kind: str, workers: int) -> None:
        """See `FleetProvider.scale`."""
        url = f"{self._url}/{kind}/scale"
        try:
            headers = {
                "Authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}",
                "Content-Type": "application/merge-patch+json",
            }
            if self._session is None:
                self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_LIMIT_S))
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

    async def close(self) -> None:
        """See `FleetProvider.close`."""
        if self._session is not None:
            await self._session.close()
