from __future__ import annotations

from rlboost.report.timeline import Migration, Row, migrations, rows
from tests.support.synthetic_record import (
    BEGAN_AT,
    END_AT,
    JOB_AT,
    JOINED_AT,
    KILLED_AT,
    LEFT_AT,
    MISSED_AT,
    NOTICED_AT,
    READY_AT,
    record,
    seen,
    told,
    unfinished,
)


def by_name() -> dict[str, Row]:
    return {row.name: row for row in rows(record())}


def states(row: Row) -> list[tuple[float, float, str]]:
    return [(span.began_at, span.ended_at, span.state) for span in row.spans]


def test_timeline_rows_start_with_reserved_workers_and_end_with_joined_ones() -> None:
    assert [row.name for row in rows(record())] == [
        "reserved-1",
        "worker-1",
        "worker-2",
        "worker-3",
        "worker-4",
        "worker-5",
    ]


def test_timeline_of_an_earlier_worker_begins_with_its_first_state() -> None:
    assert states(by_name()["worker-3"]) == [
        (READY_AT, JOB_AT + 0.5, "joining"),
        (JOB_AT + 0.5, JOB_AT + 1, "pulling"),
        (JOB_AT + 1, END_AT, "ready"),
    ]


def test_between_its_death_and_its_discovery_a_worker_is_silent() -> None:
    row = by_name()["worker-2"]
    assert row.killed_at == KILLED_AT
    assert states(row)[-2:] == [(JOB_AT + 1, KILLED_AT, "ready"), (KILLED_AT, MISSED_AT, "silent")]


def test_a_worker_with_notice_drains_and_leaves() -> None:
    row = by_name()["worker-1"]
    assert row.noticed_at == NOTICED_AT
    assert states(row)[-1] == (NOTICED_AT, LEFT_AT, "draining")


def test_a_worker_that_joins_counts_from_the_start_of_its_process() -> None:
    at = JOINED_AT["worker-4"]
    row = by_name()["worker-4"]
    assert row.joined_at == at
    assert states(row) == [
        (at, at + 3, "joining"),
        (at + 3, at + 4, "joining"),
        (at + 4, at + 6, "pulling"),
        (at + 6, END_AT, "ready"),
    ]


def test_a_worker_that_never_reached_the_manager_has_a_row_too() -> None:
    made = record(job_events=[], observations=[])
    (row,) = [row for row in rows(made) if row.name == "worker-4"]
    assert states(row) == [(JOINED_AT["worker-4"], END_AT, "joining")]


def test_samples_taken_over_bit_by_bit_are_one_migration() -> None:
    moves = [move for move in migrations(record()) if move.cause != "suspended"]
    assert moves == [
        Migration(MISSED_AT, "worker-2", "worker-1", 30, 1500, "lost"),
        Migration(MISSED_AT + 0.3, "worker-2", "worker-3", 20, 1000, "lost"),
        Migration(LEFT_AT, "worker-1", "worker-3", 20, 900, "left"),
    ]


def test_samples_that_the_reserved_engine_hands_over_are_migrations_too() -> None:
    assert sum(move.cause == "suspended" for move in migrations(record())) == 12


def test_a_record_without_events_has_no_rows_but_those_of_the_first_look() -> None:
    assert rows(unfinished()) == []
    made = record(job_events=[], changes=[])
    made.observations[0].workers = [seen("worker-1", BEGAN_AT - 100)]
    assert [(row.name, states(row)) for row in rows(made)] == [("worker-1", [(BEGAN_AT, END_AT, "ready")])]


def test_samples_that_were_finished_meanwhile_are_not_looked_for_in_a_later_step() -> None:
    made = record()
    made.job_events = [
        told(JOB_AT + 1, "samples_unassigned", worker="worker-2-aaaa", samples=9, tokens=90, cause="lost"),
        told(JOB_AT + 1, "samples_migrated", worker="worker-1-aaaa", samples=5, tokens=50),
        told(JOB_AT + 8, "samples_unassigned", worker="worker-1-aaaa", samples=2, tokens=20, cause="left"),
        told(JOB_AT + 8, "samples_migrated", worker="worker-3-aaaa", samples=2, tokens=20),
    ]
    assert [(move.source, move.target, move.samples) for move in migrations(made)] == [
        ("worker-2", "worker-1", 5),
        ("worker-1", "worker-3", 2),
    ]
