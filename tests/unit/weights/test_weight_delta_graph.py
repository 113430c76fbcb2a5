"""Edge documents, what is believed of them, and the pure rules of the store."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost.services.weight_store.domain.versions import (
    EdgePair,
    is_worthwhile,
    join_hops,
    merge_uploaded,
    outdated,
)
from rlboost.shared.errors import Undecodable
from rlboost.shared.weights.delta_graph import LIST_EDGES, Edge, EdgeList, VersionEdges, lists_of, plan
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef

A, B, C, D = (letter * 64 for letter in "abcd")


def edge(base: str, new: str, n_bytes: int = 100) -> Edge:
    return Edge(new, base, "e" * 64, n_bytes)


def test_edges_survive_encoding() -> None:
    document = VersionEdges(version=3, at=1.5, hops=(EdgeList(base=2, edges=(edge(A, B),)),))
    assert VersionEdges.decode(document.encode()) == document
    assert list(document.edges()) == [edge(A, B)]


def test_many_edges_become_lists_that_fit_into_a_chunk() -> None:
    edges = [Edge(f"{number:064x}", A, B, CHUNK_BYTES) for number in range(LIST_EDGES + 1)]
    lists = lists_of(1 << 60, edges)
    assert max(map(len, lists)) <= CHUNK_BYTES
    assert [len(EdgeList.decode(data).edges) for data in lists] == [LIST_EDGES, 1]
    assert [EdgeList.decode(data).edges for data in lists_of(4, [])] == [()]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"{}", "base"),
        (f'{{"base":1,"edges":[["{A}","{A}","{B}",5]]}}'.encode(), "to itself"),
        (f'{{"base":1,"edges":[["{A}","{B}","{C}",0]]}}'.encode(), "greater than or equal to 1"),
        (f'{{"base":1,"edges":[["{A}","{B}","{C}",{CHUNK_BYTES + 1}]]}}'.encode(), "less than or equal"),
        (f'{{"base":1,"edges":[["{A}","../../etc","{C}",5]]}}'.encode(), "match pattern"),
        (b'{"base":-1,"edges":[]}', "greater than or equal to 0"),
        (b'{"base":1,"edges":[[]]}', "EdgeList"),
        (b"\x80", "EdgeList"),
    ],
)
def test_a_list_that_cannot_be_one_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(Undecodable, match=text):
        EdgeList.decode(data)


def test_version_edges_with_backward_or_too_many_hops_are_refused() -> None:
    with pytest.raises(Undecodable, match="not an older version"):
        VersionEdges.decode(b'{"version":3,"at":0,"hops":[{"base":3,"edges":[]}]}')
    hop = b'{"base":0,"edges":[]}'
    with pytest.raises(Undecodable, match="hops"):
        VersionEdges.decode(b'{"version":3,"at":0,"hops":[' + b",".join([hop] * 17) + b"]}")


JSON = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.sampled_from([A, B, C]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["base", "edges", "x"]), inner),
    max_leaves=20,
)
LISTS = st.fixed_dictionaries({"base": JSON | st.integers(0, 9), "edges": st.lists(JSON | st.lists(JSON, max_size=4))})


@settings(deadline=None)
@given(document=LISTS | JSON, noise=st.binary(max_size=3), at=st.integers(0, 200))
def test_hostile_edges_are_refused_or_planned_safely(document: object, noise: bytes, at: int) -> None:
    data = json.dumps(document).encode()
    data = data[:at] + noise + data[at:]
    try:
        edges = EdgeList.decode(data).edges
    except Undecodable:
        return
    chunk_plans = plan([ChunkRef(A, 1000), ChunkRef(B, 1000)], edges, {C})
    assert all(step.n_bytes <= 1000 for chunk_plan in chunk_plans for step in chunk_plan.path)


@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused_by_their_type_or_are_edges(data: bytes) -> None:
    for kind in (EdgeList, VersionEdges):
        try:
            kind.decode(data)
        except Undecodable:
            continue


def test_merged_uploads_drop_useless_edges() -> None:
    sizes = {B: 1000, D: 100}
    lists = [EdgeList(base=4, edges=(edge(A, B), edge(A, C))), EdgeList(base=4, edges=(edge(A, D, 100),))]
    assert merge_uploaded(5, lists, sizes) == EdgeList(base=4, edges=(edge(A, B),))
    assert merge_uploaded(5, [], sizes) is None


def test_merged_uploads_drop_edges_of_an_older_base() -> None:
    lists = [EdgeList(base=3, edges=(edge(A, B),)), EdgeList(base=4, edges=(edge(C, D),))]
    assert merge_uploaded(5, lists, {B: 1000, D: 1000}) == EdgeList(base=4, edges=(edge(C, D),))


def test_edges_from_the_version_itself_are_refused() -> None:
    with pytest.raises(Undecodable, match="version 5"):
        merge_uploaded(5, [EdgeList(base=5, edges=())], {})


def test_span_composes_meeting_edges_and_copies_unchanged_ones() -> None:
    earlier = EdgeList(base=1, edges=(edge(A, B), edge("1" * 64, "2" * 64), edge("3" * 64, "4" * 64)))
    later = EdgeList(base=2, edges=(edge(B, C), edge("5" * 64, "6" * 64), edge("4" * 64, "3" * 64)))
    found = join_hops(earlier, later, {C, "2" * 64, "6" * 64, "3" * 64})
    assert found.base == 1
    assert found.pairs == (EdgePair(edge(A, B), edge(B, C)),), "what came back to where it was needs no delta"
    assert found.copies == (edge("1" * 64, "2" * 64),)


def test_is_worthwhile_needs_less_than_both_halves_and_half_a_chunk() -> None:
    pair = EdgePair(edge(A, B, 100), edge(B, C, 100))
    assert is_worthwhile(199, pair, 1000)
    assert not is_worthwhile(200, pair, 1000)
    assert not is_worthwhile(199, pair, 300)


def test_outdated_keeps_the_newest_edges_and_those_above_the_head() -> None:
    assert outdated([3, 9, 5, 7, 8], 8, keep=2) == [3, 5]
    assert outdated([3], 8, keep=2) == []
