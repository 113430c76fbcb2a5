from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner, Result

from rlboost import client, follow
from rlboost.cli import app
from rlboost.commands import job_files, jobs, system
from rlboost.jobs.model_check import DataFindings
from rlboost.local.state import Config, ProcessRecord, StateDir
from rlboost.shared.errors import ConfigError
from tests.support.fake_rest import FakeRest, job, lines, ok, problem

JOB = {
    "name": "tiny",
    "model": "base",
    "data": {"train": "train.jsonl", "prompts_per_step": 2},
    "reward": {"function": "my_reward:score"},
    "steps": 3,
}
WORKER = {
    "id": "worker-1-abcd",
    "role": "preemptible",
    "state": "ready",
    "weight_version": 2,
    "running": 3,
    "pending": 0,
}


@pytest.fixture(autouse=True)
def _no_settings_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLBOOST_MANAGER_REDIS_DURABILITY", raising=False)
    monkeypatch.delenv("RLBOOST_TRAINER_FOLDERS", raising=False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder of its own, without a system in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLBOOST_URL", raising=False)
    monkeypatch.delenv("RLBOOST_TOKEN", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("rlboost.jobs.check.check_data", lambda _: DataFindings())  # it needs a real model
    monkeypatch.setattr(follow, "_POLL_S", 0.0)
    monkeypatch.setattr(follow, "_LONG_WAIT_S", 0.0)
    return tmp_path


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> FakeRest:
    """A system named by the environment."""
    fake = FakeRest()
    monkeypatch.setattr(client, "Client", partial(client.Client, transport=fake))
    monkeypatch.setattr(client, "_RETRY_S", 0.0)
    monkeypatch.setenv("RLBOOST_URL", "http://api.test")
    monkeypatch.setenv("RLBOOST_TOKEN", "secret")
    return fake


def rlboost(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def write_job(**changes: Any) -> None:
    Path("base").mkdir(exist_ok=True)
    Path("base/config.json").write_text("{}")
    Path("base/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    Path("base/tokenizer.json").touch()
    Path("train.jsonl").write_text('{"prompt": "1+1="}\n')
    Path("my_reward.py").write_text("def score(prompts, completions, completion_ids): return [1.0]\n")
    Path("job.yaml").write_text(yaml.safe_dump({**JOB, **changes}))


# --- where the system is ----------------------------------------------------------------------------------------------


def test_commands_without_a_system_name_how_to_start_one() -> None:
    for command in (["ps"], ["status", "j"], ["logs", "j"], ["cancel", "j"], ["worker", "list"], ["worker", "join"]):
        result = rlboost(*command)
        assert result.exit_code == 2
        assert result.stderr == (
            "rlboost: the system in .rlboost does not run: start one with 'rlboost up', or set RLBOOST_URL and "
            "RLBOOST_TOKEN\n"
        )


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (
            "No space left on device",
            r"does not run: start one with .* \(the last one ended at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: No space left",
        ),
        ("", r"was stopped at \d{4}-"),
        (None, "ended and left no reason: its supervisor was killed, or the machine restarted"),
    ],
)
def test_ended_system_error_names_the_reason(reason: str | None, shown: str) -> None:
    state = StateDir(Path(".rlboost"))
    with state.owned():
        if reason is not None:
            state.write_end(reason)
    result = rlboost("ps")
    assert result.exit_code == 2
    assert re.search(f"the system in .rlboost {shown}", result.stderr)


def test_url_without_its_token_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of the local system is not sent elsewhere."""
    monkeypatch.setenv("RLBOOST_URL", "http://elsewhere.test")
    state = StateDir(Path(".rlboost"))
    with state.owned():
        state.write_config(Config("http://127.0.0.1:1", "mine", "redis://x", str(state.path), os.getpid()))
        result = rlboost("worker", "list")
    assert result.exit_code == 2
    assert (
        result.stderr
        == "rlboost: RLBOOST_URL is http://elsewhere.test, but its token is not known: set RLBOOST_TOKEN\n"
    )


@pytest.mark.parametrize("url", ["10.0.0.5:8700", "ftp://a.test", "http://", "http://[::1", "http://a.test:x"])
def test_an_invalid_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_URL", url)
    monkeypatch.setenv("RLBOOST_TOKEN", "t")
    result = rlboost("status", "j")
    assert result.exit_code == 2
    assert result.stderr == f"rlboost: RLBOOST_URL {url!r} is not a URL: use the form http://10.0.0.5:8700\n"


def test_the_environment_wins_over_the_local_state(rest: FakeRest) -> None:
    rest.on("GET /v1/workers", ok([]))
    state = StateDir(Path(".rlboost"))
    with state.owned():
        state.write_config(Config("http://127.0.0.1:1", "mine", "redis://x", str(state.path), os.getpid()))
        assert rlboost("worker", "list").exit_code == 0
    assert rest.requests[0].url.host == "api.test"
    assert rest.requests[0].headers["authorization"] == "Bearer secret"


def test_help_names_every_command_quickly_and_without_heavy_imports() -> None:
    code = (
        "import sys; from rlboost.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('heavy:', [m for m in ('torch', 'httpx', 'redis', 'asyncio', 'fastapi', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "heavy: []" in done.stdout
    for command in ("up", "down", "run", "ps", "status", "logs", "pause", "resume", "cancel", "worker", "config"):
        assert f" {command} " in done.stdout


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_run_sends_the_job_with_overrides_defaults_and_absolute_paths(rest: FakeRest, folder: Path) -> None:
    write_job()
    rest.on("POST /v1/jobs", ok({"id": "tiny-1", "state": "pending"}, 201))
    result = rlboost("run", "job.yaml", "steps=7", "algorithm.group_size=4", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"id": "tiny-1", "state": "pending"}
    sent = json.loads(rest.requests[0].content)
    assert (sent["steps"], sent["algorithm"]["group_size"]) == (7, 4)
    assert (sent["model"], sent["data"]["train"]) == (str(folder / "base"), str(folder / "train.jsonl"))
    assert sent["reward"]["function"] == "my_reward:score"


def test_a_hub_model_id_is_sent_unchanged(rest: FakeRest) -> None:
    write_job(model="Qwen/Qwen3-0.6B")
    rest.on("POST /v1/jobs", ok({"id": "tiny-1", "state": "pending"}, 201))
    assert rlboost("run", "job.yaml").exit_code == 0
    assert json.loads(rest.requests[0].content)["model"] == "Qwen/Qwen3-0.6B"


def test_a_dry_run_prints_the_whole_job_and_sends_nothing(rest: FakeRest) -> None:
    write_job()
    for flags, load in ((["--json"], json.loads), ([], yaml.safe_load)):
        result = rlboost("run", "job.yaml", "--dry-run", *flags)
        assert result.exit_code == 0
        assert load(result.stdout)["optimizer"]["betas"] == [0.9, 0.95]
    assert rest.requests == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run", "none.yaml"], "job file none.yaml: No such file or directory"),
        (["run", "job.yaml", "steps"], "override 'steps' is not of the form a.b=value"),
        (["run", "job.yaml", "optimizer={lr: 1"], "override 'optimizer={lr: 1' does not parse"),
        (["run", "job.yaml", "steps=0"], "job.yaml: steps: should be 1 or more, not 0"),
        (["run", "job.yaml", "stepz=1"], "job.yaml: stepz: unknown key: did you mean steps?"),
        (["run", "job.yaml", "stepz=1", "--no-check"], "job.yaml: stepz: unknown key: did you mean steps?"),
        (["run", "job.yaml", "stepz=1", "--dry-run"], "job.yaml: stepz: unknown key: did you mean steps?"),
    ],
)
def test_a_wrong_job_is_one_line_and_sends_nothing(rest: FakeRest, arguments: list[str], what: str) -> None:
    write_job()
    result = rlboost(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("rlboost: ")
    assert what in result.stderr
    assert result.stderr.count("\n") == 1
    assert rest.requests == []


def run_by(state: StateDir) -> ExitStack:
    """A local system at the URL of `rest`, started in the current folder."""
    stack = ExitStack()
    stack.enter_context(state.owned())
    state.write_config(Config("http://api.test", "secret", "redis://x", str(state.path), os.getpid()))
    return stack


WRONG = {
    "data": {"train": "none.jsonl"},
    "reward": {"function": "my_reward:scored"},
    "model": "nowhere/at/all",
}


def test_run_of_an_invalid_job_fails_like_check_without_a_system() -> None:
    write_job(**WRONG)
    checked, result = rlboost("config", "check", "job.yaml"), rlboost("run", "job.yaml")
    assert result.exit_code == checked.exit_code == 2
    assert result.stderr == checked.stderr
    assert len(result.stderr.splitlines()) == 3


@pytest.mark.parametrize("command", ["run", "eval"])
def test_invalid_job_is_not_sent_to_the_local_system(rest: FakeRest, command: str) -> None:
    write_job(**WRONG | {"data": {"train": "train.jsonl", "eval": "none.jsonl"}})
    with run_by(StateDir(Path(".rlboost"))):
        result = rlboost(command, "job.yaml")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 3
    assert "warning" not in result.stderr
    assert rest.requests == []


@pytest.mark.parametrize("elsewhere", ["another machine", "another folder"])
def test_missing_files_are_warnings_for_a_remote_system(
    rest: FakeRest, elsewhere: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest.on("POST /v1/jobs", ok({"id": "tiny-1", "state": "pending"}, 201))
    with ExitStack() as stack:
        if elsewhere == "another folder":
            stack.enter_context(run_by(StateDir(folder / "state")))
            (folder / "jobs").mkdir()
            monkeypatch.setattr(StateDir, "started_in", lambda _: folder)
            monkeypatch.chdir(folder / "jobs")
        write_job(**WRONG | {"reward": {"function": "their_reward:score"}})
        result = rlboost("run", "job.yaml", f"--state={folder / 'state'}")
    assert result.exit_code == 0, result.stderr
    warned = [line.removeprefix("rlboost: job.yaml: warning: ") for line in result.stderr.splitlines()]
    assert [line.partition(":")[0] for line in warned] == ["model", "data.train", "reward.function"]
    assert rest.sent() == ["POST /v1/jobs"]


def test_local_function_error_refuses_the_job_for_a_remote_system(rest: FakeRest) -> None:
    write_job(**WRONG)
    result = rlboost("run", "job.yaml")
    assert result.exit_code == 2
    *warned, refused = result.stderr.splitlines()
    assert refused == (
        "rlboost: job.yaml: reward.function: my_reward:scored is not a reward function: my_reward has no 'scored'; "
        "did you mean 'score'?"
    )
    assert len(warned) == 2
    assert rest.requests == []


def test_the_check_can_be_left_out(rest: FakeRest) -> None:
    write_job(**WRONG)
    rest.on("POST /v1/jobs", ok({"id": "tiny-1", "state": "pending"}, 201))
    result = rlboost("run", "job.yaml", "--no-check")
    assert (result.exit_code, result.stderr) == (0, "")
    assert rest.sent() == ["POST /v1/jobs"]


ROWS = [{"step": step, "reward/mean": 0.1 * step, "eval/accuracy": 0.5, "grad_norm": 1.0} for step in range(3)]


def test_following_shows_each_step_once_and_succeeds_with_the_job(rest: FakeRest) -> None:
    write_job()
    since = datetime.now(UTC) + timedelta(hours=1)  # by the manager's clock: the command's start takes its time
    waiting = {"for": "a worker", "because": "none is here", "since": since.isoformat(), "limit_s": None}
    waited = "waiting for a worker because none is here"
    rest.on("POST /v1/jobs", ok({"id": "j-1", "state": "pending"}, 201))
    rest.on(
        "GET /v1/jobs/j-1",
        ok(job("pending", waiting=waiting)),
        ok(job("running", 1, waiting=waiting)),
        httpx.ConnectError("the manager restarts"),
        ok(job("running", 2)),
        ok(job("completed", 3)),
    )
    rest.on("GET /v1/jobs/j-1/metrics", ok(ROWS[:1]), ok(ROWS[:2]), ok(ROWS))
    result = rlboost("run", "job.yaml", "--follow")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1:] == [
        waited,
        "step    1/3  reward/mean 0  eval/accuracy 0.5",
        "step    2/3  reward/mean 0.1  eval/accuracy 0.5",
        "step    3/3  reward/mean 0.2  eval/accuracy 0.5",
        "j-1 completed: 3 steps",
    ]


def test_following_shows_each_warning_once_though_the_manager_restarts(rest: FakeRest) -> None:
    def said(number: int, text: str, kind: str = "warning") -> list[str]:
        return [f"id: {number}-0", f"event: {kind}", "data: " + json.dumps({"fields": {"text": text}}), ""]

    write_job()
    rest.on("POST /v1/jobs", ok({"id": "j-1", "state": "pending"}, 201))
    rest.on("GET /v1/jobs/j-1", ok(job("completed", 3)))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    broken = lines([*said(1, "top_p"), *said(2, "what a worker said", "note")], httpx.ReadError("gone"))
    rest.on("GET /v1/jobs/j-1/events", broken, lines(said(3, "wandb is away")))
    result = rlboost("run", "job.yaml", "--follow")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines() == ["rlboost: j-1: warning: top_p", "rlboost: j-1: warning: wandb is away"]
    resumed = [request for request in rest.requests if request.url.path.endswith("/events")][1]
    assert resumed.headers["Last-Event-ID"] == "2-0"
    rest.on("GET /v1/jobs/j-1/events", lines(said(1, "top_p")))
    *_, warned, _ = map(json.loads, rlboost("run", "job.yaml", "--follow", "--json").stdout.splitlines())
    assert warned == {"warning": "top_p"}


def test_profile_says_how_many_steps_and_where_to_look(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job("running", 1)))
    rest.on("POST /v1/jobs/j-1/profile", ok({"id": "j-1", "state": "running", "steps": 2}, 202))
    result = rlboost("profile", "j-1", "--steps", "2")
    assert result.stdout == "j-1 will record its next 2 steps: 'rlboost logs j-1' shows where\n"
    assert json.loads(rest.requests[-1].content) == {"steps": 2}
    assert rlboost("profile", "j-1", "--steps", "11").exit_code == 2


def test_variables_of_a_tracker_that_do_not_reach_the_trainer_are_noted(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "secret")
    write_job(log={"mlflow": {"experiment": "sums"}})
    rest.on("POST /v1/jobs", ok({"id": "j-1", "state": "pending"}, 201))
    result = rlboost("run", "job.yaml", "--no-check")
    assert result.stderr.startswith(
        "rlboost: note: MLFLOW_TRACKING_URI and MLFLOW_TRACKING_PASSWORD of this shell do not reach the trainer"
    )
    assert "secret" not in result.output


def test_follow_works_without_events(rest: FakeRest) -> None:
    write_job()
    rest.on("POST /v1/jobs", ok({"id": "j-1", "state": "pending"}, 201))
    rest.on("GET /v1/jobs/j-1", ok(job("running", 1)), ok(job("completed", 3)))
    rest.on("GET /v1/jobs/j-1/metrics", ok(ROWS))
    rest.on("GET /v1/jobs/j-1/events", problem(500, "Broken", "no events"))
    assert rlboost("run", "job.yaml", "--follow").stdout.endswith("j-1 completed: 3 steps\n")


def test_follow_and_status_end_with_the_cost_of_the_job(rest: FakeRest) -> None:
    cost = {
        "dollars": 12.344,
        "max_dollars": 20.0,
        "workers": [
            {"role": "preemptible", "kind": "h100", "hours": 5.0, "dollars": 9.344},
            {"role": "trainer", "kind": "", "hours": 1.5, "dollars": 3.0},
        ],
        "dollars_per_step": 4.114,
        "dollars_per_1000_samples": None,
        "dollars_per_million_tokens": 0.25,
        "dollars_saved_by_migration": 0.5049,
        "dollars_regenerated": 0.0012,
        "dollars_regenerated_by_cause": {"late": 0.0012, "gap": 0.0},
        "reserved_only": {"seconds": 9000.0, "dollars": 15.43, "break_even_price_per_hour": 3.0},
    }
    lines = [
        (
            "$12.34 of at most $20.00: spot h100 $9.34 for 5.00 h, trainer $3.00 for 1.50 h. $4.11 a step, - per 1,000 "
            "samples, $0.25 per million tokens. Migration saved $0.50 of tokens; $0.0012 were regenerated."
        ),
        (
            "The reserved workers alone would have taken about 2.50 h and cost $15.43 so far: with spot workers the "
            "job is 20 % cheaper. They make it cheaper while each costs less than $3.00 per hour."
        ),
        "Tokens regenerated: arrived after the sample had migrated: $0.0012.",
    ]
    rest.on("GET /v1/jobs/j-1", ok(job("completed", 3)))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    rest.on("GET /v1/jobs/j-1/cost", ok(cost))
    shown = "\n    ".join(lines)
    assert f"\ncost: {shown}\nj-1 completed: 3 steps\n" in rlboost("follow", "j-1").stdout
    assert " ".join(lines) in " ".join(rlboost("status", "j-1").stdout.split())
    assert json.loads(rlboost("follow", "j-1", "--json").stdout.splitlines()[0]) == {"cost": cost}


def test_status_names_workers_that_a_budget_does_not_count(rest: FakeRest) -> None:
    workers = [
        {"role": "reserved", "kind": "h200", "hours": 1.0, "dollars": 4.0},
        {"role": "preemptible", "kind": "h100", "hours": 5.0, "dollars": 0.0},
    ]
    rest.on("GET /v1/jobs/j-1", ok(job("running", 3)))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    rest.on("GET /v1/jobs/j-1/cost", ok({"dollars": 0.0, "max_dollars": 20.0, "workers": workers}))
    shown = " ".join(rlboost("status", "j-1").stdout.split())
    assert (
        "not counted by elastic.max_dollars: spot h100: set their price in the manager's RLBOOST_MANAGER_PRICE_FILE"
        in shown
    )
    rest.on("GET /v1/jobs/j-1/cost", ok({"dollars": 0.0, "max_dollars": None, "workers": workers}))
    assert "max_dollars" not in rlboost("status", "j-1").stdout


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local zone, in which summer ends on 25 October 2026 at 3:00."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "text", "found"),
    [
        ("2026-12-01T12:00", "18:00", "2026-12-01T18:00:00+01:00"),
        ("2026-12-01T12:00", "09:30", "2026-12-02T09:30:00+01:00"),  # the next one
        ("2026-12-01T12:00", "2026-12-03T18:00", "2026-12-03T18:00:00+01:00"),
        ("2026-12-01T12:00", "2026-12-03 18:00Z", "2026-12-03T18:00:00+00:00"),
        ("2026-12-01T12:00", "18:00-08:00", "2026-12-01T18:00:00-08:00"),
        ("2026-12-01T12:00", "03:00-08:00", "2026-12-02T03:00:00-08:00"),  # it is 3:00 there
        ("2026-10-24T20:00", "18:00", "2026-10-25T18:00:00+01:00"),
        ("2026-10-24T20:00", "2026-10-26T18:00", "2026-10-26T18:00:00+01:00"),
        ("2026-10-25T01:00", "18:00", "2026-10-25T18:00:00+01:00"),
    ],
)
def test_deadline_is_read_in_the_local_zone(now: str, text: str, found: str) -> None:
    assert jobs.deadline(text, datetime.fromisoformat(now).astimezone()).isoformat() == found


@pytest.mark.parametrize(("text", "why"), [("tonight", "write 18:00"), ("2020-01-01", "it is over")])
def test_unusable_deadline_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        jobs.deadline(text, datetime.now().astimezone())


def test_status_says_why_the_fleet_is_as_it_is_and_when_a_late_job_ends(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job("running", 3, finishes_at="2026-12-01T19:00:00+00:00")))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    reason = "2 x L4 in zone b: 31 % cheaper per token than A10G"
    rest.on("GET /v1/fleet", ok({"autoscaling": {"pools": [{}, {}], "reason": reason}}))
    shown = " ".join(rlboost("status", "j-1").stdout.split())
    assert reason in shown
    assert "with all workers within the limits it ends at 2026-12-01T19:00:00+00:00" in shown


def test_scale_sets_the_number_of_workers(rest: FakeRest) -> None:
    pool = {"kind": "h100", "present": 2, "max_workers": 8, "error": "no quota"}
    rest.on("POST /v1/fleet/scale", ok({"workers": 4}))
    rest.on("GET /v1/fleet", ok({"autoscaling": {"pools": [pool]}}))
    for given, sent in (("4", 4), ("auto", "auto")):
        result = rlboost("scale", given)
        posted = [request for request in rest.requests if request.method == "POST"][-1]
        assert json.loads(posted.content) == {"workers": sent}
        assert result.stdout.endswith("  h100: 2 present, at most 8\n")
        assert result.stderr == "rlboost: warning: h100: no quota\n"
    assert "'many' is not a number of workers" in rlboost("scale", "many").stderr


def test_read_only_link_has_a_token_that_reads_and_expires(rest: FakeRest) -> None:
    assert rlboost("page").stdout == "http://api.test/#token=secret\n"
    shown = json.loads(rlboost("page", "--json").stdout)
    assert shown == {"url": "http://api.test/#token=secret", "read_only": False}
    assert not rest.requests
    rest.on("POST /v1/tokens", ok({"id": "t", "secret": "abc", "scope": "read"}, 201))
    assert rlboost("page", "--read-only").stdout == "http://api.test/#token=abc&read-only\n"
    sent = json.loads(rest.requests[0].content)
    assert (sent["scope"], sent["expires_s"]) == ("read", 7 * 86_400.0)


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_following_fails_with_the_job(rest: FakeRest, state: str) -> None:
    write_job()
    rest.on("POST /v1/jobs", ok({"id": "j-1", "state": "pending"}, 201))
    rest.on("GET /v1/jobs/j-1", ok(job(state, 1, error="reward: division by zero")))
    rest.on("GET /v1/jobs/j-1/metrics", ok(ROWS[:1]))
    result = rlboost("run", "job.yaml", "--follow", "--json")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"rlboost: j-1 {state}")
    assert result.stderr.endswith(": reward: division by zero\n")
    created, step, last = map(json.loads, result.stdout.splitlines())
    assert created == {"id": "j-1", "state": "pending"}
    assert step == {"step": ROWS[0]}
    assert last["job"]["state"] == state


def test_an_answer_that_is_a_problem_is_one_line(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j", ok(job("completed", id="j")))
    rest.on("POST /v1/jobs/j/resume", problem(409, "Conflict", "job j is completed: it can not resume any more"))
    result = rlboost("resume", "j")
    assert result.exit_code == 1
    assert result.stderr == "rlboost: Conflict: job j is completed: it can not resume any more\n"


def test_status_shows_state_step_phase_wait_and_metrics(rest: FakeRest) -> None:
    waiting = {"for": "the trainer", "because": "it died", "since": "2026-01-01", "limit_s": 2592000.0}
    phase = {"name": "training", "step": 2, "since": "2026-01-01", "last_s": 5.0}
    rest.on(
        "GET /v1/jobs/j-1",
        ok(job("running", 2, phase=phase, waiting=waiting, latest={"reward/mean": 0.25}, warnings=["all 0"])),
    )
    rest.on("GET /v1/jobs/j-1/metrics", ok([{"step": step, "time/step_s": 60.0 + step} for step in range(2)]))
    shown = rlboost("status", "j-1").stdout
    for part in (
        "running",
        "2 of 3",
        "training step 3, for",
        "(the last took 5 s); waiting for the trainer because it died",
        "30 days at most",
        "step 2",
        "0.25",
        "60 s left",
        "all 0",
    ):
        assert part in shown
    assert json.loads(rlboost("status", "j-1", "--json").stdout)["waiting"] == waiting


def test_logs_are_printed_as_they_come(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job("running")))
    rest.on("GET /v1/jobs/j-1/logs", lines(["one", "two"]))
    assert rlboost("logs", "j-1", "-f").stdout == "one\ntwo\n"
    assert rest.requests[-1].url.params["follow"] == "1"


def test_a_job_can_be_named_by_its_name_in_every_command(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/sums", problem(404, "No such job", "there is no job 'sums'"))
    rest.on("GET /v1/jobs", ok([job("completed", id=f"sums-{n}", name="sums") for n in (1, 2)] + [job("failed")]))
    rest.on("GET /v1/jobs/sums-2", ok(job("completed", id="sums-2")))
    rest.on("GET /v1/jobs/sums-2/logs", lines(["one"]))
    rest.on("GET /v1/jobs/sums-2/metrics", ok([]))
    for verb in ("pause", "resume", "cancel"):
        rest.on(f"POST /v1/jobs/sums-2/{verb}", ok({"id": "sums-2", "state": "completed"}))
    for verb in ("status", "logs", "follow", "pause", "resume", "cancel"):
        result = rlboost(verb, "sums")
        assert result.exit_code == 0, result.stderr
        assert "sums-2" in (rest.sent()[-1] if verb == "logs" else result.stdout)


def test_export_copies_the_result_of_the_newest_run_of_a_name(rest: FakeRest, monkeypatch: pytest.MonkeyPatch) -> None:
    rest.on("GET /v1/jobs/sums", problem(404, "No such job", "there is no job 'sums'"))
    rest.on("GET /v1/jobs", ok([job("completed", id=f"sums-{n}", name="sums") for n in (1, 2)]))
    for n in (1, 2):
        result = Path(f".rlboost/runs/sums-{n}/model")
        result.mkdir(parents=True)
        (result / "config.json").write_text(f'{{"n": {n}}}')
    with run_by(StateDir(Path(".rlboost"))):
        monkeypatch.delenv("RLBOOST_URL")
        done = rlboost("export", "sums", "--out", "out")
    assert done.exit_code == 0, done.stderr
    assert json.loads(Path("out/config.json").read_text()) == {"n": 2}


@pytest.mark.parametrize(
    ("verb", "state", "printed"),
    [
        ("cancel", "running", "is being cancelled"),
        ("cancel", "cancelled", "is cancelled and stays so"),
        ("pause", "paused", "is paused and stays so"),
        ("resume", "running", "is running and stays so"),
    ],
)
def test_job_action_prints_its_effect_on_the_state(rest: FakeRest, verb: str, state: str, printed: str) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job(state)))
    rest.on(f"POST /v1/jobs/j-1/{verb}", ok({"id": "j-1", "state": "cancelled"}, 202))
    assert rlboost(verb, "j-1").stdout == f"j-1 {printed}\n"


def test_follow_of_an_ended_job_shows_its_last_steps_or_those_requested(rest: FakeRest) -> None:
    rows = [{"step": step, "reward/mean": 0.1} for step in range(9)]
    rest.on("GET /v1/jobs/j-1", ok(job("completed", 9, steps=9)))
    rest.on("GET /v1/jobs/j-1/metrics", ok(rows))
    shown = rlboost("follow", "j-1").stdout.splitlines()
    assert [line[:11] for line in shown[1:-1]] == [f"step    {n}/9" for n in range(5, 10)]
    assert shown[-1] == "j-1 completed: 9 steps"
    assert len(rlboost("follow", "j-1", "--from-step", "1").stdout.splitlines()) == 11


def test_follow_of_a_cancelled_job_reports_the_steps_done(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job("cancelled", 2)))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    result = rlboost("follow", "j-1")
    assert (result.exit_code, result.stderr) == (1, "rlboost: j-1 cancelled after 2 of 3 steps\n")


def test_interrupted_follow_prints_how_to_follow_again(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job("running")), KeyboardInterrupt())
    result = rlboost("follow", "j-1", "--state", "my state")
    assert result.exit_code == 130
    assert "still running" in result.stderr
    assert "rlboost follow j-1 --state 'my state'" in result.stderr


def test_follow_fails_after_the_outage_limit_with_the_command_to_repeat(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "OUTAGE_LIMIT_S", 0.0)
    rest.on("GET /v1/jobs/j-1", ok(job("running")), httpx.ConnectError("refused"))
    result = rlboost("follow", "j-1")
    assert result.exit_code == 1
    assert re.search(r"the manager has not answered for \d+ s, the limit", result.stderr)
    assert "'rlboost follow j-1'" in result.stderr


def test_a_warning_of_several_lines_is_shown_whole_and_fits_the_terminal(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "all rewards are equal: nothing is learned from these groups\na completion: " + "word " * 40
    event = "data: " + json.dumps({"fields": {"text": text}})
    rest.on("GET /v1/jobs/j-1", ok(job("completed", 3)))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    rest.on("GET /v1/jobs/j-1/events", lines(["event: warning", event, ""]))
    monkeypatch.setenv("COLUMNS", "80")
    shown = rlboost("follow", "j-1").stderr
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert shown.split() == f"rlboost: j-1: warning: {text}".split()


def test_the_version_is_printed() -> None:
    assert rlboost("--version").stdout.startswith("rlboost 0.")


def test_hints_repeat_the_state_folder() -> None:
    assert "'rlboost up --state elsewhere'" in rlboost("ps", "--state", "elsewhere").stderr


# --- processes and workers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "ours"), [("stop", "cancel JOB"), ("list", "ps"), ("train", "run JOB.yaml")])
def test_verb_of_another_tool_is_answered_with_ours(verb: str, ours: str) -> None:
    result = rlboost(verb, "x")
    assert result.exit_code == 2
    assert f"rlboost {ours}" in " ".join(result.stderr.replace("│", " ").split())


def test_misspelt_variable_of_the_command_line_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_URLL", "http://10.0.0.5:8700")
    printed = "rlboost: warning: environment variable RLBOOST_URLL is ignored: did you mean RLBOOST_URL?\n"
    assert rlboost("ps").stderr.startswith(printed)


def test_ps_lists_processes_jobs_and_workers(rest: FakeRest) -> None:
    phase = {"name": "publishing", "step": 1, "since": "2026-01-01T00:00:00+00:00", "last_s": None}
    rest.on("GET /v1/jobs", ok([job("running", 1, phase=phase)]))
    rest.on("GET /v1/workers", ok([WORKER]))
    record = ProcessRecord("worker-1", "preemptible", 77, "2026-01-01T00:00:00+00:00", 2, alive=True)
    state = StateDir(Path(".rlboost"))
    with state.owned():
        state.write_processes([record])
        answer = json.loads(rlboost("ps", "--json").stdout)
        shown = rlboost("ps").stdout
    assert answer["processes"][0]["pid"] == 77
    assert answer["processes"][0]["restarts"] == 2
    assert answer["jobs"][0]["id"] == "j-1"
    assert answer["workers"] == [WORKER]
    for part in ("worker-1", "77", "j-1", "1/3", "publishing weights", "worker-1-abcd", "ready"):
        assert part in shown


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_RETRY_FOR_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_ps_fails_while_the_manager_is_away_and_lists_the_processes(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs", httpx.ConnectError("refused"))
    state = StateDir(Path(".rlboost"))
    with state.owned():
        state.write_processes([ProcessRecord("manager", "manager", 7, "2026-01-01", 1, alive=False, note="killed")])
        result, shown = rlboost("ps", "--json"), rlboost("ps")
    assert (result.exit_code, shown.exit_code) == (1, 1)
    assert [record["name"] for record in json.loads(result.stdout)["processes"]] == ["manager"]
    assert "killed" in shown.stdout
    printed = "rlboost: No answer: http://api.test does not answer (refused): is the system running?\n"
    assert result.stderr == shown.stderr == printed


def test_ps_waits_for_a_manager_that_is_started_again(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs", httpx.ConnectError("refused"), ok([]))
    rest.on("GET /v1/workers", ok([WORKER]))
    result = rlboost("ps", "--json")
    assert (result.exit_code, json.loads(result.stdout)["workers"]) == (0, [WORKER])


@pytest.mark.usefixtures("impatient")
def test_ps_of_a_remote_system_that_is_away_fails(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs", httpx.ConnectError("refused"))
    for flags in ([], ["--json"]):
        result = rlboost("ps", *flags)
        assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.parametrize(
    "command",
    [
        *(["status"], ["logs"], ["logs", "--follow"], ["follow"], ["pause"], ["resume"], ["cancel"]),
        *(["export", "--out", "o"], ["eval"]),
    ],
)
def test_every_command_prints_the_managers_unknown_job_error(rest: FakeRest, command: list[str]) -> None:
    verb, *flags = command
    rest.on("GET /v1/jobs", ok([job("running")]))
    rest.on("GET /v1/jobs/nope", problem(404, "No such job", "there is no job 'nope': list them"))
    result = rlboost(verb, "nope", *flags)
    assert (result.exit_code, result.stderr) == (1, "rlboost: No such job: there is no job 'nope': list them\n")


@pytest.mark.parametrize("job_id", ["sums/job.yaml", "", "..", "a b"])
def test_an_invalid_job_id_is_an_unknown_job(rest: FakeRest, job_id: str) -> None:
    result = rlboost("status", job_id)
    printed = f"rlboost: No such job: there is no job {job_id!r}: list them with 'rlboost ps' or GET /v1/jobs\n"
    assert (result.exit_code, result.stderr) == (1, printed)
    assert rest.requests == []


def test_a_local_worker_that_is_drained_is_marked_before_it_can_leave(
    rest: FakeRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(Path(".rlboost"))
    rest.on("GET /v1/workers", ok([{"id": f"worker-{n}-ab12", "state": "ready"} for n in (1, 2)]))
    rest.on("POST /v1/workers/worker-1-ab12/drain", ok({"id": "worker-1-ab12", "state": "draining"}, 202))
    rest.on("POST /v1/workers/worker-2-ab12/drain", problem(404, "No such worker", "no worker"))
    with state.owned():
        state.write_config(Config("http://api.test", "secret", "redis://x", str(state.path), os.getpid()))
        assert rlboost("worker", "drain", "worker-1-ab12").exit_code == 0
        assert rlboost("worker", "drain", "worker-2-ab12").exit_code == 1
        assert state.drained("worker-1")
        assert not state.drained("worker-2")


def test_a_worker_of_another_system_is_not_marked_here(rest: FakeRest) -> None:
    state = StateDir(Path(".rlboost"))
    rest.on("GET /v1/workers", ok([{"id": f"worker-{n}-ab12", "state": "ready"} for n in (1, 2)]))
    rest.on("POST /v1/workers/worker-1-ab12/drain", ok({"id": "worker-1-ab12", "state": "draining"}, 202))
    with state.owned():
        state.write_config(Config("http://127.0.0.1:1", "mine", "redis://x", str(state.path), os.getpid()))
        assert rlboost("worker", "drain", "worker-1-ab12").exit_code == 0
        assert not state.drained("worker-1")


def test_a_worker_can_be_drained_by_its_name(rest: FakeRest) -> None:
    workers = {"a-lost": "lost", "a-1": "ready", "b-1": "ready", "b-2": "joining", "c-1": "left", "d": "ready"}
    rest.on("GET /v1/workers", ok([{"id": worker, "state": state} for worker, state in workers.items()]))
    for worker in ("a-1", "b-2"):
        rest.on(f"POST /v1/workers/{worker}/drain", ok({"id": worker, "state": "draining"}, 202))
    rest.on("POST /v1/workers/c/drain", problem(404, "No such worker", "no worker 'c' is here"))
    drained = rlboost("worker", "drain", "a")
    assert (drained.stdout, drained.stderr) == ("a-1 is draining: it hands off its samples and exits\n", "")
    assert rlboost("worker", "drain", "b-2").exit_code == 0
    several = rlboost("worker", "drain", "b")
    assert (several.exit_code, several.stderr) == (
        1,
        "rlboost: several workers are named b: give the id of one: b-1, b-2\n",
    )
    gone = rlboost("worker", "drain", "c")
    assert (gone.exit_code, gone.stderr) == (1, "rlboost: No such worker: no worker 'c' is here\n")


@pytest.mark.parametrize(
    ("rest_role", "rest_state", "shown"),
    [
        ("preemptible", "ready", "was the last reserved worker: "),
        ("reserved", "suspended", ""),
        ("reserved", "draining", "was the last worker: "),
    ],
)
def test_drain_of_the_last_worker_of_a_role_warns(rest: FakeRest, rest_role: str, rest_state: str, shown: str) -> None:
    drained = {"id": "reserved-1-ab", "role": "reserved", "state": "ready"}
    rest.on("GET /v1/workers", ok([drained, {"id": "other-cd", "role": rest_role, "state": rest_state}]))
    rest.on("POST /v1/workers/reserved-1-ab/drain", ok({"id": "reserved-1-ab", "state": "draining"}, 202))
    warned = rlboost("worker", "drain", "reserved-1").stderr
    assert warned.startswith(f"rlboost: warning: reserved-1-ab {shown}") if shown else not warned


def test_join_becomes_the_worker_with_the_secret_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call))
    monkeypatch.setenv("RLBOOST_WORKER_SLOTS", "8")
    monkeypatch.delenv("RLBOOST_WORKER_NOTICES", raising=False)
    result = rlboost("worker", "join", "--url", "http://10.0.0.5:8700/", "--token", "s3", "--role", "reserved")
    assert result.exit_code == 0, result.stderr
    ((_, arguments, environment),) = became
    assert arguments[1:] == ["-m", "rlboost.services.rollout_worker"]
    own = {name: value for name, value in environment.items() if name.startswith("RLBOOST_")}
    assert own == {
        "RLBOOST_WORKER_URL": "http://10.0.0.5:8700",
        "RLBOOST_WORKER_ROLE": "reserved",
        "RLBOOST_WORKER_ENGINE": "torch",
        "RLBOOST_WORKER_SLOTS": "8",
        "RLBOOST_TOKEN": "s3",
    }


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--url", "http://10.0.0.5:8700"], "the token of http://10.0.0.5:8700 is unknown"),
        (["--url", "10.0.0.5:8700", "--token", "t"], "'10.0.0.5:8700' is not a URL"),
    ],
)
def test_join_without_url_or_token_names_the_missing_option(arguments: list[str], what: str) -> None:
    result = rlboost("worker", "join", *arguments)
    assert result.exit_code == 2
    assert what in result.stderr


# --- config check -----------------------------------------------------------------------------------------------------


def test_a_good_job_file_passes_the_check() -> None:
    write_job()
    result = rlboost("config", "check", "job.yaml")
    assert (result.exit_code, result.stdout) == (0, "job.yaml: no problem found\n"), result.stderr


def test_a_library_that_only_the_trainers_machine_needs_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron" else find_spec(name))
    write_job(trainer={"backend": "megatron"}, model="someone/somewhere")
    result = rlboost("config", "check", "job.yaml")
    assert (result.exit_code, result.stdout) == (0, "job.yaml: no problem found\n"), result.stderr
    assert result.stderr == (
        "rlboost: job.yaml: note: model: someone/somewhere is not a folder here: it is taken for a Hugging Face id\n"
        "rlboost: job.yaml: warning: trainer.backend: megatron needs megatron-core: pip install "
        "-c constraints.txt -e '.[megatron]' in the clone of rlboost "
        "(matters only if this machine trains the job)\n"
    )
    printed = json.loads(rlboost("config", "check", "job.yaml", "--json").stdout)
    assert (printed["ok"], printed["problems"], len(printed["warnings"])) == (True, [], 1)


def test_a_slow_part_of_the_check_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_files, "_SLOW_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with job_files.progress() as on_part:
        on_part("loading the tokenizer")
        for timer in threading.enumerate():
            if isinstance(timer, threading.Timer):
                timer.join(10)
    assert capsys.readouterr().err == "checking the job: loading the tokenizer ...\n"


def test_each_wrong_field_is_one_line() -> None:
    write_job(stepz=1, steps=0)
    result = rlboost("config", "check", "job.yaml")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert "rlboost: job.yaml: stepz: unknown key" in result.stderr
    assert "rlboost: job.yaml: steps: " in result.stderr


def test_each_missing_file_and_function_is_one_line() -> None:
    write_job(model="nowhere/at/all", data={"train": "none.jsonl"}, reward={"function": "my_reward:scored"})
    result = rlboost("config", "check", "job.yaml", "--json")
    assert result.exit_code == 2
    model, data, reward = json.loads(result.stdout)["problems"]
    assert model.startswith("model: there is no folder nowhere/at/all")
    assert data.startswith("data.train: none.jsonl: No such file")
    assert reward.startswith("reward.function: my_reward:scored is not a reward function")
    assert "did you mean 'score'?" in reward


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\n{"question": "b"}\n', "line 2: no key 'prompt'"),
        ('{"prompt": "a"}\nno json\n', "line 2 is not a JSON object"),
        ("3\n", "line 1 is not a JSON object"),
    ],
)
def test_a_bad_line_of_data_is_named(text: str, what: str) -> None:
    write_job()
    Path("train.jsonl").write_text(text)
    result = rlboost("config", "check", "job.yaml")
    assert result.exit_code == 2
    assert what in result.stderr


def test_a_model_folder_without_weights_is_named() -> None:
    write_job()
    Path("base/model.safetensors").unlink()
    assert "has no *.safetensors file" in rlboost("config", "check", "job.yaml").stderr
    Path("base/config.json").unlink()
    for step in (9, 10):
        Path(f"base/checkpoint-{step}").mkdir()
        Path(f"base/checkpoint-{step}/config.json").write_text("{}")
        os.utime(f"base/checkpoint-{step}/config.json", (step, step))
    assert "base has no config.json: it is not a Hugging Face model directory, but base/checkpoint-10 may be one" in (
        rlboost("config", "check", "job.yaml").stderr
    )


def test_a_hugging_face_id_is_left_to_the_trainer() -> None:
    write_job(model="Qwen/Qwen3-0.6B")
    assert rlboost("config", "check", "job.yaml").exit_code == 0


# --- up and down ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [Path(".rlboost"), Path("/tmp/x y")])
def test_up_prints_the_next_commands_and_where_the_token_is(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system._print_ready(Config("http://127.0.0.1:77", "mysecret", "redis://x", str(state.absolute()), 1), state)
    shown = capsys.readouterr().out
    assert "mysecret" not in shown
    assert str(state.absolute() / "config.json") in shown
    assert 'base_url="http://127.0.0.1:77/v1"' in shown
    flag = "" if state == Path(".rlboost") else " --state '/tmp/x y'"
    assert f"rlboost run JOB.yaml --follow{flag}\n" in shown


def test_down_without_a_system_reports_that_none_ran() -> None:
    assert rlboost("down").stdout == "no system ran in .rlboost\n"
    assert json.loads(rlboost("down", "--json").stdout) == {"stopped": False}


@pytest.mark.parametrize(
    ("workers", "reserved", "shown"), [(0, 0, "no workers: "), (1, 0, "no reserved worker: "), (0, 1, "")]
)
def test_up_warns_of_a_fleet_on_which_jobs_wait(
    workers: int, reserved: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_up_in_foreground", lambda *_, **__: None)
    warned = rlboost("up", f"--workers={workers}", f"--reserved={reserved}").stderr
    assert warned.startswith(f"rlboost: warning: {shown}") if shown else not warned


def test_up_names_the_bad_line_of_a_chaos_file() -> None:
    Path("chaos.csv").write_text("0,kill,worker-9\n")
    result = rlboost("up", "--chaos", "chaos.csv")
    assert result.exit_code == 2
    assert "line 1" in result.stderr
    assert "worker-9 is not present; present nodes: worker-1, worker-2, worker-3" in result.stderr
