"""What a worker needs to download weights; it does not have the system's token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WorkerAccess:
    """A worker's access to the weight store; the manager replaces the credential before it expires."""

    credential: str
    """The bearer token: see `shared.http.store_credential`."""
    manifest_key: str
    """The public key under which manifests are signed: see `manifest_key`."""
