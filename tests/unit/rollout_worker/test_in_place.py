"""Changed words are written into slices of an engine's memory, whatever their layout."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402 - only where torch is
from hypothesis import strategies as st  # noqa: E402

from rlboost.shared.weights.changed_words import Placement, Words, is_slice, write_words  # noqa: E402

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def sliced(data: st.DataObject, shape: tuple[int, ...]) -> Any:
    """Draw an index of a rectangular slice, in some dimensions of one element without the dimension."""
    index = []
    for size in shape:
        low = data.draw(st.integers(0, size - 1))
        high = data.draw(st.integers(low + 1, size))
        index.append(data.draw(st.sampled_from([slice(low, high), low])))
    return tuple(index)


def changed(old: Any, new: Any) -> Words:
    positions = (old.view(-1) != new.view(-1)).nonzero().view(-1)
    return Words("w", positions, old.view(-1)[positions], new.view(-1)[positions])


@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=SHAPES, wider=st.booleans())
def test_slice_in_memory_becomes_that_of_the_new_tensor(data: Any, shape: tuple[int, ...], wider: bool) -> None:
    old = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).bfloat16().view(shape)
    new = torch.where(torch.rand(shape) < 0.5, old, -old)
    index, source = sliced(data, shape), torch.empty(shape, device="meta")
    part, expected, source = old[index], new[index], source[index]
    if part.ndim > 1 and data.draw(st.booleans()):
        part, expected, source = part.transpose(0, -1), expected.transpose(0, -1), source.transpose(0, -1)
    padding = torch.full((*part.shape[:-1], part.shape[-1] + 2) if part.ndim else (3,), 99.0)
    memory = padding.float() if wider else padding.bfloat16()
    target = memory[..., 1:-1] if part.ndim else memory[1]
    target.copy_(part)
    assert is_slice(source, shape)
    assert write_words({"w": [Placement(target, source)]}, [changed(old, new)]) == ""
    assert target.equal(expected.to(memory.dtype))
    if part.ndim:
        assert memory[..., 0].eq(99).all()
        assert memory[..., -1].eq(99).all()


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda whole: whole, True),
        (lambda whole: whole[1:3, :, 2], True),
        (lambda whole: whole.view(8, 3), False),
        (lambda whole: whole[::2], False),
        (lambda whole: whole.view(2, 2, 2, 3), False),
        (lambda whole: whole[0, 0].expand(4, 3), False),
        (lambda whole: whole[:0], True),
    ],
)
def test_slices_are_told_from_other_views(view: Any, expected: bool) -> None:
    assert is_slice(view(torch.empty(4, 2, 3, device="meta")), (4, 2, 3)) is expected


def test_old_words_that_memory_does_not_hold_are_an_error() -> None:
    old, new = torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 2.0])
    memory = torch.tensor([0.0, -0.0, 0.0, 0.0])
    why = write_words({"w": [Placement.whole(memory)]}, [changed(old, new)])
    assert why == "w in the engine's memory is not the tensor that was loaded"


def test_unknown_tensor_is_an_error_and_one_of_other_ranks_is_not() -> None:
    words = changed(torch.zeros(2), torch.ones(2))
    assert write_words({"w": []}, [words]) == ""
    memory = torch.zeros(3)
    nothing = Placement(memory[1:1], torch.empty(2, device="meta")[1:1])
    assert write_words({"w": [nothing]}, [words]) == ""
    assert memory.eq(0).all()
    assert write_words({}, [words]) == "w has no known place in the engine's memory"
