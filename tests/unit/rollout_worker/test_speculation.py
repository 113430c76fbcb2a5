"""Drafts are what followed the longest known context, and are made only where they are expected to save time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_worker.domain import speculation
from rlboost.services.rollout_worker.domain.request_table import RequestTable
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.domain.speculation import Drafter, Drafts, PassTimes, SuffixAutomaton
from tests.support.engines import FreePasses, request

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)

# --- the automaton ----------------------------------------------------------------------------------------------------


def learn(sequences: list[list[int]]) -> tuple[SuffixAutomaton, list[int]]:
    """Return the automaton of sequences that have grown in turns, and the state of each."""
    automaton, states = SuffixAutomaton(), [0] * len(sequences)
    for at in range(max(map(len, sequences), default=0)):
        for i, sequence in enumerate(sequences):
            states[i] = automaton.extend(states[i], sequence[at : at + 1])
    return automaton, states


def continuations(sequences: list[list[int]], context: list[int]) -> Counter[int]:
    """Return how often each token follows a context."""
    n = len(context)
    return Counter(s[i + n] for s in sequences for i in range(len(s) - n) if s[i : i + n] == context)


@given(SEQUENCES)
def test_draft_is_what_follows_the_longest_known_context_most_often(sequences: list[list[int]]) -> None:
    automaton, states = learn(sequences)
    for sequence, state in zip(sequences, states, strict=True):
        tokens, chances = automaton.draft(state, 1, 0.0)
        lengths = [n for n in range(1, len(sequence) + 1) if continuations(sequences, sequence[-n:])]
        if not lengths:
            assert tokens == []
            continue
        seen = continuations(sequences, sequence[-max(lengths) :])
        assert seen[tokens[0]] == max(seen.values())
        assert chances[0] == pytest.approx(max(seen.values()) / (seen.total() + 1 / max(lengths)))


@given(SEQUENCES, st.integers(0, 6), st.floats(0, 1))
def test_draft_is_known_text_within_its_limits(sequences: list[list[int]], most: int, least: float) -> None:
    automaton, states = learn(sequences)
    for sequence, state in zip(sequences, states, strict=True):
        tokens, chances = automaton.draft(state, most, least)
        assert len(tokens) == len(chances) <= most
        assert chances == sorted(chances, reverse=True)
        assert all(least <= chance <= 1 for chance in chances)
        for at, token in enumerate(tokens):
            last = [*sequence, *tokens[:at]][-1:]
            assert continuations(sequences, last)[token], "each token has followed the one before it"


@given(SEQUENCES)
def test_order_of_learning_does_not_matter(sequences: list[list[int]]) -> None:
    automaton = SuffixAutomaton()
    states = [automaton.extend(0, sequence) for sequence in sequences]
    other, others = learn(sequences)
    for state, its in zip(states, others, strict=True):
        assert automaton.draft(state, 1, 0.0)[1] == other.draft(its, 1, 0.0)[1]


@given(SEQUENCES)
def test_automaton_has_at_most_two_states_per_token(sequences: list[list[int]]) -> None:
    automaton, _ = learn(sequences)
    assert len(automaton) <= 2 * sum(map(len, sequences)) + 1


def test_sequence_of_one_token_is_learned_in_linear_steps() -> None:
    automaton = SuffixAutomaton()
    state = automaton.extend(0, [7] * 20_000)  # minutes, if each counted all its suffixes
    assert automaton.draft(state, 3, 0.0)[0] == [7, 7, 7]


# --- when drafts pay --------------------------------------------------------------------------------------------------


def measured(fixed_s: float, token_s: float, verify_s: float = 0.0) -> PassTimes:
    times = PassTimes()
    for n in range(1, 17):
        times.observe(fixed_s + token_s * n, n, 0)
        times.observe(fixed_s + token_s * (n + 3 * n % 11 + 1) + verify_s, n, 3 * n % 11 + 1)
    return times


def test_pass_times_are_those_of_the_engine() -> None:
    times = measured(0.010, 0.0002, 0.001)
    assert (times.fixed_s, times.token_s, times.verify_s) == pytest.approx((0.010, 0.0002, 0.001), rel=0.05)
    assert times.least_chance(50) == pytest.approx(0.5, abs=0.02), "half of the pass is for the tokens of the batch"
    assert times.least_chance(1) < 0.03


def test_drafts_cost_nothing_before_both_kinds_of_passes_were_measured() -> None:
    times = PassTimes()
    for n in range(1, 17):
        times.observe(0.01 * n, n, 0)
    assert not times.known
    assert times.least_chance(16) == 0.0
    assert times.pays(16, 0.1, 100)


def test_drafts_pay_while_the_saved_passes_take_longer_than_the_drafted_tokens() -> None:
    times = measured(0.010, 0.001)
    assert times.pays(1, accepted=1.0, drafted=4)
    assert not times.pays(1, accepted=1.0, drafted=16)
    assert not times.pays(64, accepted=64, drafted=256), "a large batch is bound by computing"
    assert not measured(0.010, 0.001, verify_s=0.012).pays(1, accepted=1.0, drafted=1)


def test_pass_that_was_delayed_hardly_changes_the_times() -> None:
    times = measured(0.010, 0.0002)
    times.observe(60.0, 8, 4)
    assert times.fixed_s < 0.03
    for n in range(1, 40):
        times.observe(0.010 + 0.0002 * n, n, 0)
        times.observe(0.010 + 0.0002 * (n + 4), n, 4)
    assert times.pays(4, accepted=4, drafted=16)


def test_pass_times_follow_an_engine_that_has_become_slower_or_faster() -> None:
    times = measured(0.010, 0.0002, 0.001)
    for factor in (3.0, 0.5):
        for n in (1, 2, 3, 5, 8, 13, 16) * 20:
            times.observe(factor * (0.010 + 0.0002 * n), n, 0)
            times.observe(factor * (0.011 + 0.0002 * 3 * n), n, 2 * n)
        expected = factor * 0.010, factor * 0.0002, factor * 0.001
        assert (times.fixed_s, times.token_s, times.verify_s) == pytest.approx(expected, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 64), st.integers(0, 300)), max_size=40))
def test_any_measurements_give_usable_times(passes: list[tuple[float, int, int]]) -> None:
    times = PassTimes()
    for seconds, n, drafted in passes:
        times.observe(seconds, n, drafted)
        assert min(times.fixed_s, times.token_s, times.verify_s) >= 0
        assert 0 <= times.least_chance(n) <= 1
        times.pays(n, 1.0, 4)


# --- the drafter ------------------------------------------------------------------------------------------------------

PROMPT = [3, 1, 4]
TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]


class Rig:
    """A drafter with a table whose requests get given tokens."""

    def __init__(self, drafter: Drafter, slots: int = 8) -> None:
        self.drafter = drafter
        self.table = RequestTable(slots, 200_000, vocabulary=1000, options={"grammar"})
        self.table.on_end = drafter.on_end
        self.table.begin_version(0)

    def start(self, *requests: Request) -> None:
        self.table.submit(requests)
        for one in requests:
            self.table.set_grammar(one.key, _Any())
        self.table.admit(1 << 30)

    def generate(self, tokens: list[int]) -> None:
        """Append tokens to each running request."""
        for token in tokens:
            n = self.table.n
            self.table.commit(np.full(n, token), np.zeros(n, np.float32))

    def drafts(self) -> list[list[int]]:
        found = self.drafter.drafts(self.table)
        return found.tokens if found else []


class _Any:
    """A grammar of everything."""

    def accept(self, tokens: object) -> bool:
        return True

    def allowed(self) -> np.ndarray:
        return np.ones(1000, bool)


@pytest.fixture
def rig() -> Rig:
    return Rig(Drafter(64, FreePasses()))


def test_running_sibling_is_a_draft(rig: Rig) -> None:
    rig.start(request(1, prompt=PROMPT, max_tokens=30, tokens=TEXT), request(2, prompt=PROMPT, max_tokens=30))
    assert rig.drafts()[1] == TEXT[:8]


def test_ended_sibling_is_a_draft_and_its_prompts_only(rig: Rig) -> None:
    rig.start(request(1, prompt=PROMPT, max_tokens=len(TEXT)))
    rig.generate(TEXT)
    assert rig.table.n == 0
    rig.start(request(2, prompt=PROMPT, max_tokens=30), request(3, prompt=[5, 6], max_tokens=30))
    assert rig.drafts() == [TEXT[:8], []]
    rig.generate(TEXT[:2])
    assert rig.drafts() == [TEXT[2:10], []]


def test_sibling_that_ends_between_two_passes_is_known_whole(rig: Rig) -> None:
    rig.start(request(1, prompt=PROMPT, max_tokens=len(TEXT)), request(2, prompt=PROMPT, max_tokens=30))
    rig.drafts()
    rig.generate(TEXT)
    rig.start(request(3, prompt=PROMPT, max_tokens=30, tokens=TEXT[:6]))
    assert rig.drafts()[1][:6] == TEXT[6:]


def test_hint_is_a_draft_of_samples_before_and_after_it(rig: Rig) -> None:
    rig.start(request(1, prompt=PROMPT, max_tokens=30))
    assert rig.drafts() == []
    rig.drafter.hint(PROMPT, TEXT)
    assert rig.drafts() == [TEXT[:8]]
    rig.start(request(2, prompt=PROMPT, max_tokens=30))
    assert rig.drafts() == [TEXT[:8], TEXT[:8]]


def test_draft_leaves_room_for_one_token_after_it(rig: Rig) -> None:
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(*(request(n, prompt=PROMPT, max_tokens=n) for n in range(1, 5)))
    assert rig.drafts() == [[], TEXT[:1], TEXT[:2], TEXT[:3]]


def test_draft_ends_before_a_stop_token(rig: Rig) -> None:
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(request(1, prompt=PROMPT, max_tokens=30, stop=[TEXT[3]]))
    assert rig.drafts() == [TEXT[:3]]


def test_draft_ends_before_a_token_that_the_model_does_not_have(rig: Rig) -> None:
    rig.drafter.hint(PROMPT, [*TEXT[:2], 1000, *TEXT[2:]])
    rig.drafter.hint([9], [-5, *TEXT])
    rig.start(request(1, prompt=PROMPT, max_tokens=30), request(2, prompt=[9], max_tokens=30))
    assert rig.drafts() == [TEXT[:2], []]


def test_sample_with_a_grammar_has_no_draft(rig: Rig) -> None:
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(
        request(1, prompt=PROMPT, max_tokens=30, grammar='{"type": "object"}'), request(2, prompt=PROMPT, max_tokens=30)
    )
    assert rig.drafts() == [[], TEXT[:8]]


@pytest.mark.parametrize(("max_tokens", "lengths"), [(6, []), (7, [0, 0, 0, 0, 0, 1]), (24, [3] * 6), (64, [8] * 6)])
def test_pass_has_at_most_its_tokens(max_tokens: int, lengths: list[int]) -> None:
    rig = Rig(Drafter(max_tokens, FreePasses()))
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(*(request(n, prompt=PROMPT, max_tokens=30) for n in range(6)))
    assert [len(draft) for draft in rig.drafts()] == lengths


def test_sample_whose_drafts_are_rejected_gets_shorter_ones_and_recovers() -> None:
    times = measured(0.010, 0.001)
    rig = Rig(Drafter(64, times))
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(request(1, prompt=PROMPT, max_tokens=50_000))
    lengths = []
    for _ in range(50):
        if found := rig.drafter.drafts(rig.table):
            rig.drafter.on_verified(found, [0])
        lengths.append(found.total if found else 0)
    assert lengths[0] == 8
    assert max(lengths[3:]) <= 2
    assert lengths.count(0) > 10, "less than a pass is expected to be saved"
    again = [found.total for _ in range(1000) if (found := rig.drafter.drafts(rig.table))]
    assert again[-1] == 8


def test_drafts_rest_while_they_do_not_pay_and_are_tried_again() -> None:
    times = measured(0.010, 0.0001, verify_s=0.1)
    rig = Rig(Drafter(64, times))
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(request(1, prompt=PROMPT, max_tokens=50_000))
    tried = [bool(rig.drafts()) for _ in range(1000)]
    assert 5 < sum(tried) < 30, "both kinds of passes stay measured"


def test_one_pass_in_32_is_without_drafts(rig: Rig) -> None:
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(request(1, prompt=PROMPT, max_tokens=30))
    assert [bool(rig.drafts()) for _ in range(66)].count(False) == 2


def test_large_batch_has_no_drafts_and_learns_nothing() -> None:
    rig = Rig(Drafter(64, measured(0.010, 0.002)))
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(*(request(n, prompt=PROMPT, max_tokens=30) for n in range(8)))
    assert rig.drafts() == []
    assert rig.drafter.n_states == 0


def test_counters_are_of_verified_drafts(rig: Rig) -> None:
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(request(1, prompt=PROMPT, max_tokens=30), request(2, prompt=[9], max_tokens=30))
    found = rig.drafter.drafts(rig.table)
    assert isinstance(found, Drafts)
    rig.drafter.on_verified(found, [5, 0])
    assert (rig.drafter.drafted_total, rig.drafter.accepted_total) == (8, 5)


def test_memory_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_REMEMBERED_TOKENS", 100)
    monkeypatch.setattr(speculation, "_MAX_STATES", 200)
    for number in range(50):
        rig.drafter.hint([number], TEXT)
    rig.start(*(request(n, prompt=[n], max_tokens=90_000) for n in (0, 49)))
    assert rig.drafts() == [[], TEXT[:8]], "the oldest prompts are forgotten"
    for step in range(300):
        rig.generate([step % 900])
        rig.drafter.drafts(rig.table)
        assert rig.drafter.n_states < 200 + 2 * 300, "and what is learned before one pass"
    rig.table.abort(request.key for request in rig.table.requests)
    rig.table.remove_aborted()
    assert rig.drafter.n_states == 0, "nothing of samples that are gone, however they went"


def test_prompt_that_always_has_running_samples_keeps_its_drafts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_MAX_STATES", 500)
    monkeypatch.setattr(speculation, "_REBUILD_REST", 3)
    for number in range(100):
        rig.start(request(number, prompt=PROMPT, max_tokens=20))
        for step in range(10):
            rig.generate([(number + 7 * step) % 900])
            rig.drafter.drafts(rig.table)
        assert rig.table.n
        assert rig.drafter.n_states < 600
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(request(300, prompt=PROMPT, max_tokens=30, tokens=TEXT[:3]))
    assert TEXT[3:11] in [draft for _ in range(5) for draft in rig.drafts()]


def test_long_sibling_is_learned_over_several_passes(rig: Rig) -> None:
    for _ in range(3):
        rig.drafter.hint(PROMPT, np.random.default_rng(0).integers(0, 900, 3000).tolist())
    rig.drafter.hint(PROMPT, TEXT)
    rig.start(request(1, prompt=PROMPT, max_tokens=30, tokens=TEXT[:3]))
    for _ in range(3):
        assert rig.drafts() != [TEXT[3:11]]
    assert rig.drafts() == [TEXT[3:11]]
