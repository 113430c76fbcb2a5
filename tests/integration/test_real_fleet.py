"""Real workers under a real manager, with weights that the trainer's own code has published."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from rlboost.services.rollout_worker.adapters import manager_http
from rlboost.services.rollout_worker.adapters.manager_http import join
from rlboost.services.rollout_worker.domain.load import round_up
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import SampleDropped
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.streams.names import worker_reports
from rlboost.shared.wire import I32, length
from tests.support import dial_out_only, published_model
from tests.support.dial_out_only import Outside
from tests.support.eventually import eventually
from tests.support.real_fleet import RealFleet, lines
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.worker_manager import JoinServer

pytestmark = pytest.mark.timeout(300)


def samples_of(worker: ServiceProcess) -> int:
    """Return how many samples a worker runs, or lets wait, by its own account."""
    told = httpx.get(f"{worker.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text.splitlines()
    names = ("rlboost_worker_running ", "rlboost_worker_pending ")
    return sum(int(float(line.split()[1])) for line in told if line.startswith(names))


LONG = 800
"""Tokens of a sample that outlives what a test does to its worker."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    fleet = RealFleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def good(fleet: RealFleet) -> ServiceProcess:
    """A worker that stays."""
    return fleet.hire("good")


async def test_a_worker_that_joins_passes_the_trainers_canary_and_serves(
    fleet: RealFleet, good: ServiceProcess
) -> None:
    samples = await fleet.delivered(await fleet.request(n=2, max_tokens=20))
    assert [length(sample.tokens, I32) for sample in samples] == [20, 20]
    passed = lines(good, "parity_check_passed")[0]
    assert passed["mean"] <= passed["worst"] < 1e-4
    (first,) = await eventually(lambda: lines(good, "first_token"))
    assert first["parity_s"] >= passed["took_s"] > 0


@pytest.mark.timeout(240)
async def test_small_kv_cache_next_to_a_large_one_loses_no_sample(fleet: RealFleet, good: ServiceProcess) -> None:
    model, n_tokens = published_model.config(2), 200
    token_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * 4
    await fleet.until("good", "ready")
    small = fleet.hire("small", KV_CACHE_BYTES=str(2 * round_up(3 + n_tokens) * token_bytes))
    await fleet.until("small", "ready", within_s=100.0)
    samples = await fleet.delivered(await fleet.request(n=16, max_tokens=n_tokens))
    assert [length(sample.tokens, I32) for sample in samples] == [n_tokens] * 16
    assert {worker.partition("-")[0] for sample in samples for worker, _, _ in sample.spans} == {"good", "small"}
    small.stop()


async def test_too_long_prompt_is_dropped_alone_with_the_reason(fleet: RealFleet, good: ServiceProcess) -> None:
    too_long = await fleet.request(n=1, max_tokens=5, prompt=[1] * (published_model.MAX_LEN + 1))
    others = await fleet.request(n=2, max_tokens=5)
    (dropped,) = await fleet.delivered(too_long, SampleDropped)
    assert "maximum length" in dropped.reason
    await fleet.delivered(others)
    assert (await fleet.until("good", "ready"))["state"] == "ready"


async def test_a_worker_of_another_protocol_is_refused_when_it_joins(
    fleet: RealFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = await join(fleet.manager.url, TOKEN, "w", "preemptible")
    assert await joined.bus.length(worker_reports(joined.worker)) == 0
    await joined.bus.close()
    monkeypatch.setattr(manager_http, "PROTOCOL", PROTOCOL + 1)
    with pytest.raises(ConfigError, match=f"protocol {PROTOCOL + 1} and this manager {PROTOCOL}: install the same"):
        await join(fleet.manager.url, TOKEN, "w", "preemptible")


async def test_a_worker_refuses_a_manager_of_another_protocol() -> None:
    newer = JoinServer(TOKEN, "redis://here", "http://there", protocol=PROTOCOL + 1)
    try:
        with pytest.raises(ConfigError, match=f"protocol {PROTOCOL + 1} and this worker {PROTOCOL}: install the same"):
            await join(newer.url, TOKEN, "w", "preemptible")
    finally:
        newer.close()


async def test_a_worker_whose_engine_is_silently_wrong_is_found_out_before_it_serves(
    fleet: RealFleet, good: ServiceProcess
) -> None:
    wrong = fleet.hire("wrong", "tests.support.wrong_worker")
    assert await asyncio.to_thread(wrong.wait) == 1
    assert lines(wrong, "loaded_weights_differ") == [], "its digests are right"
    (last,) = [line for line in wrong.log().splitlines() if line.startswith("rollout_worker: ")]
    assert "log-probabilities" in last
    assert "RLBOOST_WORKER_PARITY_TOLERANCE" in last
    await fleet.until("wrong", "left")
    (event,) = await fleet.events("parity_check_failed")
    assert event["version"] == 0
    assert event["mean"] > 2 * event["tolerated_mean"]


async def test_samples_of_a_hung_engine_migrate_with_their_tokens(fleet: RealFleet, good: ServiceProcess) -> None:
    hanging = fleet.hire("hanging", "tests.support.hanging_worker", STALL_LIMIT_S="3")
    await fleet.until("hanging", "ready")
    group = await fleet.request(n=16, max_tokens=200)
    assert await asyncio.to_thread(hanging.wait) == 1
    samples = await fleet.delivered(group)
    makers = {sample.sample: {maker.rpartition("-")[0] for maker, _, _ in sample.spans} for sample in samples}
    moved = [sample for sample in samples if makers[sample.sample] == {"good", "hanging"}]
    assert moved
    assert all(length(sample.tokens, I32) == 200 for sample in moved), "from its last token, not from its first"


@pytest.mark.long
async def test_dial_out_worker_joins_a_restarting_manager_and_leaves_on_ctrl_c(
    fleet: RealFleet, good: ServiceProcess, tmp_path: Path
) -> None:
    if not dial_out_only.possible():
        pytest.skip("no process can have a network of its own here")
    urls, log_file = (fleet.manager.url, fleet.store.url, fleet.redis.url), tmp_path / "log"
    command = [sys.executable, "-m", "rlboost", "worker", "join", "--url", fleet.manager.url, "--token", TOKEN]
    with ExitStack() as stack:
        with fleet.without_manager():
            worker = Outside([*command, "--name", "behind-nat"], [urlsplit(url).port or 0 for url in urls], log_file)
            stack.callback(worker.close)
            assert worker.has_network_of_its_own()
            await eventually(lambda: worker.dialled > 1, within_s=60)
        await fleet.until("behind-nat", "ready")
        group = await fleet.request(n=16, max_tokens=LONG)
        await fleet.until("behind-nat", "ready", busy=True)
        worker.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(worker.process.wait, 20) == 0
        await fleet.until("behind-nat", "left")
    log = log_file.read_text()
    assert '"parity_check_passed"' in log
    samples = await fleet.delivered(group)
    assert all(length(sample.tokens, I32) == LONG for sample in samples)
    makers = {maker.rpartition("-")[0] for sample in samples for maker, _, _ in sample.spans}
    assert makers == {"good", "behind-nat"}
