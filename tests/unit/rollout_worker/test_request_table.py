"""The bookkeeping of a batch: dense rows, whatever ends, joins, is aborted or reordered, in whatever order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlboost.services.rollout_worker.domain.request_table import FORCED_TOKENS, NO_TOKEN, RequestTable, SlotMoves
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_RELEASED, FINISH_STOP
from rlboost.shared.wire import I32, pack
from tests.support.engines import request

SLOTS = 5
SAMPLES = st.integers(0, 8)


class Batch(RuleBasedStateMachine):
    """Each sample's n-th token is sample * 100 + n, so that a token in the wrong place shows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RequestTable(SLOTS, 64, vocabulary=100_000)
        self.cached = [-1] * SLOTS
        """Whose keys and values a cache would hold in each slot."""
        self.lengths: dict[int, int] = {}
        self.made: dict[int, list[int]] = {}
        self.n_versions = 0
        self.versions: dict[int, list[int]] = {}
        self.aborted: dict[int, int] = {}
        """How many tokens each aborted sample had by then."""
        self.ended: set[int] = set()
        self.released: dict[int, int] = {}
        """How many tokens each released sample had by then; it owes one last word."""

    @rule(n=st.integers(1, 9))
    def submit(self, n: int) -> None:
        sample = len(self.lengths)
        asked = request(sample, prompt=[1] * (1 + sample % 3), max_tokens=n)
        self.rows.submit([replace(asked, job_id="a" if sample % 2 else "")])
        self.lengths[sample], self.made[sample] = n, []

    @rule(budget=st.integers(1, 20))
    def admit(self, budget: int) -> None:
        for row in self.rows.admit(budget):
            self.cached[row] = self.rows.requests[row].sample

    @rule(aborted_meanwhile=st.none() | SAMPLES, counts=st.lists(st.integers(0, 4), min_size=SLOTS, max_size=SLOTS))
    def decode(self, aborted_meanwhile: int | None, counts: list[int]) -> None:
        """Commit some tokens for each slot; those after its end do not count."""
        rows, width = self.rows, max(counts)
        firsts = [r.sample * 100 + offset for r, offset in zip(rows.requests, rows.offsets.tolist(), strict=True)]
        tokens = np.full((rows.n, width), NO_TOKEN)
        for slot, first in enumerate(firsts):
            tokens[slot, : counts[slot]] = range(first, first + counts[slot])
        if aborted_meanwhile is not None:
            self._abort(aborted_meanwhile)
        logprobs = np.full(tokens.shape, -1.0, np.float32)
        self._move(rows.commit(*((tokens[:, 0], logprobs[:, 0]) if width == 1 else (tokens, logprobs))))

    @rule(sample=SAMPLES)
    def abort(self, sample: int) -> None:
        self._abort(sample)
        self._move(self.rows.remove_aborted())

    @rule(sample=SAMPLES)
    def release(self, sample: int) -> None:
        had = {r.sample: offset for r, offset in zip(self.rows.requests, self.rows.offsets.tolist(), strict=True)}
        had |= {request.sample: 0 for request in self.rows.pending}
        self.rows.release([(sample, 1)])
        if sample in had:
            self.released[sample] = had[sample]
        self._move(self.rows.remove_aborted())

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(self.rows.n)))
        self.rows.reorder(np.array(order, int))
        self.cached[: self.rows.n] = [self.cached[row] for row in order]

    @rule(job_id=st.sampled_from(["", "a"]))
    def begin_version(self, job_id: str) -> None:
        self.n_versions += 1
        self.rows.begin_version(self.n_versions, job_id)

    @rule()
    def take_emissions(self) -> None:
        emissions = self.rows.take_emissions()
        assert len({(emission.sample, emission.version) for emission in emissions}) == len(emissions)
        for emission in emissions:
            sample = emission.sample
            assert sample not in self.ended
            assert emission.offset == len(self.made[sample])
            self.made[sample] += emission.tokens
            self.versions.setdefault(sample, []).append(emission.version)
            if emission.finish == FINISH_RELEASED:
                assert len(self.made[sample]) == self.released[sample]
                self.ended.add(sample)
            elif emission.finish != FINISH_NONE:
                assert (emission.finish, len(self.made[sample])) == (FINISH_LENGTH, self.lengths[sample])
                self.ended.add(sample)

    @invariant()
    def the_cache_holds_what_the_rows_say(self) -> None:
        assert [r.sample for r in self.rows.requests] == self.cached[: self.rows.n]

    @invariant()
    def every_sample_has_its_own_tokens_and_rising_versions(self) -> None:
        for sample, tokens in self.made.items():
            assert tokens == [sample * 100 + i for i in range(len(tokens))]
        assert all(len(self.made[sample]) <= n for sample, n in self.aborted.items())
        assert all(versions == sorted(versions) for versions in self.versions.values())

    def teardown(self) -> None:
        """Let everything finish: no sample is lost."""
        while self.rows.pending or self.rows.n:
            self.admit(budget=20)
            self.decode(aborted_meanwhile=None, counts=[1] * SLOTS)
        self.take_emissions()
        self.every_sample_has_its_own_tokens_and_rising_versions()
        assert self.ended | self.aborted.keys() == self.lengths.keys()
        assert self.released.keys() <= self.ended

    def _abort(self, sample: int) -> None:
        running = {r.sample: offset for r, offset in zip(self.rows.requests, self.rows.offsets.tolist(), strict=True)}
        self.rows.abort([(sample, 1)])
        if sample in self.lengths and sample not in self.ended:
            self.aborted.setdefault(sample, running.get(sample, self.lengths[sample]))

    def _move(self, moves: SlotMoves) -> None:
        for target, source in zip(moves.targets, moves.sources, strict=True):
            self.cached[target] = self.cached[source]


TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_equal_prefixes_count_once_against_the_budget_of_an_admission() -> None:
    rows = RequestTable(SLOTS, 64, vocabulary=10)
    rows.submit([request(sample, prompt=[1] * 20) for sample in range(4)])
    assert rows.admit(budget_tokens=21) == range(4)
    rows = RequestTable(SLOTS, 64, vocabulary=10)
    rows.submit([request(sample, prompt=[sample] * 20) for sample in range(4)])
    assert rows.admit(budget_tokens=21) == range(2)
    assert rows.admit(budget_tokens=1) == range(2, 3)


def test_logprob_that_is_nan_ends_the_request_with_an_error() -> None:
    rows = RequestTable(SLOTS, 64, vocabulary=10)
    rows.submit([request(1), request(2)])
    rows.admit(budget_tokens=100)
    rows.commit(np.array([3, 4]), np.array([-1.0, -2.0], np.float32))
    rows.commit(np.array([3, 4]), np.array([np.nan, -2.0], np.float32))
    bad, good = rows.take_emissions()
    assert (bad.sample, bad.tokens, bad.error) == (1, [3], "the model's output is not a number")
    assert (good.sample, good.tokens, good.error) == (2, [4, 4], "")


def test_tokens_after_the_end_of_a_request_do_not_count() -> None:
    rows = RequestTable(SLOTS, 64, vocabulary=10, options={"top_logprobs"})
    rows.submit([request(1, stop=[7], top_logprobs=1), request(2, max_tokens=2), request(3)])
    ended: list[tuple[int, list[int]]] = []
    rows.on_end = lambda one, completion: ended.append((one.sample, completion.tolist()))
    rows.admit(budget_tokens=100)
    tokens = np.array([[5, 7, 7], [5, 6, 7], [5, 6, NO_TOKEN]])
    logprobs = np.array([[0, 0, np.nan], [0, 0, np.nan], [0, 0, 0]], np.float32)
    moves = rows.commit(tokens, logprobs, {0: b"a", 1: b"b", 2: b"c"})
    assert (moves.targets.tolist(), moves.sources.tolist()) == ([0], [2])
    emissions = [(e.sample, e.tokens, e.finish, e.error, e.top_logprobs) for e in rows.take_emissions()]
    assert emissions == [
        (1, [5, 7], FINISH_STOP, "", b"ab"),
        (2, [5, 6], FINISH_LENGTH, "", b""),
        (3, [5, 6], FINISH_NONE, "", b""),
    ]
    assert ended == [(1, [5, 7]), (2, [5, 6])]
    assert rows.generated_total == 6


def test_slot_without_a_token_in_a_step_is_unchanged() -> None:
    rows = RequestTable(SLOTS, 64, vocabulary=10)
    rows.submit([request(1), request(2, stop=[7, 8])])
    rows.admit(budget_tokens=100)
    rows.commit(np.array([NO_TOKEN, 5]), np.zeros(2, np.float32))
    assert rows.offsets.tolist() == [0, 1]
    assert rows.generated_total == 1
    (emission,) = rows.take_emissions()
    assert (emission.sample, emission.tokens, emission.finish) == (2, [5], FINISH_NONE)


def test_release_after_a_failed_load_reports_a_version_that_a_frame_can_hold() -> None:
    """The worker pulls the weights again meanwhile; a negative version would fail the whole frame."""
    rows = RequestTable(SLOTS, 64, vocabulary=10)
    rows.submit([request(1), request(2)])
    rows.admit(budget_tokens=100)
    rows.commit(np.array([3, 4]), np.zeros(2, np.float32))
    rows.begin_version(-1)
    rows.release([(1, 1)])
    last = rows.take_emissions()[-1]
    assert (last.sample, last.finish, last.version) == (1, FINISH_RELEASED, 0)


@pytest.mark.parametrize("n", [1, 3, 100, 300])
def test_a_pass_scores_no_more_given_tokens_than_its_limit_or_one_of_each_slot(n: int) -> None:
    table = RequestTable(n, 400, vocabulary=10, options={"forced"})
    given = [3] * 390
    table.submit([request(i, prompt=[1], max_tokens=len(given), forced=pack(given, I32)) for i in range(n)])
    table.admit(1 << 30)
    drafts = table.forced_drafts()
    assert drafts is not None
    assert n + sum(map(len, drafts)) == n * max(1, FORCED_TOKENS // n)
