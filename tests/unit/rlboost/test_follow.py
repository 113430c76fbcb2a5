from __future__ import annotations

from typing import Any

import httpx
import pytest

from rlboost import follow
from rlboost.client import Client, ClientError
from rlboost.job_lines import activity_line, duration, fitted, phase_line, remaining, step_line, unix_s
from rlboost.shared.errors import ConfigError
from tests.support.fake_rest import FakeRest, job, ok, problem


def wait(for_: str, because: str = "so") -> dict[str, Any]:
    return {"for": for_, "because": because}


def training(step: int, last_s: float | None = None) -> dict[str, Any]:
    return {"name": "training", "step": step, "since": "2026-01-01T00:00:00+00:00", "last_s": last_s}


def reported(*shown: tuple[float, dict[str, Any]]) -> list[tuple[float, str]]:
    """Return when which kind of change was yielded, of a running job with these fields at these times."""
    progress = follow.Progress(0)
    progress.next_step(job("running"))
    return [
        (now, kind)
        for now, fields in shown
        for kind, _ in progress.changes(job("running", **fields), [], now)
        if kind != "job"
    ]


def test_a_long_wait_is_reported_once_a_minute() -> None:
    shown = reported(
        (0.0, {"waiting": wait("samples", "0 of 8 are there")}),
        (4.9, {"waiting": wait("samples", "7 of 8 are there")}),
        (5.0, {"waiting": wait("samples", "7 of 8 are there")}),
        (64.9, {"waiting": wait("samples", "7 of 8 are there")}),
        (65.0, {"waiting": wait("samples", "8 of 8 are there")}),
        (70.0, {}),
        (76.0, {"waiting": wait("samples")}),
        (77.0, {"waiting": wait("a worker")}),
        (82.0, {"waiting": wait("a worker")}),
    )
    assert shown == [(5.0, "wait"), (65.0, "wait"), (82.0, "wait")]


def test_a_phase_is_reported_each_minute_in_which_nothing_is_waited_for() -> None:
    shown = reported(
        (0.0, {"phase": training(1)}),
        (59.0, {"phase": training(1)}),
        (60.0, {"phase": training(1)}),
        (119.0, {"phase": training(1)}),
        (120.0, {"phase": training(1), "waiting": wait("samples")}),
        (180.0, {"phase": training(1)}),
        (190.0, {"phase": training(2)}),
        (240.0, {"phase": training(2)}),
        (250.0, {"phase": training(2)}),
    )
    assert [(at, kind) for at, kind in shown if kind == "phase"] == [
        (60.0, "phase"),
        (180.0, "phase"),
        (250.0, "phase"),
    ]


AT = unix_s("2026-01-01T00:00:42+00:00")


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        (training(6), "training step 7, for 42 s"),
        (training(6, last_s=50.0), "training step 7, for 42 s (the last took 50 s)"),
        (training(6) | {"name": "publishing", "last_s": 3.0}, "publishing weights, for 42 s (the last took 3 s)"),
        (training(6) | {"name": "finishing"}, "saving the model, for 42 s"),
        (training(6) | {"name": "of a newer release"}, "of a newer release, for 42 s"),
    ],
)
def test_phase_line_names_the_phase_and_how_long_it_takes(phase: dict[str, Any], line: str) -> None:
    assert phase_line(phase, AT) == line


def test_activity_line_has_the_phase_and_the_wait() -> None:
    waiting = wait("samples") | {"since": "2026-01-01T00:00:30+00:00"}
    line = "training step 7, for 42 s; waiting for samples because so (12 s so far)"
    assert activity_line(job("running", phase=training(6), waiting=waiting), AT) == line
    paused = training(6) | {"name": "paused"}
    assert activity_line(job("paused", phase=paused, waiting=waiting), AT) == line.partition("; ")[2]
    assert activity_line(job("paused", phase=paused), AT) == "paused, for 42 s"
    assert activity_line(job("running"), AT) == ""


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
