"""Manipulated weight documents: refused with a typed error, or harmless."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost.shared.errors import Undecodable
from rlboost.shared.weights.delta_graph import Edge, EdgeList, VersionEdges
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, Document, Manifest, Part, TensorEntry, digest_of
from rlboost.shared.weights.peers.directory import Peer

A, B, C = (digest_of(letter) for letter in (b"a", b"b", b"c"))
ENTRY = TensorEntry(
    name="w", dtype="bfloat16", global_shape=(4, 2), offset=(0, 0), local_shape=(4, 2), start=0, n_bytes=16, digest=A
)
PART = Part(rank=0, chunks=(ChunkRef(B, 16),), tensors=(ENTRY,))
MANIFEST = Manifest(job_id="job", version=3, config_json="{}", parts=(PART,))
HOP = EdgeList(base=2, edges=(Edge(A, B, C, 7),))
DOCUMENTS: list[Document] = [PART, MANIFEST, HOP, VersionEdges(version=3, at=1.0, hops=(HOP,))]

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["", "../../etc/passwd", "/", "a/b", "\x00", "job\n", A.upper(), A[:-1], A + "0", "é" * 64]),
    st.lists(st.integers(-1, 2**64), max_size=40),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], odd)
    return copy


@settings(max_examples=400)
@given(st.data())
def test_an_odd_value_anywhere_is_refused_or_harmless(data: st.DataObject) -> None:
    document = data.draw(st.sampled_from(DOCUMENTS))
    plain = json.loads(document.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places(plain)))
        plain = put(plain, place, data.draw(ODD))
    encoded = json.dumps(plain).encode()
    try:
        decoded = type(document).decode(encoded)
    except Undecodable:
        return
    assert type(document).decode(decoded.encode()) == decoded
    if isinstance(decoded, Manifest):
        assert "/" not in decoded.job_id
        assert all(0 < chunk.n_bytes <= CHUNK_BYTES for chunk in decoded.chunks())


@given(st.binary(max_size=200))
def test_bytes_that_are_no_document_are_refused(junk: bytes) -> None:
    for document in DOCUMENTS:
        with pytest.raises(Undecodable):
            type(document).decode(junk)


@given(st.data())
def test_a_document_cut_off_is_refused(data: st.DataObject) -> None:
    document = data.draw(st.sampled_from(DOCUMENTS))
    encoded = document.encode()
    with pytest.raises(Undecodable):
        type(document).decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_tensor_with_too_many_shards_is_refused() -> None:
    shards = tuple(
        ENTRY.model_copy(
            update={"global_shape": (10_000,), "offset": (row,), "local_shape": (1,), "start": 2 * row, "n_bytes": 2}
        )
        for row in range(10_000)
    )
    part = Part(rank=0, chunks=(ChunkRef(B, 20_000),), tensors=shards)
    plain = json.loads(MANIFEST.encode()) | {"parts": [json.loads(part.encode())]}
    with pytest.raises(Undecodable, match="10000 shards"):
        Manifest.decode(json.dumps(plain).encode())


@pytest.mark.parametrize("url", ["http://a/b", "file:///etc/passwd", "http://a b", "http://a?x", "", "ftp://a"])
def test_peer_with_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        Peer(name="p", url=url, host="h")
