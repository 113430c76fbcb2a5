"""The key pair that signs manifests: a worker can check a manifest, and cannot make one.

The private key is derived from the system's token, so every holder of the token has it and none needs to store it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rlboost.shared.errors import BadSignature, ConfigError

if TYPE_CHECKING:
    from rlboost.shared.weights.manifest import Manifest

_PURPOSE = b"rlboost manifest signing key"


class ManifestKey:
    """Signs what a manifest says, with the key of one system."""

    def __init__(self, token: str) -> None:
        """Derive the key from the system's token."""
        seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=_PURPOSE).derive(token.encode())
        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    def sign(self, statement: bytes) -> str:
        """Return the Ed25519 signature, in hexadecimal."""
        return self._key.sign(statement).hex()

    @property
    def public(self) -> str:
        """Return the public key, in hexadecimal."""
        return self._key.public_key().public_bytes_raw().hex()


def check_manifest(manifest: Manifest, public_key: str) -> None:
    """Check that a holder of the system's token has signed a manifest.

    Raises:
        BadSignature: nobody has.
        ConfigError: the key is malformed.

    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
    except ValueError as error:
        raise ConfigError(f"manifest key {public_key!r} is not an Ed25519 key: join the manager again") from error
    try:
        key.verify(bytes.fromhex(manifest.signature), manifest.statement())
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(
            f"the manifest of version {manifest.version} of job {manifest.job_id} is not signed by this system's "
            "trainer: its weights are not loaded"
        ) from error
