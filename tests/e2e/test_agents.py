"""A job whose samples are sessions of an agent on OpenAI's client: worker, manager and trainer are killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.black_box import ROOT, BlackBox, Observer, black_box, start_forked

pytestmark = pytest.mark.timeout(600)

STEPS, PROMPTS, GROUP = 5, 6, 4
FAULTS = ("groups/dropped", "conversations/lost", "samples/duplicates")


def second_try() -> dict[str, Any]:
    """Return the example's job, with few prompts a step."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/second_try/agent.yaml").read_text())
    spec["data"]["prompts_per_step"] = PROMPTS
    spec["algorithm"]["group_size"] = GROUP
    spec["trainer"]["checkpoint_every"] = 2
    return {**spec, "steps": STEPS, "eval": {"every": 10, "samples": PROMPTS}}


def test_agents_survive_the_death_of_worker_manager_and_trainer(tmp_path: Path) -> None:
    with black_box(tmp_path / "state", workers=2) as box:
        job_id = box.submit(second_try())
        with closing(Observer(box.redis_url, job_id)) as observer:
            for step, role in enumerate(("preemptible", "manager", "trainer")):
                box.until_step(job_id, step)
                assert box.until_busy(job_id)
                pids = {process["role"]: process["pid"] for process in box.processes()}
                os.kill(pids[role], signal.SIGKILL)
            box.until_completed(job_id)
        n_turns = observer.check()
        audit = box.get(f"/v1/jobs/{job_id}/audit")
        assert audit["requested"] == audit["delivered"] == n_turns, audit
        assert (audit["dropped"], audit["in_flight"]) == ({}, 0)
        rows = box.get(f"/v1/jobs/{job_id}/metrics")
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        faults = {name: [row.get(name, 0) for row in rows] for name in FAULTS}
        assert not any(map(any, faults.values())), faults
        # The trainer computes the log-probabilities of each row again: the tokens are those that were generated.
        assert max(row["mismatch_kl"] for row in rows[:STEPS] if "mismatch_kl" in row) < 1e-5
        assert max(row["turns/max"] for row in rows[:STEPS]) == 2
        assert all(row["turns/model_s"] > 0 and row["turns/outside_s"] > 0 for row in rows[:STEPS])
        shown = box.get(f"/v1/jobs/{job_id}/samples")
        for sample in shown:
            times = [message["time"] for message in sample["messages"] if message["role"] == "assistant"]
            assert all(0 <= start <= end <= sample["duration_s"] for start, end in times), sample
            assert 0 <= sample["outside_s"] <= sample["duration_s"]
        assert {sample["reward"] for sample in shown} <= {0.0, 0.5, 1.0}
        assert len({sample["sample"] for sample in shown}) == len(shown) == STEPS * PROMPTS * GROUP + 2 * PROMPTS


class Host:
    """`rlboost agents`, with a token of its scope only."""

    def __init__(self, box: BlackBox, log: Path, job: str, function: str, *options: str) -> None:
        token = httpx.post(
            f"{box.url}/v1/tokens", json={"scope": "agent"}, headers={"Authorization": f"Bearer {box.token}"}
        ).json()["secret"]
        arguments = (job, function, "--url", box.url, "--token", token, *options)
        self.log = log
        self.process = start_forked("agents", *arguments, log=log)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> str:
        """Return what it has printed, once it ends by itself."""
        assert self.process.wait(60) == 0, self.log.read_text()
        return self.log.read_text()


def test_remote_agents_survive_the_death_of_host_manager_and_trainer(tmp_path: Path) -> None:
    """Two hosts share the sessions; each step, something dies while they run."""
    spec = second_try()
    function = spec["agent"].pop("function")
    spec["agent"]["remote"] = True
    with black_box(tmp_path / "state", workers=2) as box:
        job_id = box.submit(spec)
        hosts = [Host(box, tmp_path / f"host-{i}.log", job_id, function) for i in range(2)]
        with closing(Observer(box.redis_url, job_id)) as observer:
            for step, role in enumerate(("host", "manager", "trainer")):
                box.until_step(job_id, step)
                assert box.until_busy(job_id)
                if role == "host":
                    hosts.pop().kill()
                    hosts.append(Host(box, tmp_path / "host-2.log", job_id, function))
                else:
                    pids = {process["role"]: process["pid"] for process in box.processes()}
                    os.kill(pids[role], signal.SIGKILL)
            box.until_completed(job_id)
        n_turns = observer.check()
        printed = [host.end() for host in hosts]
        assert all("sessions ended here, 0 of them without a reward" in text for text in printed), printed
        audit = box.get(f"/v1/jobs/{job_id}/audit")
        assert audit["requested"] == audit["delivered"] == n_turns, audit
        assert (audit["dropped"], audit["in_flight"]) == ({}, 0)
        rows = box.get(f"/v1/jobs/{job_id}/metrics")
        faults = {name: [row.get(name, 0) for row in rows] for name in FAULTS}
        assert not any(map(any, faults.values())), faults
        assert max(row["mismatch_kl"] for row in rows[:STEPS] if "mismatch_kl" in row) < 1e-5
        shown = box.get(f"/v1/jobs/{job_id}/samples")
        assert {sample["reward"] for sample in shown} <= {0.0, 0.5, 1.0}
        assert len({sample["sample"] for sample in shown}) == len(shown) == STEPS * PROMPTS * GROUP + 2 * PROMPTS


def test_each_misbehaving_remote_agent_fails_alone_with_its_cause(tmp_path: Path) -> None:
    faults = {"raises": "agent_infrastructure", "not a number": "agent_infrastructure", "hangs": "agent_infrastructure"}
    results = ["calls for ever", "edits its history", "", ""]
    rows = [{"prompt": f"{2 + i},3,4>4{i}", "fault": fault} for i, fault in enumerate([*faults, *results])]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = second_try()
    del spec["eval"]
    spec["data"] = {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": len(rows)}
    spec["agent"] = {"remote": True, "max_turns": 3, "timeout_s": 25, "replacements": 1}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit({**spec, "steps": 1})
        host = Host(box, tmp_path / "host.log", "second-try-agent", "tests.support.agents:run")
        job = box.until_completed(job_id)
        assert "the tool server is down" in host.end()
        (row,) = box.get(f"/v1/jobs/{job_id}/metrics")
        assert row["groups/dropped/agent_infrastructure"] == len(faults)
        shown = box.get(f"/v1/jobs/{job_id}/samples")
        assert len(shown) == len(results) * GROUP
        assert {sample["reward"] for sample in shown if sample["turns"] == 3} == {0.0}
        warned = " ".join(job["warnings"]) + " ".join(str(event) for event in box.events(job_id))
        for cause in ("the tool server is down", "the agent returned the reward nan", "no reward within 25 s"):
            assert cause in warned


FAULTY = {
    "raises": "agent_raised",
    "nothing": "agent_raised",
    "not a number": "agent_raised",
    "hangs": "agent_timeout",
    "dies": "agent_crashed",
    "no call": "agent_made_no_call",
}
RESULTS = ("calls for ever", "calls for ever, and looks", "edits its history", "", "", "")


def test_each_misbehaving_agent_fails_alone_with_its_cause(tmp_path: Path) -> None:
    """One row of data for each way to misbehave."""
    faults = [*FAULTY, *RESULTS]
    rows = [{"prompt": f"{2 + i % 7},3,4>4{i % 10}", "fault": fault} for i, fault in enumerate(faults)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = second_try()
    del spec["eval"]
    spec["data"] = {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": len(rows)}
    spec["agent"] = {"function": "tests.support.agents:run", "max_turns": 3, "timeout_s": 15, "replacements": 1}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit({**spec, "steps": 1})
        job = box.until_completed(job_id)
        (row,) = box.get(f"/v1/jobs/{job_id}/metrics")
        # In each group one session begins again, and the third that is lost for good leaves too few.
        for reason in set(FAULTY.values()) - {"agent_made_no_call"}:
            n_groups = list(FAULTY.values()).count(reason)
            n_lost = row.get(f"conversations/lost/{reason}", 0)
            assert n_groups * (GROUP - 1) <= n_lost <= n_groups * (GROUP + 1), reason
        dropped = {reason: row.get(f"groups/dropped/{reason}", 0) for reason in FAULTY.values()}
        assert dropped == {"agent_raised": 3, "agent_timeout": 1, "agent_crashed": 1, "agent_made_no_call": 1}
        shown = box.get(f"/v1/jobs/{job_id}/samples")
        assert len(shown) == len(RESULTS) * GROUP
        by_turns = {sample["turns"] for sample in shown}
        assert by_turns == {1, 2, 3}
        cut = [sample for sample in shown if sample["turns"] == 3]
        assert {sample["reward"] for sample in cut} == {0.0, 0.75}
        assert len(cut) == 2 * GROUP
        assert row["mismatch_kl"] < 1e-5
        warned = " ".join(job["warnings"]) + " ".join(str(event) for event in box.events(job_id))
        for cause in ("the tool server is down", "the agent returned None", "no turn of its session is left"):
            assert cause in warned


def test_agent_that_is_a_program_trains(tmp_path: Path) -> None:
    spec = second_try()
    del spec["eval"]
    command = ["tests/support/agent_program.py"]
    spec["agent"] = {"function": "rlboost.agents.program:run", "arguments": {"command": command}, "timeout_s": 60}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit({**spec, "steps": 2})
        box.until_completed(job_id)
        rows = box.get(f"/v1/jobs/{job_id}/metrics")
        assert not any(row.get(name, 0) for row in rows for name in FAULTS)
        assert {sample["reward"] for sample in box.get(f"/v1/jobs/{job_id}/samples")} <= {0.0, 0.25, 0.5, 0.75, 1.0}


def test_step_whose_agents_all_fail_ends_the_job_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "2,3,4>20", "fault": "fails at once"}) + "\n")
    spec = second_try()
    del spec["eval"]
    spec["data"] = {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": 2}
    spec["agent"] = {"function": "tests.support.agents:run", "max_turns": 1, "timeout_s": 30}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit({**spec, "name": "no.call-0.6b"})
        box.until(lambda: box.get(f"/v1/jobs/{job_id}")["state"] == "failed", "the job has failed", 120)
        error = box.get(f"/v1/jobs/{job_id}")["error"]
        assert "no group of step 1 could be scored" in error
        assert "check agent.function tests.support.agents:run" in error
        assert "KeyError" in error
        job_id = box.submit(
            {**spec, "name": "dots.are.0.6b", "steps": 1, "agent": {**spec["agent"], "arguments": {"fault": ""}}}
        )
        box.until_completed(job_id)


def test_groups_of_equal_rewards_are_replaced_although_agents_end_late(tmp_path: Path) -> None:
    rows = [{"prompt": f"2,3,4>{20 + i}", "fault": "ends late"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = second_try()
    del spec["eval"]
    spec["data"] = {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": 2}
    spec["algorithm"] = {"name": "grpo", "group_size": 2, "resample": 2}
    spec["agent"] = {"function": "tests.support.agents:run", "max_turns": 1, "timeout_s": 60}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit({**spec, "steps": 1})
        box.until_completed(job_id, 120)
        assert len(box.get(f"/v1/jobs/{job_id}/samples")) == 2 * 2 * (1 + 2)


def test_sessions_of_steps_that_are_generated_ahead_begin_again(tmp_path: Path) -> None:
    """Half of the rows have an agent that fails the first time."""
    rows = [{"prompt": f"2,3,4>{20 + i}", "fault": "" if i % 2 else f"fails once {tmp_path}"} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = second_try()
    del spec["eval"]
    spec["data"] = {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": 3}
    spec["agent"] = {"function": "tests.support.agents:run", "max_turns": 1, "timeout_s": 60}
    spec["elastic"] = {"seeding": 1.0, "max_staleness": 1}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit({**spec, "steps": 4})
        box.until_completed(job_id)
        rows_of_steps = box.get(f"/v1/jobs/{job_id}/metrics")
        n_lost = sum(row.get("conversations/lost", 0) for row in rows_of_steps)
        assert n_lost == sum(row.get("conversations/begun_again", 0) for row in rows_of_steps) > 0
        assert not any(row["groups/dropped"] for row in rows_of_steps)
        assert len(box.get(f"/v1/jobs/{job_id}/samples")) == 4 * 3 * GROUP
