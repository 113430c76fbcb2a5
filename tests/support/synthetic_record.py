"""A made-up run of twelve steps: worker-2 is killed, worker-1 gets notice, worker-4 and worker-5 join."""

from __future__ import annotations

from typing import Any

from rlboost.report import (
    Change,
    JobEvent,
    Machine,
    Observation,
    PlannedChange,
    ProcessEvent,
    Record,
    SeenWorker,
    Settings,
)

JOB = "countdown-abc"
BEGAN_AT = 1_800_000_000.0
READY_AT = BEGAN_AT + 10
JOB_AT = BEGAN_AT + 11
STEPS = 12
STEP_S = 5.0
END_AT = JOB_AT + (STEPS + 1) * STEP_S
KILLED_AT, MISSED_AT = JOB_AT + 12, JOB_AT + 14
SILENT_S = 2.0
NOTICED_AT, LEFT_AT = JOB_AT + 32, JOB_AT + 33
JOINED_AT = {"worker-4": JOB_AT + 17, "worker-5": JOB_AT + 38}

AUDIT = {
    "requested": 3276,
    "delivered": 3276,
    "dropped": {},
    "in_flight": 0,
    "duplicates": 0,
    "tokens_generated": 200_300,
    "tokens_delivered": 200_000,
    "tokens_regenerated": {"late": 300},
    "tokens_saved": 5_000,
    "preemptions": {"with_notice": 1, "without_notice": 1},
    "migrations": 130,
}

TOKENS_OF_A_STEP = {"worker-3-aaaa": 4800, "worker-1-aaaa": 2400, "worker-1-bbbb": 1200, "reserved-1-aaaa": 480}


def row(step: int) -> dict[str, float]:
    """One step's metrics; the last one only evaluates."""
    times = {"time/seeding_s": 1.0, "time/wait_s": 1.5, "time/train_s": 1.8, "time/publish_s": 0.2, "time/step_s": 4.8}
    metrics: dict[str, float] = {"step": step, "samples/duplicates": 0.0, **times}
    if step < STEPS:
        metrics |= {"reward/mean": 0.2 + 0.04 * step, "completions/mean_length": 30.0 + 3 * step}
    if step % 4 == 0:
        metrics |= {"eval/reward_mean": 0.17 + 0.05 * step, "eval/mean_length": 31.0 + 3 * step}
    return metrics


def job_event(at: float, kind: str, **fields: Any) -> JobEvent:
    return JobEvent(at=at, kind=kind, source="manager", fields=fields)


def state(at: float, name: str, now: str, before: str) -> JobEvent:
    role = "reserved" if name.startswith("reserved") else "preemptible"
    return job_event(at, "worker_state", worker=f"{name}-aaaa", role=role, job_id=JOB, state=now, before=before)


def gone(at: float, kind: str, name: str, reason: str, preempted: str | None, job_id: str = JOB) -> JobEvent:
    silent = {"silent_s": SILENT_S} if kind == "worker_lost" else {}
    return job_event(at, kind, worker=f"{name}-aaaa", job_id=job_id, reason=reason, preempted=preempted, **silent)


def job_events() -> list[JobEvent]:
    events = [job_event(JOB_AT + 0.1, "job_state_changed", state="running", before="pending", error="")]
    for name in ("reserved-1", "worker-1", "worker-2", "worker-3"):
        events += [state(JOB_AT + 0.5, name, "pulling", "joining"), state(JOB_AT + 1, name, "ready", "pulling")]
    for step in range(STEPS):
        at = JOB_AT + 2 + step * STEP_S
        events += [
            state(at, "reserved-1", "suspended", "ready"),
            job_event(at, "samples_unassigned", worker="reserved-1-aaaa", samples=40, tokens=400, cause="suspended"),
            job_event(at, "samples_migrated", worker="worker-3-aaaa", samples=40, tokens=400),
            state(at + 3.5, "reserved-1", "ready", "suspended"),
            job_event(at + 3.6, "step_ended", step=step, step_s=4.8, tokens=TOKENS_OF_A_STEP),
        ]
    events += [
        job_event(MISSED_AT, "samples_unassigned", worker="worker-2-aaaa", samples=50, tokens=2500, cause="lost"),
        gone(MISSED_AT, "worker_lost", "worker-2", "its lease ran out", "without_notice"),
        job_event(MISSED_AT, "samples_migrated", worker="worker-1-aaaa", samples=30, tokens=1500),
        job_event(MISSED_AT + 0.3, "samples_migrated", worker="worker-3-aaaa", samples=15, tokens=750),
        job_event(MISSED_AT + 0.6, "samples_migrated", worker="worker-3-aaaa", samples=5, tokens=250),
        job_event(NOTICED_AT, "worker_notice", worker="worker-1-aaaa", job_id=JOB, reason="sigterm", lead_s=30.0),
        job_event(LEFT_AT, "samples_unassigned", worker="worker-1-aaaa", samples=20, tokens=900, cause="left"),
        gone(LEFT_AT, "worker_left", "worker-1", "sigterm", "with_notice"),
        job_event(LEFT_AT, "samples_migrated", worker="worker-3-aaaa", samples=20, tokens=900),
        job_event(END_AT, "job_state_changed", state="completed", before="running", error=""),
    ]
    for name, at in JOINED_AT.items():
        events += [
            job_event(at + 3, "worker_joined", worker=f"{name}-aaaa", role="preemptible", worker_kind="torch-cpu"),
            state(at + 4, name, "pulling", "joining"),
            state(at + 6, name, "ready", "pulling"),
        ]
    return sorted(events, key=lambda event: event.at)


def seen(name: str, joined_at: float, speed: float = 1000.0, **changes: Any) -> SeenWorker:
    role = "reserved" if name.startswith("reserved") else "preemptible"
    known: dict[str, Any] = {"state": "ready", "version": 3, "running": 40, "tokens_per_s": speed}
    return SeenWorker(id=f"{name}-aaaa", role=role, joined_at=joined_at, **(known | changes))


def observations() -> list[Observation]:
    found = []
    for second in range(int(END_AT - JOB_AT) + 1):
        at = JOB_AT + second
        workers = [seen("reserved-1", READY_AT, 400), seen("worker-3", READY_AT)]
        workers += [seen("worker-1", READY_AT)] if at < LEFT_AT else []
        workers += [seen("worker-2", READY_AT)] if at < MISSED_AT else []
        workers += [seen(name, joined_at) for name, joined_at in JOINED_AT.items() if at > joined_at + 3]
        waits = ("samples of step 3", "100 of 256 samples are there") if second % 3 else ("", "")
        step = min(STEPS, int(second / STEP_S))
        found.append(
            Observation(
                at=at,
                step=step,
                job_state="running",
                waiting_for=waits[0],
                waiting_because=waits[1],
                workers=workers,
            )
        )
    return found


def sample(name: str, spans: list[tuple[str, int, int]], **changes: Any) -> dict[str, Any]:
    """A sample of step 2 as the API shows it."""
    text = "<think>3+8=11*4=44 ✓</think>3+8=11*4=44<eos>"
    fields: dict[str, Any] = {
        "sample": name,
        "step": 2,
        "is_eval": False,
        "prompt": "<bos>3,8,4>44",
        "completion": text,
        "reward": 1.0,
        "reason": "",
        "finish": "stop",
        "spans": [list(span) for span in spans],
        "n_tokens": sum(n for _, _, n in spans),
        "span_characters": [24, len(text) - 24],
    }
    return fields | changes


def record(**changes: Any) -> Record:
    """The whole record, with fields replaced."""
    actions: list[tuple[float, int, Any, str]] = [
        (KILLED_AT, 2, "kill", "worker-2"),
        (JOINED_AT["worker-4"], 3, "join", "worker-4"),
        (NOTICED_AT, 6, "notice", "worker-1"),
        (JOINED_AT["worker-5"], 7, "join", "worker-5"),
    ]
    kinds = {"kill": "killed", "notice": "noticed", "join": "joined"}
    fields: dict[str, Any] = {
        "settings": Settings(steps=STEPS, workers=3, reserved=1, chaos=True, seed=0, goal=0.7),
        "machine": Machine(cores=2, load=0.1, platform="Linux x86_64", python="3.11.2"),
        "planned": [PlannedChange(at_step=step, action=action) for _, step, action, _ in actions],
        "began_at": BEGAN_AT,
        "ready_at": READY_AT,
        "job_began_at": JOB_AT,
        "job_ended_at": END_AT,
        "job": {"id": JOB, "name": "countdown", "state": "completed", "error": None},
        "steps": [row(step) for step in range(STEPS + 1)],
        "changes": [Change(at=at, step=step, action=action, worker=name) for at, step, action, name in actions],
        "process_events": [ProcessEvent(at=at, kind=kinds[a], name=name, detail="") for at, _, a, name in actions],
        "job_events": job_events(),
        "observations": observations(),
        "samples": {3: [sample("1/2/7/3", [("worker-2-aaaa", 2, 11), ("worker-1-aaaa", 2, 9)])]},
        "audit": AUDIT,
        "cpu_s": {"trainer": 60.0, "reserved engine": 20.0, "spot engines": 80.0, "manager": 10.0, "demo": 2.0},
        "cpu_to_start_s": 20.0,
    }
    return Record(**(fields | changes))


def unfinished() -> Record:
    """A run that ended before there was anything to see."""
    nothing: dict[str, Any] = {"steps": [], "changes": [], "process_events": [], "job_events": [], "observations": []}
    nothing |= {"samples": {}, "audit": {}, "cpu_s": {}, "job": {}}
    return record(**nothing, ready_at=None, job_began_at=None, job_ended_at=None)
