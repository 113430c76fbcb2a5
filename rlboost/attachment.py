"""A trainer's hold of its external job: calls of the REST API under its epoch, and a thread that renews the lease."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

from rlboost.client import Client, ClientError, job_path
from rlboost.shared.errors import RLBoostError
from rlboost.shared.weights.access import IssuedAccess


class Superseded(RLBoostError):
    """Another trainer has attached to the job, or the job has ended."""


class Attachment:
    """One trainer's hold of its job: calls of the REST API, and a thread that renews the lease.

    Args:
        client: of the manager.
        renewing: the same, which gives up soon: it renews the lease, and ends the hold.
        job_id: the job.
        options: of the request that attaches.

    """

    def __init__(self, client: Client, renewing: Client, job_id: str, options: Mapping[str, Any]) -> None:
        self.client, self._renewing, self.job_id = client, renewing, job_id
        self.path = job_path(job_id)
        self.attached = client.request("POST", f"{self.path}/trainer", json=dict(options)).json()
        self.epoch: int = self.attached["epoch"]
        self.access = IssuedAccess(self.attached["store_credential"], "")
        self.lost: RLBoostError | None = None
        self.phase = "training"
        self._stop = threading.Event()
        # By a weak reference: a trainer that is no longer used loses its job.
        arguments = (weakref.ref(self), self._stop, options["lease_s"] / 4)
        threading.Thread(target=_keep_renewing, args=arguments, name="trainer-lease", daemon=True).start()

    def call(self, method: str, part: str, body: Mapping[str, Any] | None = None, **options: Any) -> httpx.Response:
        """Return the answer to a request below the job, which names the epoch.

        Raises:
            Superseded: this trainer no longer has the job.
            ClientError: the request is rejected, or the manager does not answer.

        """
        return self._call(self.client, method, part, body, **options)

    def _call(
        self, client: Client, method: str, part: str, body: Mapping[str, Any] | None = None, **options: Any
    ) -> httpx.Response:
        if self.lost:
            raise self.lost
        if body is not None:
            options["json"] = {"epoch": self.epoch, **body}
        try:
            return client.request(method, f"{self.path}/{part}", **options)
        except ClientError as error:
            if error.status == httpx.codes.CONFLICT and error.title in {"Superseded", "Job over"}:
                self.lost = Superseded(error.detail)
                raise self.lost from error
            raise

    def renew(self) -> None:
        """Renew the lease and the credential of the weight store; raises what `call` raises."""
        answer = self._call(self._renewing, "PUT", "trainer", {"phase": self.phase}).json()
        self.access.credential = answer["store_credential"]

    def close(self) -> None:
        """Let another trainer attach at once."""
        self._stop.set()
        with suppress(RLBoostError):  # its lease runs out
            self._call(self._renewing, "DELETE", "trainer", params={"epoch": self.epoch})


def _keep_renewing(attachment: weakref.ref[Attachment], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        if (held := attachment()) is None or held.lost:
            return
        with suppress(RLBoostError):  # the next call of the trainer says why
            held.renew()
        del held
