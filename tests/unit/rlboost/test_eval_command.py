"""`rlboost eval` against a scripted API: what it sends, what it prints, and when it fails."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rlboost import client, follow
from rlboost.cli import app
from rlboost.jobs.file import evaluation_of
from tests.support.fake_rest import FakeRest, job, lines, ok

JOB = {
    "name": "sums",
    "model": "base",
    "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
    "reward": {"function": "a:b"},
    "steps": 3,
    "eval": {"samples": 8},
}
ROW = {"step": 0, "eval/pass@1": 0.25, "eval/reward_mean": 0.3, "groups/dropped": 0.0, "time/step_s": 2.0}


@pytest.fixture(autouse=True)
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRest:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "_POLL_S", 0.0)
    fake = FakeRest()
    monkeypatch.setattr(client, "Client", partial(client.Client, transport=fake))
    monkeypatch.setenv("RLBOOST_URL", "http://api.test")
    monkeypatch.setenv("RLBOOST_TOKEN", "secret")
    Path("job.yaml").write_text(yaml.safe_dump(JOB))
    fake.on("POST /v1/jobs", ok({"id": "j-1", "state": "pending"}, 201))
    fake.on("GET /v1/jobs/j-1", ok(job("running")), ok(job("completed")))
    fake.on("GET /v1/jobs/j-1/metrics", ok([ROW]))
    return fake


def rlboost(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", "--no-check", *arguments])


def sent(rest: FakeRest) -> dict[str, Any]:
    [created] = [request for request in rest.requests if request.method == "POST"]
    spec: dict[str, Any] = json.loads(created.content)
    return spec


def test_evaluation_has_as_many_trainer_processes_as_the_job() -> None:
    layout = {"backend": "torch", "data_parallel": 2, "context_parallel": 4}
    assert evaluation_of({**JOB, "trainer": layout})["trainer"] == layout


def test_evaluation_divides_experts_as_the_job_and_has_no_other_replicas() -> None:
    layout = {"backend": "megatron", "data_parallel": 16, "expert_parallel": 8, "tensor_parallel": 2}
    layout |= {"sequence_parallel": True}
    assert evaluation_of({**JOB, "trainer": layout})["trainer"] == {**layout, "data_parallel": 8}
    dense = {"backend": "megatron", "data_parallel": 16, "pipeline_parallel": 2}
    assert evaluation_of({**JOB, "trainer": dense})["trainer"] == {**dense, "data_parallel": 1}


def test_a_job_files_model_is_evaluated_and_the_result_printed(rest: FakeRest) -> None:
    result = rlboost("job.yaml", "sampling.max_tokens=9", "--samples=20")
    assert result.exit_code == 0, result.output
    spec = sent(rest)
    assert (spec["kind"], spec["model"]) == ("eval", "base")
    assert not {"steps", "algorithm"} & spec.keys()
    assert "train" not in spec["data"]
    assert (spec["sampling"]["max_tokens"], spec["eval"]["samples"]) == (9, 20)
    assert "eval/pass@1" in result.stdout
    assert "0.25" in result.stdout
    assert "time/step_s" not in result.stdout


def test_a_completed_jobs_final_model_is_evaluated(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/done", ok(job("completed", id="done")))
    rest.on("GET /v1/jobs/done/spec", ok(JOB))
    saved = json.dumps({"kind": "model_saved", "fields": {"path": "runs/done/model"}})
    rest.on("GET /v1/jobs/done/events", lines(["id: 1-0", "event: model_saved", f"data: {saved}", ""]))
    result = rlboost("done", "--json")
    assert result.exit_code == 0, result.output
    assert sent(rest)["model"] == "runs/done/model"
    assert json.loads(result.stdout)["metrics"] == ROW


@pytest.mark.parametrize(("state", "text"), [("running", "is running, not completed"), ("completed", "is unknown")])
def test_a_job_without_a_final_model_needs_one_named(rest: FakeRest, state: str, text: str) -> None:
    rest.on("GET /v1/jobs/done", ok(job(state, id="done")))
    rest.on("GET /v1/jobs/done/spec", ok(JOB))
    rest.on("GET /v1/jobs/done/events", lines([]))
    result = rlboost("done")
    assert result.exit_code == 2
    assert text in result.stderr
    assert "--model" in result.stderr
    assert rlboost("done", "--model=elsewhere").exit_code == 0
    assert sent(rest)["model"] == "elsewhere"


def test_an_evaluation_that_does_not_complete_is_a_failure(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/j-1", ok(job("failed", error="not one group could be scored")))
    rest.on("GET /v1/jobs/j-1/metrics", ok([]))
    result = rlboost("job.yaml")
    assert result.exit_code == 1
    assert "j-1 failed: not one group could be scored" in result.stderr


def test_a_job_without_held_out_data_is_refused_before_anything_is_sent(rest: FakeRest) -> None:
    Path("job.yaml").write_text(yaml.safe_dump({**JOB, "data": {"train": "train.jsonl"}, "eval": None}))
    result = rlboost("job.yaml")
    assert result.exit_code == 2
    assert "rlboost: job.yaml: data.eval is not set" in result.stderr
    assert rest.requests == []


def test_a_model_among_the_values_that_win_is_evaluated_in_place_of_a_completed_jobs(rest: FakeRest) -> None:
    rest.on("GET /v1/jobs/done", ok(job("completed", id="done")))
    rest.on("GET /v1/jobs/done/spec", ok({**JOB, "reward": None}))
    assert rlboost("done", "model=elsewhere", "reward.function=a:b").exit_code == 0
    assert (sent(rest)["model"], sent(rest)["reward"]["function"]) == ("elsewhere", "a:b")


@pytest.mark.parametrize(
    "override",
    [
        *("optimizer.lr=3", "steps=7", "samplng.max_tokens=9", "data.train=t", "eval.every=3", "kind=eval"),
        "eval={samples: 8, every: 3}",
    ],
)
@pytest.mark.parametrize("target", ["job.yaml", "done"])
def test_a_value_that_no_evaluation_reads_is_refused(rest: FakeRest, target: str, override: str) -> None:
    result = rlboost(target, override)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"rlboost: override {override!r}: an evaluation reads name, model, ")
    assert "eval (samples, pass_reward, sets)" in result.stderr
    assert rest.requests == []


def test_every_setting_an_evaluation_reads_can_be_overridden(rest: FakeRest) -> None:
    given = ("name=n", "model=m", "reward.timeout_s=9", "sampling={top_p: 0.5}", "data.eval=e", "elastic.share=2")
    assert rlboost("job.yaml", *given, "trainer={seed: 4}", "eval.samples=2").exit_code == 0
    spec = sent(rest)
    assert (spec["name"], spec["model"], spec["data"]["eval"], spec["trainer"]["seed"]) == ("n-eval", "m", "e", 4)
    assert (spec["reward"]["timeout_s"], spec["sampling"]["top_p"], spec["elastic"]["share"]) == (9, 0.5, 2)
    assert spec["eval"]["samples"] == 2


def test_an_interrupted_command_cancels_the_evaluation(rest: FakeRest, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "follow", interrupted)
    rest.on("POST /v1/jobs/j-1/cancel", ok({"id": "j-1", "state": "cancelled"}, 202))
    result = rlboost("job.yaml")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[:2] == ["created j-1", "cancelled j-1"]
    assert [r.url.path for r in rest.requests if r.method == "POST"] == ["/v1/jobs", "/v1/jobs/j-1/cancel"]
