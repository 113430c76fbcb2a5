"""Which job gets a shared device next, and when its holder gives it up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost.services.trainer.domain.device_turns import (
    CLAIM_TTL_S,
    LEAST_PATIENCE_S,
    MAX_CREDIT_S,
    TURN_S,
    Claim,
    begin_waiting,
    gives_up,
    live,
    next_job,
    turn_s,
)
from rlboost.shared.errors import Undecodable

NOW = 1_000.0


def waiting(used_s: float, since: float = NOW) -> Claim:
    return Claim("t", used_s=used_s, waits_since=since, at=since)


def test_waiting_job_that_has_used_least_is_next() -> None:
    claims = {"a": waiting(5.0), "b": waiting(3.0), "c": Claim("t", used_s=1.0, at=NOW)}
    assert next_job(claims) == "b"
    assert next_job({"c": claims["c"]}) is None


def test_of_equal_jobs_the_one_that_waits_longest_is_next() -> None:
    assert next_job({"a": waiting(5.0, NOW), "b": waiting(5.0, NOW - 1)}) == "b"


def test_claim_that_is_not_renewed_counts_no_more() -> None:
    claims = {"a": waiting(0.0, NOW), "b": waiting(9.0, NOW + CLAIM_TTL_S)}
    assert set(live(claims, NOW + CLAIM_TTL_S)) == {"b"}


def test_idle_holder_gives_up_only_to_a_job_that_waits() -> None:
    mine = Claim("t", used_s=1.0)
    idle = {"idle_s": LEAST_PATIENCE_S, "held_s": 1.0, "change_s": 0.0}
    assert gives_up(mine, {"a": waiting(50.0)}, **idle)
    assert not gives_up(mine, {"a": Claim("t", at=NOW)}, **idle)
    assert not gives_up(mine, {}, **idle)


def test_holder_waits_as_long_as_a_change_takes_before_it_gives_up() -> None:
    others = {"a": waiting(0.0)}
    mine = Claim("t", used_s=1.0)
    assert not gives_up(mine, others, idle_s=2.9, held_s=5.0, change_s=3.0)
    assert gives_up(mine, others, idle_s=3.0, held_s=5.0, change_s=3.0)


def test_turn_with_work_left_ends_for_a_job_that_has_used_less() -> None:
    mine = Claim("t", used_s=5.0)
    assert gives_up(mine, {"a": waiting(4.0)}, idle_s=0.0, held_s=TURN_S, change_s=0.0)
    assert not gives_up(mine, {"a": waiting(6.0)}, idle_s=0.0, held_s=TURN_S, change_s=0.0)
    assert not gives_up(mine, {"a": waiting(4.0)}, idle_s=0.0, held_s=TURN_S, change_s=2.0)
    assert gives_up(mine, {"a": waiting(4.0)}, idle_s=0.0, held_s=turn_s(2.0), change_s=2.0)


def test_new_job_starts_like_the_one_with_the_least_of_those_that_use_the_device() -> None:
    others = {"a": waiting(500.0), "b": Claim("t", used_s=300.0, holds=True), "c": Claim("t", used_s=10.0)}
    assert begin_waiting(Claim("t"), others, NOW, is_new=True).used_s == 300.0
    assert begin_waiting(Claim("t"), {}, NOW, is_new=True).used_s == 0.0


def test_job_that_comes_while_all_others_generate_does_not_make_them_wait_for_hours() -> None:
    others = {"a": Claim("t", used_s=18_000.0), "b": Claim("t", used_s=100.0)}
    assert begin_waiting(Claim("t"), others, NOW, is_new=True).used_s == 18_000.0
    assert begin_waiting(Claim("t", used_s=200.0), others, NOW, is_new=False).used_s == 18_000.0 - MAX_CREDIT_S


def test_job_that_generated_for_long_gets_limited_credit() -> None:
    others = {"a": waiting(500.0)}
    assert begin_waiting(Claim("t", used_s=20.0), others, NOW, is_new=False).used_s == 500.0 - MAX_CREDIT_S
    begun = begin_waiting(Claim("t", used_s=490.0), others, NOW, is_new=False)
    assert (begun.used_s, begun.waits_since, begun.at) == (490.0, NOW, NOW)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (3.0, 2.0, 1.0)], ids=str)
def test_three_jobs_with_work_get_the_device_by_their_weights(weights: tuple[float, ...]) -> None:
    """Steps of different lengths; each turn ends when a step is done, or by the rule."""
    calls = (0.7, 2.0, 5.0)
    claims = {f"job-{n}": replace(waiting(0.0), weight=weight) for n, weight in enumerate(weights)}
    held = dict.fromkeys(claims, 0.0)
    while sum(held.values()) < 3_000.0:
        job = next_job(claims)
        assert job is not None
        mine, others, turn = claims[job], {one: claim for one, claim in claims.items() if one != job}, 0.0
        for _ in range(8):
            turn += calls[int(job[-1])]
            mine = replace(mine, used_s=claims[job].used_s + turn / mine.weight)
            if gives_up(mine, others, idle_s=0.0, held_s=turn, change_s=0.1):
                break
        held[job] += turn
        claims[job] = mine
    shares = [100 * seconds / sum(held.values()) for seconds in held.values()]
    assert shares == pytest.approx([100 * weight / sum(weights) for weight in weights], abs=3.0)


@pytest.mark.parametrize("text", ["", "[]", '{"trainer": "t"}', '{"trainer": "t", "weight": "x"}'])
def test_text_that_is_no_claim_is_refused(text: str) -> None:
    with pytest.raises(Undecodable, match="is no claim of a device"):
        Claim.parse(text)


def test_claim_survives_its_text() -> None:
    claim = Claim("trainer-1", 2.0, 3.5, NOW, holds=True, at=NOW + 1)
    assert Claim.parse(claim.to_json()) == claim
