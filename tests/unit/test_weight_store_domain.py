"""Commit, pins, retention and garbage, as pure rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.weight_store.domain.garbage import garbage
from services.weight_store.domain.versions import Model, Version, check_commit, commit, forget_retired, pin, unpin
from shared.errors import Conflict, NotFound


def version(number: int) -> Version:
    return Version(number, f"digest {number}", 100, float(number))


def with_versions(*numbers: int, keep: int = 3) -> Model:
    model = Model("job-1")
    for number in numbers:
        model = commit(model, version(number), keep=keep)
    return model


def numbers(model: Model) -> list[int]:
    return [known.version for known in model.versions]


def test_the_first_commit_expects_no_head() -> None:
    assert Model("job-1").head == -1
    check_commit(Model("job-1"), 0, expect=-1)


@pytest.mark.parametrize(("number", "expect"), [(5, 3), (5, 5), (5, -1)])
def test_a_commit_that_expects_another_head_loses(number: int, expect: int) -> None:
    with pytest.raises(Conflict, match=rf"the head of job job-1 is 4, not {expect}"):
        check_commit(with_versions(3, 4), number, expect)


@pytest.mark.parametrize("number", [0, 4])
def test_a_version_is_above_the_head(number: int) -> None:
    with pytest.raises(Conflict, match=f"version {number} of job job-1 is not above the head 4"):
        check_commit(with_versions(3, 4), number, expect=4)


def test_the_newest_versions_stay_and_the_others_are_retired() -> None:
    model = with_versions(0, 1, 2, 3, 4)
    assert numbers(model) == [2, 3, 4]
    assert [known.version for known in model.retired] == [0, 1]
    assert forget_retired(model, (version(0),)).retired == (version(1),)


def test_a_pinned_version_stays_until_it_is_unpinned() -> None:
    model = pin(with_versions(0, 1), 0)
    for number in (2, 3, 4):
        model = commit(model, version(number), keep=3)
    assert numbers(model) == [0, 2, 3, 4]
    assert numbers(unpin(model, 0, keep=3)) == [2, 3, 4]


def test_what_is_not_kept_cannot_be_pinned() -> None:
    with pytest.raises(NotFound):
        pin(with_versions(0, 1, 2, 3), 0)


@given(st.lists(st.tuples(st.sampled_from(["commit", "pin", "unpin"]), st.integers(0, 20))), st.integers(1, 4))
def test_the_newest_and_the_pinned_are_always_there(steps: list[tuple[str, int]], keep: int) -> None:
    model = Model("job-1")
    for action, number in steps:
        if action == "commit" and number > model.head:
            model = commit(model, version(number), keep=keep)
        elif action == "pin" and model.find(number):
            model = pin(model, number)
        elif action == "unpin":
            model = unpin(model, number, keep=keep)
        known = {*model.versions, *model.retired}
        assert len(known) == len(model.versions) + len(model.retired), "a version is visible or retired, not both"
        assert numbers(model) == sorted(numbers(model))
        assert model.pins <= set(numbers(model))
        newest = sorted(known, key=lambda one: one.version)[-keep:]
        assert set(newest) <= set(model.versions)
        assert set(numbers(model)) == model.pins | {one.version for one in newest}


def test_an_unreferenced_chunk_waits_for_the_grace() -> None:
    used = {"referenced": 0.0, "old": 39.0, "young": 40.0}
    assert garbage(used, {"referenced"}, {}, now=100.0, grace_s=60.0) == {"old": 39.0}


def test_a_chunk_of_a_retired_version_goes_at_once_unless_somebody_asked_for_it_since() -> None:
    used = {"untouched": 90.0, "asked for": 95.0, "shared with the head": 90.0}
    retired = dict.fromkeys(used, 90.0)
    found = garbage(used, {"shared with the head"}, retired, now=100.0, grace_s=60.0)
    assert found == {"untouched": 90.0}
