from __future__ import annotations

from typing import Any

import httpx
import pytest

from rlboost import follow
from rlboost.client import Client, ClientError
from rlboost.job_lines import duration, fitted, remaining, step_line
from rlboost.shared.errors import ConfigError
from tests.support.fake_rest import FakeRest, job, ok, problem


def wait(for_: str, because: str = "so") -> dict[str, str]:
    return {"for": for_, "because": because}


def test_a_long_wait_is_reported_once_a_minute() -> None:
    waits = follow._LongWaits()
    told = [
        waits.is_news(wait_now, now)
        for now, wait_now in [
            (0.0, wait("samples", "0 of 8 are there")),
            (4.9, wait("samples", "7 of 8 are there")),
            (5.0, wait("samples", "7 of 8 are there")),
            (64.9, wait("samples", "7 of 8 are there")),
            (65.0, wait("samples", "8 of 8 are there")),
            (70.0, None),
            (76.0, wait("samples")),
            (77.0, wait("a worker")),
            (82.0, wait("a worker")),
        ]
    ]
    assert told == [False, False, True, False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (0, "step    1/3  reward/mean 0.125  eval/reward 0.5"),
        (3, "after the last step  reward/mean 0.125  eval/reward 0.5"),
    ],
)
def test_step_line_shows_rewards_only(step: int, line: str) -> None:
    row = {"step": step, "grad_norm": 9.0, "eval/reward": 0.5, "reward/mean": 0.125}
    assert step_line(row, 3) == line


def test_a_step_line_is_broken_between_metrics() -> None:
    row = {
        "step": 0,
        "reward/mean": 0.125,
        "completions/mean_length": 30.0,
        "eval/reward_mean": 0.5,
        "eval/pass@1": 0.5,
    }
    broken = step_line(row, 3, width=40).splitlines()
    assert all(len(line) <= 40 for line in broken)
    assert "  ".join(line.strip() for line in broken) == step_line(row, 3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (90, "90 s"), (600, "10 min"), (3600, "1 h"), (12_000, "3 h 20 min"), (2_592_000, "30 days")],
)
def test_duration_uses_the_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_fitted_keeps_words_whole() -> None:
    text = "one two three " * 10
    assert fitted(text, None) == text
    broken = fitted(text, 30)
    assert all(len(line) <= 30 for line in broken.splitlines())
    assert broken.split() == text.split()


def test_remaining_is_known_of_a_running_job_with_steps() -> None:
    rows = [{"time/step_s": 20.0}, {"time/step_s": 40.0}, {"eval/reward_mean": 1.0}]
    assert remaining(job("running", 1, steps=21), rows) == "about 10 min left (30 s a step)"
    assert not remaining(job("paused", 1, steps=21), rows)
    assert not remaining(job("running", 0, steps=21), [])


# --- outages ----------------------------------------------------------------------------------------------------------

REFUSED = httpx.ConnectError("refused")


class Systems:
    """Connects to the systems in turn, the last of them for ever; None is a system that does not run."""

    def __init__(self, *systems: FakeRest | None) -> None:
        self._systems = list(systems)
        self.tokens: list[str] = []

    def connect(self) -> Client:
        system = self._systems.pop(0) if len(self._systems) > 1 else self._systems[0]
        if system is None:
            raise ConfigError("the system does not run")
        self.tokens.append(f"token-{len(self.tokens)}")
        return Client("http://api.test", self.tokens[-1], retry_for_s=0.0, transport=system)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_POLL_S", 0.0)
    monkeypatch.setattr(follow, "_LONG_OUTAGE_S", 0.0)
    monkeypatch.setattr(follow, "_REMAINING_WARNINGS_LIMIT_S", 0.1)


def changes(systems: Systems) -> list[tuple[str, Any]]:
    return [change for change in follow.follow(systems.connect, "j-1") if change[0] != "job"]


def test_follow_reconnects_to_a_system_that_was_started_again() -> None:
    before, after = FakeRest(), FakeRest()
    before.on("GET /v1/jobs/j-1", ok(job("running", 1)), REFUSED)
    before.on("GET /v1/jobs/j-1/metrics", ok([{"step": 0}]))
    after.on("GET /v1/jobs/j-1", ok(job("completed", 2)))
    after.on("GET /v1/jobs/j-1/metrics", ok([{"step": 0}, {"step": 1}]))
    seen = changes(Systems(before, None, None, after))
    assert [kind for kind, _ in seen] == ["step", "lost", "back", "step"]
    assert seen[1][1]["because"] == "the system does not run"
    assert [row["step"] for kind, row in seen if kind == "step"] == [0, 1]
    assert after.requests[0].url.path == "/v1/jobs/j-1"


@pytest.mark.parametrize("answer", [problem(401, "Unauthorized", "token"), problem(503, "No leader", "try again")])
def test_follow_survives_answers_of_a_system_that_starts(answer: httpx.Response) -> None:
    system = FakeRest()
    system.on("GET /v1/jobs/j-1", ok(job("running")), answer, ok(job("completed", 1)))
    system.on("GET /v1/jobs/j-1/metrics", ok([]))
    assert [kind for kind, _ in changes(Systems(system))] == ["lost", "back"]


def test_follow_does_not_retry_an_unknown_job() -> None:
    system = FakeRest()
    system.on("GET /v1/jobs/j-1", problem(404, "No such job", "there is no job"))
    with pytest.raises(ClientError, match="there is no job"):
        changes(Systems(system))


def test_follow_gives_up_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "OUTAGE_LIMIT_S", 0.01)
    system = FakeRest()
    system.on("GET /v1/jobs/j-1", ok(job("running")), REFUSED)
    with pytest.raises(ClientError, match=r"has not answered for \d+ s, the limit: .*refused"):
        changes(Systems(system))


def test_follow_shows_that_a_job_is_paused_and_resumed() -> None:
    system = FakeRest()
    system.on(
        "GET /v1/jobs/j-1", *(ok(job(state)) for state in ("running", "paused", "paused", "running", "completed"))
    )
    system.on("GET /v1/jobs/j-1/metrics", ok([]))
    assert changes(Systems(system)) == [("state", "paused"), ("state", "running")]
