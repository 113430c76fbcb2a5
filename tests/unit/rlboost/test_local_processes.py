from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rlboost.local.processes import (
    STARTING_ORDER,
    HttpReady,
    LaunchContext,
    LocalOptions,
    ProcessRole,
    ProcessSpec,
    initial_processes,
    spec_of,
    spot_names,
)
from rlboost.local.supervisor import Child
from rlboost.services.rollout_manager.domain.offers import Pool

PORTS = {
    "redis": 1,
    "weight-store": 2,
    "manager": 3,
    "trainer": 4,
    "reserved-1": 5,
    "worker-1": 6,
    "worker-2": 7,
    "standby": 8,
}


def context(options: LocalOptions | None = None, inherited: Mapping[str, str] | None = None) -> LaunchContext:
    return LaunchContext(
        options=options or LocalOptions(workers=2),
        state_dir=Path("/state"),
        cwd=Path("/mine"),
        inherited=inherited or {},
        token="the-token",
        join_token="the-join-token",
        redis_url="redis://:the-password@127.0.0.1:1/0",
        redis_argv=("redis-server", "/state/redis.conf"),
        port_of=PORTS.__getitem__,
    )


def test_roster_has_the_services_and_the_requested_workers() -> None:
    options = LocalOptions(reserved=1, workers=2)
    assert initial_processes(options) == [
        ("redis", "redis"),
        ("weight-store", "weight_store"),
        ("manager", "manager"),
        ("trainer", "trainer"),
        ("reserved-1", "reserved"),
        ("worker-1", "preemptible"),
        ("worker-2", "preemptible"),
    ]
    assert spot_names(options) == ["worker-1", "worker-2"]


def test_every_role_has_its_place_in_the_starting_order() -> None:
    staged = [role for stage in STARTING_ORDER for role in stage]
    assert sorted(staged) == sorted({role for _, role in initial_processes(LocalOptions(standby=True))})


def test_standby_starts_after_the_first_manager_leads() -> None:
    assert ("standby", "standby") in initial_processes(LocalOptions(standby=True))
    manager, standby = spec_of(context(), "manager", "manager"), spec_of(context(), "standby", "standby")
    assert standby.argv == manager.argv
    assert standby.env == {**manager.env, "RLBOOST_MANAGER_PORT": "8"}
    assert standby.ready == HttpReady("http://127.0.0.1:8/healthz")
    stages = {role: n for n, stage in enumerate(STARTING_ORDER) for role in stage}
    assert stages["manager"] < stages["standby"] < stages["reserved"]


def test_the_reserved_workers_are_dealt_out_to_the_trainers_in_turn() -> None:
    options = LocalOptions(reserved=3, workers=0, trainers=2)
    names = [name for name, role in initial_processes(options) if role in {"trainer", "reserved"}]
    assert names == ["trainer-1", "trainer-2", "reserved-1", "reserved-2", "reserved-3"]
    there = replace(context(options), port_of=lambda _: 9)
    told = [spec_of(there, name, "reserved").env["RLBOOST_WORKER_TRAINER"] for name in names[2:]]
    assert told == ["trainer-1", "trainer-2", "trainer-1"]
    own = [spec_of(there, name, "trainer").env["RLBOOST_TRAINER_NAME"] for name in names[:2]]
    assert own == ["trainer-1", "trainer-2"]


def test_trainers_that_share_time_name_the_same_device() -> None:
    there = replace(context(LocalOptions(trainers=2, reserved=0, time_share=True)), port_of=lambda _: 9)
    told = [spec_of(there, name, "trainer").env["RLBOOST_TRAINER_SHARED_DEVICE"] for name in ("trainer-1", "trainer-2")]
    assert told == ["trainers", "trainers"]
    assert "RLBOOST_TRAINER_SHARED_DEVICE" not in spec_of(context(), "trainer", "trainer").env


def test_a_single_trainer_needs_no_number() -> None:
    assert spec_of(context(), "trainer", "trainer").env["RLBOOST_TRAINER_NAME"] == "trainer"
    assert spec_of(context(), "reserved-1", "reserved").env["RLBOOST_WORKER_TRAINER"] == "trainer"
    assert "RLBOOST_WORKER_TRAINER" not in spec_of(context(), "worker-1", "preemptible").env


def test_worker_settings_name_the_manager_role_and_port() -> None:
    spec = spec_of(context(), "worker-2", "preemptible")
    assert spec.argv == (sys.executable, "-m", "rlboost.services.rollout_worker")
    assert spec.ready == HttpReady("http://127.0.0.1:7/healthz")
    assert spec.log == Path("/state/logs/worker-2.log")
    own = {name: value for name, value in spec.env.items() if name.startswith("RLBOOST_WORKER_")}
    assert own == {
        "RLBOOST_WORKER_HOST": "127.0.0.1",
        "RLBOOST_WORKER_PORT": "7",
        "RLBOOST_WORKER_URL": "http://127.0.0.1:3",
        "RLBOOST_WORKER_ROLE": "preemptible",
        "RLBOOST_WORKER_NAME": "worker-2",
        "RLBOOST_WORKER_ENGINE": "torch",
        "RLBOOST_WORKER_CACHE_DIR": "/state/cache",
    }


def test_trainer_and_manager_get_the_weight_store_url() -> None:
    trainer, manager = spec_of(context(), "trainer", "trainer"), spec_of(context(), "manager", "manager")
    assert trainer.env["RLBOOST_TRAINER_WEIGHT_STORE_URL"] == "http://127.0.0.1:2"
    assert manager.env["RLBOOST_MANAGER_WEIGHT_STORE_URL"] == "http://127.0.0.1:2"


@pytest.mark.parametrize(("name", "role"), initial_processes(LocalOptions(workers=2)))
def test_secrets_are_not_in_command_lines_or_reprs(name: str, role: str) -> None:
    spec = spec_of(context(), name, role)  # type: ignore[arg-type]  # a valid role
    shown = repr(spec) + repr(context())
    assert "the-token" not in shown
    assert "the-join-token" not in shown
    assert "the-password" not in shown
    assert not any("the-" in part for part in spec.argv)


@pytest.mark.parametrize(("name", "role"), [("reserved-1", "reserved"), ("worker-1", "preemptible")])
def test_worker_gets_only_the_join_token(name: str, role: str) -> None:
    env = spec_of(context(), name, role).env  # type: ignore[arg-type]  # a valid role
    assert env["RLBOOST_TOKEN"] == "the-join-token"
    assert not any("the-token" in value or "the-password" in value for value in env.values())
    manager = spec_of(context(), "manager", "manager").env
    assert (manager["RLBOOST_TOKEN"], manager["RLBOOST_MANAGER_JOIN_TOKEN"]) == ("the-token", "the-join-token")


def test_engine_gets_one_thread_unless_the_user_sets_another() -> None:
    assert spec_of(context(), "worker-1", "preemptible").env["OMP_NUM_THREADS"] == "1"
    told = context(inherited={"OMP_NUM_THREADS": "8"})
    assert spec_of(told, "worker-1", "preemptible").env["OMP_NUM_THREADS"] == "8"


def test_reward_functions_in_the_users_folder_can_be_imported() -> None:
    assert spec_of(context(), "trainer", "trainer").env["PYTHONPATH"] == "/mine"
    told = context(inherited={"PYTHONPATH": "/theirs"})
    assert spec_of(told, "trainer", "trainer").env["PYTHONPATH"] == "/mine:/theirs"


def test_the_options_environment_wins() -> None:
    spec = spec_of(context(LocalOptions(env={"RLBOOST_WORKER_ENGINE": "other"})), "worker-1", "preemptible")
    assert spec.env["RLBOOST_WORKER_ENGINE"] == "other"


def test_autoscaled_workers_are_of_the_kind_and_price_of_the_managers_pool() -> None:
    found = context(LocalOptions(autoscale=4), {"RLBOOST_WORKER_PRICE_PER_HOUR": "1.5"})
    manager, worker = spec_of(found, "manager", "manager"), spec_of(found, "worker-1", "preemptible")
    (pool,) = json.loads(manager.env["RLBOOST_MANAGER_POOLS"])
    assert Pool.model_validate(pool) == Pool(kind="local", max_workers=4, price_per_hour=1.5)
    assert worker.env["RLBOOST_WORKER_KIND"] == "local"
    assert "RLBOOST_WORKER_KIND" not in spec_of(found, "reserved-1", "reserved").env


def test_only_preemptible_workers_do_not_return_after_exit_code_0() -> None:
    """They were drained, for example as all workers cost more than a limit: a new one would be drained again."""
    roles: list[tuple[str, ProcessRole]] = [
        ("worker-1", "preemptible"),
        ("reserved-1", "reserved"),
        ("trainer", "trainer"),
        ("manager", "manager"),
    ]
    final = {name for name, role in roles if not spec_of(context(), name, role).restart_after_success}
    assert final == {"worker-1"}


async def test_output_of_a_process_whose_log_was_rotated(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("of earlier lives\n" * 9)
    child = Child(ProcessSpec("a", "manager", (sys.executable, "-c", "print('own')"), log))
    await child.wait()
    assert child.output(9) == ["own"]
    log.write_text("after logrotate\n")
    assert child.output(9) == ["after logrotate"]
