"""The shape of a KV cache: within its memory, and large enough for whatever was let in."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from rlboost.services.rollout_worker.domain.load import QUANTUM, KvCapacity
from rlboost.services.rollout_worker.domain.request_table import RequestTable
from rlboost.shared.messages import FINISH_NONE
from tests.support.engines import request

SLOTS = 8


@given(
    tokens=st.integers(QUANTUM, 4000),
    max_len=st.integers(1, 500),
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=SLOTS),
)
def test_shape_of_fitting_rows_stays_within_the_capacity(tokens: int, max_len: int, lengths: list[int]) -> None:
    capacity, longest = KvCapacity(SLOTS, max_len, tokens), max(lengths)
    assume(longest <= max_len and capacity.fits(len(lengths), longest))
    rows, columns = capacity.shape(len(lengths), longest)
    assert len(lengths) <= rows <= SLOTS
    assert longest <= columns
    assert columns % QUANTUM == 0
    assert rows * columns <= tokens


def test_a_long_row_takes_the_place_of_several_short_ones() -> None:
    capacity = KvCapacity(SLOTS, max_len=512, tokens=256)
    assert capacity.fits(8, 32)
    assert not capacity.fits(8, 33)
    assert capacity.fits(2, 128)
    assert capacity.fits(1, 256)
    assert not capacity.fits(1, 257)


def test_a_cache_has_columns_to_spare_only_where_that_costs_no_row() -> None:
    capacity = KvCapacity(SLOTS, max_len=512, tokens=256)
    assert capacity.shape(1, 20) == (4, 64)
    assert capacity.shape(6, 20) == (8, 32)
    assert capacity.shape(1, 250) == (1, 256)


def cramped(tokens: int) -> RequestTable:
    return RequestTable(SLOTS, 512, 100, KvCapacity(SLOTS, 512, tokens))


def test_requests_are_admitted_in_order() -> None:
    """A long request is not overtaken by short ones that would fit."""
    rows = cramped(tokens=96)
    long, *short = [
        request(1, prompt=[1], max_tokens=95),
        *(request(i, prompt=[1], max_tokens=15) for i in range(2, 6)),
    ]
    rows.submit([short[0], long, *short[1:]])
    assert rows.admit(1000) == range(1)
    assert [one.sample for one in rows.pending] == [1, 3, 4, 5], (
        "those behind would fit, and would keep it out for ever"
    )
    rows.abort([(2, 1)])
    rows.remove_aborted()
    assert rows.admit(1000) == range(1)
    assert rows.requests == [long]
    rows.abort([(1, 1)])
    rows.remove_aborted()
    assert rows.admit(1000) == range(3)


def test_row_counts_with_its_final_length() -> None:
    rows = cramped(tokens=96)
    rows.submit([request(1, prompt=[1], tokens=[2] * 40, max_tokens=47), request(2, prompt=[1] * 40, max_tokens=9)])
    assert rows.admit(1000) == range(1)
    assert (rows.n, len(rows.pending)) == (1, 1)


def test_request_that_never_fits_is_refused_without_blocking_others() -> None:
    rows = cramped(tokens=96)
    rows.submit([request(1, prompt=[1], max_tokens=40), request(2, prompt=[1] * 10, max_tokens=87), request(3)])
    assert rows.admit(1000) == range(2)
    (refused,) = rows.take_emissions()
    assert (refused.sample, refused.tokens, refused.finish) == (2, [], FINISH_NONE)
    assert all(part in refused.error for part in ("97 tokens", "96", "RLBOOST_WORKER_KV_CACHE_BYTES"))
    assert "RLBOOST_WORKER_KV_CACHE_BYTES" in refused.error


def test_max_request_tokens_is_the_length_above_which_no_sample_fits() -> None:
    assert KvCapacity(SLOTS, max_len=512, tokens=256).max_request_tokens == 256
    assert KvCapacity(SLOTS, max_len=256, tokens=256).max_request_tokens == 0, "every length fits"
    capacity = KvCapacity(SLOTS, max_len=512, tokens=250)
    assert capacity.fits(1, capacity.max_request_tokens)
    assert not capacity.fits(1, capacity.max_request_tokens + 1)
