"""Access to the weight store: the system's token, or what a worker has in its place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.manifest_key import ManifestKey


class Access(Protocol):
    """What a client of the weight store may do."""

    is_renewed: ClassVar[bool]
    """Whether the credential is replaced after it has expired."""

    @property
    def credential(self) -> str:
        """The bearer token."""

    @property
    def manifest_key(self) -> str:
        """The public key under which manifests are signed: see `manifest_key`."""

    def sign(self, statement: bytes, what: str) -> str:
        """Return the signature of a version's statement; raises `ConfigError`, which says `what`, without a key."""


@dataclass(frozen=True, slots=True)
class SystemToken:
    """Full access.

    Raises:
        ConfigError: the token is malformed.

    """

    credential: str = field(repr=False)
    is_renewed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the token."""
        if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", self.credential):
            raise ConfigError(
                "the token is empty or not printable ASCII: set RLBOOST_TOKEN to the weight store's token"
            )

    @property
    def manifest_key(self) -> str:
        """See `Access`."""
        return ManifestKey(self.credential).public

    def sign(self, statement: bytes, what: str) -> str:
        """See `Access`."""
        del what
        return ManifestKey(self.credential).sign(statement)


@dataclass(slots=True)
class WorkerAccess:
    """A worker's access, for downloads only; the manager replaces the credential before it expires."""

    credential: str = field(repr=False)
    """The bearer token: see `shared.http.store_credential`."""
    manifest_key: str
    """The public key under which manifests are signed: see `manifest_key`."""
    is_renewed: ClassVar[bool] = True

    def sign(self, statement: bytes, what: str) -> str:
        """See `Access`."""
        del statement
        raise ConfigError(f"{what} cannot be signed without the system's token")
