"""Manifests are signed with a key that only holders of the system's token have."""

from __future__ import annotations

import pytest

from rlboost.shared.errors import BadSignature, ConfigError
from rlboost.shared.weights.access import IssuedAccess, ManifestKey, check_manifest
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, TensorEntry, digest_of

KEY = ManifestKey("token")
A, B = digest_of(b"a"), digest_of(b"b")


def part(chunk: str) -> Part:
    entry = TensorEntry(
        name="w", dtype="uint8", global_shape=(4,), offset=(0,), local_shape=(4,), start=0, n_bytes=4, digest=A
    )
    return Part(rank=0, chunks=(ChunkRef(chunk, 4),), tensors=(entry,))


UNSIGNED = Manifest(job_id="job", version=3, config_json="{}", parts=(part(A),), parity_json="[]")
SIGNED = UNSIGNED.model_copy(update={"signature": KEY.sign(UNSIGNED.statement())})


def test_signed_manifest_is_accepted_after_a_round_trip() -> None:
    check_manifest(Manifest.decode(SIGNED.encode()), KEY.public)


def test_key_depends_on_the_token_alone() -> None:
    assert ManifestKey("token").public == KEY.public
    assert len(bytes.fromhex(KEY.public)) == 32
    assert ManifestKey("another").public != KEY.public


@pytest.mark.parametrize(
    "change",
    [
        {"signature": ""},
        {"signature": "zz"},
        {"signature": "00" * 64},
        {"signature": ManifestKey("another").sign(UNSIGNED.statement())},
        {"job_id": "another"},
        {"version": 4},
        {"config_json": '{"a": 1}'},
        {"parts": (part(B),)},
        {"parity_json": ""},
        {"base_version": 1},
        {"adapter_json": "{}"},
    ],
)
def test_changed_manifest_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadSignature, match="not signed by this system's weight store"):
        check_manifest(SIGNED.model_copy(update=change), KEY.public)


def test_malformed_public_key_is_a_setting_error() -> None:
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        check_manifest(SIGNED, "00")


def test_client_refuses_the_manifest_of_another_version() -> None:
    client = StoreClient("http://store", IssuedAccess("credential", KEY.public))
    assert client._verified(SIGNED.encode(), "job", 3) == SIGNED
    for job_id, version in (("job", 4), ("another", 3)):
        with pytest.raises(BadSignature, match="that of version 3 of job job"):
            client._verified(SIGNED.encode(), job_id, version)
