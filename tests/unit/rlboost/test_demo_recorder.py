from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlboost.client import ServerEvent
from rlboost.demo.summary import Recorder, observation, this_machine
from rlboost.local.state import ProcessRecord
from rlboost.local.supervisor import ClusterEvent
from rlboost.report import load
from rlboost.shared.errors import ConfigError
from tests.support.fake_rest import job
from tests.support.synthetic_record import record, sample, unfinished

WORKER = {
    "id": "worker-1-abcd",
    "role": "preemptible",
    "state": "ready",
    "weight_version": None,
    "running": 3,
    "tokens_per_s": 12.345,
    "joined_at": "2026-01-01T00:00:10+00:00",
    "price_per_hour": 0.5,
}


def test_an_observation_omits_lost_and_left_workers() -> None:
    waiting = {"for": "samples", "because": "they are slow", "since": "2026-01-01T00:00:00+00:00", "limit_s": None}
    seen = observation(5.0, job("running", 2, waiting=waiting), [WORKER, {**WORKER, "state": "lost"}])
    assert (seen.step, seen.job_state, seen.waiting_for, seen.waiting_because) == (
        2,
        "running",
        "samples",
        "they are slow",
    )
    (worker,) = seen.workers
    assert (worker.joined_at, worker.version, worker.running) == (1767225610.0, None, 3)
    assert seen.tokens_per_s == 12.3


def test_observation_of_a_job_without_a_wait_has_empty_waiting_for() -> None:
    assert observation(5.0, job("running"), []).waiting_for == ""


def test_recorder_keeps_the_order_of_events_and_changes() -> None:
    recorder = Recorder(unfinished())
    recorder.process_event(ClusterEvent("killed", "worker-1", 1.0))
    body = {"kind": "worker_lost", "at": 2.0, "source": "manager", "fields": {"worker": "worker-1-a", "reason": "x"}}
    recorder.job_event(ServerEvent("1-0", "worker_lost", body))
    recorder.changed(1.0, 3, "kill", "worker-1")
    made = recorder.record
    assert [event.kind for event in made.process_events] == ["killed"]
    assert made.job_events[0].fields == {"worker": "worker-1-a", "reason": "x"}
    assert made.applied("kill") == 1


def test_recorder_retains_samples_in_each_order_of_the_page() -> None:
    recorder = Recorder(unfinished())
    rows = [sample(str(i), [("worker-1-a", 2, 5)], reward=i / 100) for i in range(40)]
    rows[20]["spans"] = [["worker-2-a", 2, 3], ["worker-1-a", 2, 2]]
    rows[30] |= {"reward": 9.0, "is_eval": True}
    recorder.samples(3, rows)
    assert [row["sample"] for row in recorder.record.samples[3]] == [
        *(str(i) for i in range(8)),
        "20",
        *(str(i) for i in range(32, 40)),
    ]
    recorder.samples(4, [])
    assert list(recorder.record.samples) == [3]


def test_processor_time_is_summed_by_kind_of_process() -> None:
    recorder = Recorder(unfinished())
    names = {"worker-1": "preemptible", "worker-2": "preemptible", "trainer": "trainer"}
    processes = [ProcessRecord(name, role, 1, "", 0, alive=True) for name, role in names.items()]
    recorder.cpu(processes, {"worker-1": 1.0, "worker-2": 2.0, "trainer": 4.0}, own_s=0.5)
    cpu_s = recorder.record.cpu_s
    assert (cpu_s["spot engines"], cpu_s["trainer"], cpu_s["demo"], cpu_s["redis"]) == (3.0, 4.0, 0.5, 0.0)


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new/record.json"
    Recorder(record()).save(file)
    assert load(file) == record()


def test_load_refuses_a_file_that_is_not_a_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json: No such file or directory: name the record\.json of a run"):
        load(tmp_path / "no.json")
    for text, complaint in (("[", "Invalid JSON"), (json.dumps({"format": 1}), "format")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"bad\.json is not the record of a run: .*{complaint}"):
            load(tmp_path / "bad.json")


def test_the_machine_is_described() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.python.startswith("3.")
