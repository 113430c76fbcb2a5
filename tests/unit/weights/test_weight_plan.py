"""The cheapest chunk_plan to every chunk, against brute force."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost.shared.weights.delta_graph import FETCH_BYTES, ChunkPlan, Edge, EdgeList, VersionEdges, next_stop, plan
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef


def digest(name: int | str) -> str:
    return str(name).rjust(64, "0")


def edge(base: int | str, new: int | str, n_bytes: int) -> Edge:
    return Edge(digest(new), digest(base), digest(f"de17a{base}{new}"), n_bytes)


def chunk(name: int | str, n_bytes: int = CHUNK_BYTES) -> ChunkRef:
    return ChunkRef(digest(name), n_bytes)


def chunk_plan(wanted: ChunkRef, edges: list[Edge], *held: int | str) -> ChunkPlan:
    return plan([wanted], edges, {digest(name) for name in held})[0]


def test_plan_of_a_held_chunk_costs_nothing() -> None:
    assert chunk_plan(chunk("a"), [edge("b", "a", 10)], "a", "b") == ChunkPlan(chunk("a"), held=True)
    assert chunk_plan(chunk("a"), [], "a").n_bytes == 0


def test_plan_of_an_unreachable_chunk_fetches_it_whole() -> None:
    assert chunk_plan(chunk("a"), [edge("b", "a", 10)], "c") == ChunkPlan(chunk("a"))
    assert chunk_plan(chunk("a"), [edge("b", "a", 10)]).n_bytes == CHUNK_BYTES


def test_plan_uses_a_delta_from_a_held_chunk() -> None:
    assert chunk_plan(chunk("a"), [edge("b", "a", 10)], "b") == ChunkPlan(chunk("a"), path=(edge("b", "a", 10),))


def test_a_chain_and_a_longer_hop_are_compared_by_bytes() -> None:
    chain = [edge("a", "b", 1000), edge("b", "c", 1000)]
    assert chunk_plan(chunk("c"), [*chain, edge("a", "c", 2400)], "a").path == (edge("a", "c", 2400),)
    assert chunk_plan(chunk("c"), [*chain, edge("a", "c", 1000 + 1000 + FETCH_BYTES + 1)], "a").path == tuple(chain)


def test_deltas_larger_than_the_chunk_are_not_used() -> None:
    assert chunk_plan(chunk("c", 1500), [edge("a", "b", 1000), edge("b", "c", 1000)], "a") == ChunkPlan(
        chunk("c", 1500)
    )


def test_plan_ignores_cycles_self_loops_and_dangling_edges() -> None:
    edges = [edge("a", "b", 1), edge("b", "a", 1), edge("b", "b", 1), edge("b", "x", 1), edge("b", "c", 1)]
    assert chunk_plan(chunk("c"), edges, "a").path == (edge("a", "b", 1), edge("b", "c", 1))


def test_a_plan_adds_up() -> None:
    found = plan([chunk("b"), chunk("c", 700), chunk("d")], [edge("a", "b", 10)], {digest("a"), digest("d")})
    assert sum(chunk_plan.n_bytes for chunk_plan in found) == 10 + 700


NODES = st.integers(0, 5)
EDGES = st.lists(st.builds(edge, NODES, NODES, st.integers(1, 4000)), max_size=12)


def paths(target: str, edges: list[Edge], held: set[str], seen: frozenset[str]) -> Iterator[int]:
    """Yield what every simple path from a held chunk to `target` costs."""
    for step in edges:
        if step.new == target and step.base not in seen:
            cost = step.n_bytes + FETCH_BYTES
            if step.base in held:
                yield cost
            else:
                yield from (cost + rest for rest in paths(step.base, edges, held, seen | {step.base}))


@settings(deadline=None)
@given(edges=EDGES, held=st.sets(NODES.map(digest)), wanted=NODES, n_bytes=st.integers(1, 9000))
def test_no_path_is_cheaper_than_the_plan(edges: list[Edge], held: set[str], wanted: int, n_bytes: int) -> None:
    target = chunk(wanted, n_bytes)
    found = plan([target], edges, held)[0]
    if target.digest in held:
        assert found.held
        return
    dense = n_bytes + FETCH_BYTES
    best = min([dense, *paths(target.digest, edges, held, frozenset({target.digest}))])
    cost = found.n_bytes + FETCH_BYTES * max(len(found.path), 1)
    assert cost == best
    at = found.path[0].base if found.path else None
    assert at is None or at in held
    for step in found.path:
        assert step.base == at
        at = step.new
    assert at in (None, target.digest)


def document(version: int, *bases: int) -> VersionEdges:
    return VersionEdges(version=version, at=0.0, hops=tuple(EdgeList(base=base, edges=()) for base in bases))


def test_next_stop_is_the_longest_hop_that_does_not_overshoot() -> None:
    stops, at = [], 107
    while (stop := next_stop(document(at, at - 1, at - 2, at - 4, at - 8), have=80)) is not None:
        stops.append(stop)
        at = stop
    assert stops == [99, 91, 83, 81]


def test_next_stop_is_none_without_a_nearer_version() -> None:
    assert next_stop(document(7), have=3) is None
    assert next_stop(document(7, 2), have=3) is None
    assert next_stop(document(7, 6, 5, 3), have=3) is None
