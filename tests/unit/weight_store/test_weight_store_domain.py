"""Commit, pins, retention and garbage, as pure rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.weight_store.domain.versions import (
    JobVersions,
    Version,
    check_commit,
    commit,
    forget_retired,
    garbage,
    parse_range,
    pin,
    unpin,
)
from rlboost.shared.errors import Conflict, NotFound


def version(number: int, base: int | None = None) -> Version:
    return Version(number, f"digest {number}", 100, float(number), base)


def with_versions(*numbers: int, keep: int = 3) -> JobVersions:
    model = JobVersions("job-1")
    for number in numbers:
        model = commit(model, version(number), keep=keep)
    return model


def numbers(model: JobVersions) -> list[int]:
    return [known.version for known in model.versions]


def test_the_first_commit_expects_no_head() -> None:
    assert JobVersions("job-1").head == -1
    check_commit(JobVersions("job-1"), 0, expect=-1)


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


def test_the_base_of_an_adapter_stays_as_long_as_the_adapter() -> None:
    model = with_versions(0)
    for number in (1, 2, 3):
        check_commit(model, number, number - 1, base=0)
        model = commit(model, version(number, base=0), keep=1)
        assert numbers(model) == [0, number]
    model = unpin(pin(model, 0), 0, keep=1)
    assert numbers(model) == [0, 3], "a pin more or less changes nothing"
    assert numbers(commit(model, version(4), keep=1)) == [4]


@pytest.mark.parametrize("base", [0, 2, 4])
def test_a_base_is_a_whole_model_that_is_kept(base: int) -> None:
    model = commit(with_versions(0, 1, keep=1), version(2, base=1), keep=2)
    with pytest.raises(Conflict, match=f"version 5 of job job-1: its base {base} is not"):
        check_commit(model, 5, 2, base=base)


def test_pin_of_an_unknown_version_is_refused() -> None:
    with pytest.raises(NotFound):
        pin(with_versions(0, 1, 2, 3), 0)


@given(st.lists(st.tuples(st.sampled_from(["commit", "adapt", "pin", "unpin"]), st.integers(0, 20))), st.integers(1, 4))
def test_the_newest_and_the_pinned_are_always_there(steps: list[tuple[str, int]], keep: int) -> None:
    model = JobVersions("job-1")
    for action, number in steps:
        if action == "commit" and number > model.head:
            model = commit(model, version(number), keep=keep)
        elif action == "adapt" and number > model.head and (bases := _whole(model)):
            model = commit(model, version(number, bases[number % len(bases)]), keep=keep)
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
        wanted = model.pins | {one.version for one in newest}
        needed = {one.base for one in model.versions if one.version in wanted and one.base is not None}
        assert set(numbers(model)) == wanted | needed


def _whole(model: JobVersions) -> list[int]:
    return [known.version for known in model.versions if known.base is None]


def test_an_unreferenced_chunk_waits_for_the_grace() -> None:
    used = {"referenced": 0.0, "old": 39.0, "young": 40.0}
    assert garbage(used, {"referenced"}, {}, now=100.0, grace_s=60.0) == {"old": 39.0}


def test_garbage_of_a_retired_version_is_removed_unless_used_since() -> None:
    used = {"untouched": 90.0, "asked for": 95.0, "shared with the head": 90.0}
    retired = dict.fromkeys(used, 90.0)
    found = garbage(used, {"shared with the head"}, retired, now=100.0, grace_s=60.0)
    assert found == {"untouched": 90.0}


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (None, range(10)),
        ("bytes=0-", range(10)),
        ("bytes=4-", range(4, 10)),
        ("bytes=4-4", range(4, 5)),
        ("bytes=4-100", range(4, 10)),
        ("bytes=10-", None),
        ("bytes=99999999999999999999-", range(10)),
        # What is not understood, or no range, asks for the whole.
        ("bytes=5-4", range(10)),
        ("bytes=-3", range(10)),
        ("bytes=0-1,3-4", range(10)),
        ("lines=1-2", range(10)),
        ("", range(10)),
    ],
)
def test_parse_range_returns_the_range_or_the_whole(header: str | None, wanted: range | None) -> None:
    assert parse_range(header, 10) == wanted


def test_parse_range_of_an_empty_chunk_is_empty_or_none() -> None:
    assert parse_range(None, 0) == range(0)
    assert parse_range("bytes=0-", 0) is None
