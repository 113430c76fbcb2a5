"""Fixtures that several kinds of tests use. A fixture that lacks its server skips the test, but fails it in CI."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import structlog
from hypothesis import HealthCheck, settings
from structlog.dev import plain_traceback

from rlboost.services.trainer.adapters.torch import ranks
from rlboost.shared.process.system import gc_paused
from tests.support.fork_server import popen_rank
from tests.support.redis_server import RedisServer
from tests.support.s3_server import S3Server

_PREFIXES = itertools.count()
_STDERR = pytest.StashKey[int]()
_ENDING_S = 300.0
"""How long a test may go on after its time limit has interrupted it, and how long what it used may take to end."""

# No worker of a test asks the metadata service of the machine that the test happens to run on.
os.environ.setdefault("RLBOOST_WORKER_NOTICES", "off")
# Models and data of tests lie in temporary folders.
os.environ.setdefault("RLBOOST_TRAINER_FOLDERS", "/")
# The Redis of most tests writes to no disk.
os.environ.setdefault("RLBOOST_MANAGER_REDIS_DURABILITY", "off")
# Models this small gain nothing from more threads, which wait for each other where there are fewer processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In colour, with the lines around and all locals, a traceback that nobody reads takes most of a second.
structlog.configure(
    [
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=plain_traceback),
    ]
)

# How long an example takes says more about the machine than about the code.
settings.register_profile(
    "unhurried",
    settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole run. A test that kills or restarts a server makes its own `RedisServer`."""
    try:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty Redis."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture(scope="session", autouse=True)
def _forked_ranks() -> Iterator[None]:
    """Fork the ranks that tests start in this process: their imports take seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen_rank}))
        yield


@pytest.fixture(scope="module", autouse=True)
def _collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect what a file leaves, and print what it has not closed, which would fail a test of any later file.

    A connection may stay open without a fault of the test: a task that is cancelled while asyncio connects leaves one.
    """
    yield
    left: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda found: left.append(f"{found.exc_value!r}"))
        gc.collect()
    for what in left:
        os.write(request.config.stash[_STDERR], f"\n{request.path.name} left: {what}\n".encode())


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3-compatible server for the whole run, with one bucket."""
    if importlib.util.find_spec("moto") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no moto: install the extra 'dev'")
        pytest.skip("no moto")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty prefix of that bucket; the environment says how to get there."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/test-{next(_PREFIXES)}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all test modules without the garbage collector, which takes a third of the time.

    It does not scan what they have created later, either: a full collection, which vLLM asks for several times as it
    starts, would take half a second.

    The compiled modules are written, whatever the environment says: compiling them takes as long as all else.
    """
    with gc_paused(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", False)
        result = yield
        gc.collect()
        gc.freeze()
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Keep a standard error that is not captured."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process, with all stacks, if a test does not end although its time limit interrupted it."""
    own = item.get_closest_marker("timeout")
    limit_s = own.args[0] if own is not None and own.args else float(item.config.getini("timeout"))
    with _ended_within(limit_s + _ENDING_S, item.config):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Do so again: pytest lifts the limit when the test has failed."""
    with _ended_within(_ENDING_S, item.config):
        return (yield)


@contextmanager
def _ended_within(limit_s: float, config: pytest.Config) -> Iterator[None]:
    faulthandler.dump_traceback_later(limit_s, exit=True, file=config.stash[_STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files so that all processors are busy until the end, and give tests of real processes time.

    With several test processes (`make test`) each takes the next file when it is done with one. Files of e2e and
    adapters, which compute, alternate with those of integration and contract, which mostly wait; short ones come last.
    """
    files: dict[str, list[str]] = {}
    for item in items:
        names = files.setdefault(_tier(item), [])
        if not names or names[-1] != item.path.name:
            names.append(item.path.name)
    order = {}
    for tier, names in files.items():
        names.sort(key=_length_rank)
        for i, name in enumerate(names):
            order[tier, name] = (tier == "unit", i / len(names), tier)
    items.sort(key=lambda item: order[_tier(item), item.path.name])
    for item in items:
        if _tier(item) in ("e2e", "integration") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


_LONG_FILES = (
    # Half a minute or more of one process, or, of unit tests, ten seconds; the longest first. Those of `make test-long`
    # are in the first four lines.
    *("test_mixed_fleet.py", "test_training_memory.py", "test_http_conformance.py", "test_faults.py"),
    *("test_compiled_layers.py", "test_command_line.py", "test_vllm_engine.py", "test_multi_node.py"),
    *("test_expert_parallel.py", "test_two_jobs.py", "test_ranks_offload.py", "test_local_system.py"),
    *("test_megatron.py", "test_gpu_layout.py", "test_evaluation.py", "test_soak.py", "test_upgrades.py"),
    *("test_published_environments.py", "test_verifiers_agent.py"),
    *("test_conversations.py", "test_real_fleet.py", "test_vllm_models.py", "test_rollout_manager.py"),
    *("test_rollout_worker.py", "test_ranks_weights.py", "test_launcher.py", "test_succession.py", "test_trainer.py"),
    *("test_weight_store.py", "test_megatron_policy.py", "test_trainer_engine_contract.py"),
    *("test_engine_contract.py", "test_mixture_families.py", "test_router_replay.py", "test_docs.py"),
    *("test_worker_app.py", "test_simulator.py"),
)


def _tier(item: pytest.Item) -> str:
    return next(
        (tier for tier in ("e2e", "integration", "contract", "adapters", "unit") if tier in item.path.parts), ""
    )


def _length_rank(name: str) -> int:
    return _LONG_FILES.index(name) if name in _LONG_FILES else len(_LONG_FILES)
