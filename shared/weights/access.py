"""Access to the weight store, and the key pair that signs manifests.

The store signs a version when it is committed. A worker or an external trainer has a credential in place of the
system's token: it can check a manifest, and cannot make one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rlboost.shared.errors import BadSignature, ConfigError

if TYPE_CHECKING:
    from rlboost.shared.weights.manifest import Manifest


class Access(Protocol):
    """What a client of the weight store may do."""

    is_renewed: ClassVar[bool]
    """Whether the credential is replaced after it has expired."""

    @property
    def credential(self) -> str:
        """The bearer token."""

    @property
    def manifest_key(self) -> str:
        """The public key under which manifests are signed: see `ManifestKey`."""


@dataclass(frozen=True, slots=True)
class SystemToken:
    """Full `Access`.

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
        return ManifestKey(self.credential).public


@dataclass(slots=True)
class IssuedAccess:
    """Access to download weights, or to publish those of a job; the manager replaces the credential before its end."""

    credential: str = field(repr=False)
    """The bearer token: see `shared.http.access`."""
    manifest_key: str
    """The public key under which manifests are signed: see `ManifestKey`."""
    is_renewed: ClassVar[bool] = True


class ManifestKey:
    """Signs what a manifest says, with the key of one system.

    The private key is derived from the system's token, so the store has it and need not keep it.
    """

    _purpose: ClassVar[bytes] = b"rlboost manifest signing key"

    def __init__(self, token: str) -> None:
        """Derive the key from the system's token."""
        seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=self._purpose).derive(token.encode())
        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    def sign(self, statement: bytes) -> str:
        """Return the Ed25519 signature, in hexadecimal."""
        return self._key.sign(statement).hex()

    @property
    def public(self) -> str:
        """Return the public key, in hexadecimal."""
        return self._key.public_key().public_bytes_raw().hex()


class RecordKey(ManifestKey):
    """Signs the record of a run (`shared.job.run_record`), with a key of its own, which the trainer derives."""

    _purpose = b"rlboost run record signing key"


def is_key(public_key: str) -> bool:
    """Return True if a text is a public key."""
    return re.fullmatch("[0-9a-f]{64}", public_key) is not None


def is_signed(statement: bytes, signature: str, public_key: str) -> bool:
    """Return True if the owner of a key has signed a statement.

    Raises:
        ValueError: the key is malformed.

    """
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
    if not re.fullmatch("[0-9a-f]{128}", signature):
        return False
    try:
        key.verify(bytes.fromhex(signature), statement)
    except InvalidSignature:
        return False
    return True


def check_manifest(manifest: Manifest, public_key: str) -> None:
    """Check that a holder of the system's token has signed a manifest.

    Raises:
        BadSignature: it is unsigned, or signed with another key.
        ConfigError: the key is malformed.

    """
    try:
        signed = is_signed(manifest.statement(), manifest.signature, public_key)
    except ValueError as error:
        raise ConfigError(f"manifest key {public_key!r} is not an Ed25519 key: join the manager again") from error
    if not signed:
        raise BadSignature(
            f"the manifest of version {manifest.version} of job {manifest.job_id} is not signed by this system's "
            "weight store: its weights are not loaded"
        )
