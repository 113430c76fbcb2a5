"""Two managers on one bus with a manual clock: one leads, and superseded leaders write nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from rlboost.services.rollout_manager.adapters.prometheus import WorldCollector
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.leadership import RECOVERY_LEASE_S, ManagerRecord, manager_record
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_manager.waiters import CompletionUnavailable
from rlboost.shared.errors import BusUnavailable, ConfigError, Fenced
from rlboost.shared.job.spec import parse, to_json
from rlboost.shared.messages import Event, GroupRequested, JobCommand, JobReport, Resume, Sampling, StepReport
from rlboost.shared.messages.codec import PROTOCOL, PROTOCOL_HEADER
from rlboost.shared.settings import read
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, Entry, position
from rlboost.shared.streams.fenced_lease import FencedLease
from tests.support.eventually import eventually
from tests.support.jobs import job_file
from tests.support.manager_fakes import FakeLeaderWatch
from tests.support.memory_bus import MemoryBus
from tests.support.worker_manager import at_once

LEASE_S = 3.0
TOKEN = "t"
SPEC = job_file()


class Pair:
    """Two managers, not leading yet."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.first, self.second = self.manager(1), self.manager(2)

    def manager(self, n: int) -> Manager:
        return Manager(
            self.bus,
            lease_s=2.0,
            redis_limit_s=9.0,
            clock=lambda: Now(self.clock, self.clock),
            record=who(n),
            leader_lease_s=LEASE_S,
        )

    async def epoch(self) -> int:
        """Raises the epoch, so ask once."""
        return await self.bus.increment(names.MANAGER_EPOCH) - 1

    def everything(self) -> str:
        """All that the broker holds."""
        streams = {name: stream.entries for name, stream in self.bus._streams.items() if stream.entries}
        return repr((streams, {key: fields for key, fields in self.bus._hashes.items() if fields}, self.bus._leases))

    async def create(self, job: str, no: int = 1) -> None:
        command = JobCommand(command_id=job, action="create", job_id=job, job_no=no, spec_json=to_json(parse(SPEC)))
        await self.bus.append(names.JOB_COMMANDS, command)


def who(n: int) -> ManagerRecord:
    return manager_record("127.0.0.1", n, "here").signed(TOKEN)


@pytest.fixture
def pair() -> Pair:
    return Pair()


async def test_late_failure_under_an_old_fence_does_not_end_the_new_lease(pair: Pair) -> None:
    lease = FencedLease(pair.bus, "lease", "epoch", LEASE_S)
    assert await lease.acquire("us")
    old = lease.fence
    assert await lease.acquire("us", replacing="us")
    lease.invalidate(old)
    assert lease.is_held
    lease.invalidate(lease.fence)
    assert not lease.is_held


async def test_standby_leads_after_the_leaders_lease_expires(pair: Pair) -> None:
    assert await pair.first.try_lead()
    await pair.create("job")
    await pair.first.turn()
    assert not await pair.second.try_lead()
    assert pair.second.other_leader == pair.first._leadership.record
    pair.clock += LEASE_S - 0.1
    assert not await pair.second.try_lead()
    pair.clock += 0.2
    assert await pair.second.try_lead()
    assert set(pair.second.world.jobs) == {"job"}
    assert await pair.epoch() == 2


async def test_standby_replaces_a_dead_leader_within_its_lease(pair: Pair) -> None:
    assert await pair.first.try_lead()
    watch = pair.second._leader_watch = FakeLeaderWatch(dies_before=2)
    stop = asyncio.Event()
    running = asyncio.create_task(pair.second.run(stop))
    await eventually(lambda: pair.second.leads)
    stop.set()
    await running
    assert watch.watched == [who(1).url] * 2
    assert await pair.epoch() == 2


async def test_leader_presumed_dead_is_replaced_once_and_fenced(pair: Pair) -> None:
    assert await pair.first.try_lead()
    assert not await pair.second.try_lead()
    leader = pair.second.other_leader
    assert leader is not None
    pair.second._leadership.replace_dead(leader)
    assert await pair.second.try_lead()
    await pair.create("job")
    with pytest.raises(Fenced):
        await pair.first.turn()
    pair.clock += LEASE_S + RECOVERY_LEASE_S
    assert await pair.first.try_lead()
    assert not await pair.second.try_lead()


async def test_leader_renews_its_lease(pair: Pair) -> None:
    assert await pair.first.try_lead()
    for _ in range(20):
        pair.clock += LEASE_S / 3
        await pair.first.turn()
        assert not await pair.second.try_lead()


async def test_leader_with_expired_lease_leads_until_succeeded(pair: Pair) -> None:
    assert await pair.first.try_lead()
    pair.clock += 100 * LEASE_S
    await pair.create("job")
    await pair.first.turn()
    assert await pair.bus.hash_get(names.JOBS, "job")
    assert not await pair.second.try_lead()


async def test_recovery_may_take_longer_than_the_lease(pair: Pair) -> None:
    def time_passes() -> None:
        pair.clock += RECOVERY_LEASE_S - 1.0

    pair.bus.before_next_transaction = time_passes
    assert await pair.first.try_lead()
    assert not await pair.second.try_lead()


async def test_leader_paused_during_a_commit_is_fenced(pair: Pair) -> None:
    assert await pair.first.try_lead()
    await pair.create("job")
    left: list[str] = []

    def succeed() -> None:
        pair.clock += LEASE_S + 0.1
        assert at_once(pair.second.try_lead())
        at_once(pair.second.turn())
        left.append(pair.everything())

    pair.bus.before_next_transaction = succeed
    with pytest.raises(Fenced):
        await pair.first.turn()
    assert [pair.everything()] == left
    assert not await pair.first.try_lead()
    assert not pair.first.leads
    assert not pair.first.world.jobs
    await pair.second.turn()
    assert pair.second.leads


async def test_leader_reacquires_under_a_new_epoch_after_a_lost_reply(pair: Pair) -> None:
    assert await pair.first.try_lead()
    await pair.create("job")
    pair.bus.lose_next_reply = True
    with pytest.raises(BusUnavailable):
        await pair.first.turn()
    assert await pair.first.try_lead()
    assert pair.first.leads
    assert await pair.epoch() == 2


async def test_lost_reply_of_an_acquisition_is_retried(pair: Pair) -> None:
    pair.bus.lose_next_reply = True
    with pytest.raises(BusUnavailable):
        await pair.first.try_lead()
    assert not await pair.second.try_lead()
    assert await pair.first.try_lead()
    assert await pair.epoch() == 2


async def test_lease_is_renewed_during_a_recovery_of_any_length(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.create("job")
    n_batches, read = 40, pair.bus.read

    async def slow_log(cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        if list(cursors) != [names.TOKEN_LOG]:
            return await read(cursors, count=count, block_s=block_s)
        number = position(cursors[names.TOKEN_LOG])[0]
        pair.clock += LEASE_S
        if number:
            assert not await pair.second.try_lead()
        return (
            [Entry(names.TOKEN_LOG, f"{number + 1}-0", Event(kind="k", at=0.0, source="s"))]
            if number < n_batches
            else []
        )

    monkeypatch.setattr(pair.bus, "read", slow_log)
    assert n_batches * LEASE_S > 2 * RECOVERY_LEASE_S
    assert await pair.first.try_lead()
    assert await pair.epoch() == 1


async def test_restarted_manager_replaces_the_lease_of_its_address(pair: Pair) -> None:
    assert await pair.first.try_lead()
    again = pair.manager(1)
    assert await again.try_lead()
    pair.clock += LEASE_S
    with pytest.raises(Fenced):
        await pair.first.turn()


async def test_superseded_manager_of_the_same_address_does_not_lead_again(pair: Pair) -> None:
    double = pair.manager(1)
    assert await pair.first.try_lead()
    assert await double.try_lead()
    assert not await pair.first.try_lead()
    assert not await pair.first.try_lead()
    assert double.leads


async def test_write_of_a_superseded_leader_is_fenced(pair: Pair) -> None:
    assert await pair.first.try_lead()
    pair.clock += LEASE_S + 0.1
    assert await pair.second.try_lead()
    with pytest.raises(Fenced):
        await pair.first.write([Append("s", Resume(step=1))])
    assert await pair.bus.length("s") == 0
    assert not pair.first.leads
    with pytest.raises(Fenced):
        await pair.first.turn()
    await pair.second.write([Append("s", Resume(step=2))])
    assert await pair.bus.length("s") == 1


async def test_write_with_a_lost_reply_makes_the_leader_recover(pair: Pair) -> None:
    assert await pair.first.try_lead()
    pair.bus.lose_next_reply = True
    with pytest.raises(BusUnavailable):
        await pair.first.write([Append("s", Resume(step=1))])
    with pytest.raises(Fenced):
        await pair.first.turn()
    assert await pair.first.try_lead()
    await pair.first.turn()


async def test_lost_reply_to_a_client_ends_no_completion_of_another(pair: Pair) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(pair.first.run(stop))
    await eventually(lambda: pair.first.leads)
    request = GroupRequested(
        job_id="j", group=0, n=1, prompt=b"", sampling=Sampling(max_tokens=1), version=0, seed=0, expires_at=1e9
    )
    (waiter,) = pair.first.completion_waiters.register([request], pair.first.world, resumable=False)

    async def reply_is_lost() -> bool:
        pair.bus.lose_next_reply = True
        try:
            await pair.first.write([Append("s", Resume(step=1))])
        except BusUnavailable:
            return True
        return False  # another request of the manager has lost its reply

    assert await eventually(reply_is_lost)
    assert not pair.first.leads
    await eventually(lambda: pair.first.leads)
    assert not isinstance(waiter.error, CompletionUnavailable)
    stop.set()
    await running


@pytest.mark.parametrize(
    ("host", "public_url", "url"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:8700"),
        ("0.0.0.0", "", "http://box:8700"),
        ("::", "", "http://box:8700"),
        ("fe80::1", "", "http://[fe80::1]:8700"),
        ("0.0.0.0", "https://rl.example/", "https://rl.example"),
    ],
)
def test_manager_record_has_a_reachable_url(host: str, public_url: str, url: str) -> None:
    assert manager_record(host, 8700, "box", public_url).url == url


def test_invalid_public_url_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_MANAGER_PUBLIC_URL", "box:8700")
    with pytest.raises(ConfigError, match="public_url"):
        read(Settings, [])


# --- REST -------------------------------------------------------------------------------------------------------------


def rest(pair: Pair, manager: Manager) -> httpx.AsyncClient:
    app = build(manager, pair.bus, Settings(token=TOKEN))
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(
        transport=transport, base_url="http://standby", headers={"Authorization": f"Bearer {TOKEN}"}
    )


async def test_standby_redirects_every_request_to_the_leader(pair: Pair) -> None:
    assert await pair.first.try_lead()
    assert not await pair.second.try_lead()
    async with rest(pair, pair.second) as client:
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert ready.headers["content-type"] == "application/problem+json"
        assert ready.json()["detail"] == ready.json()["missing"] == "standby; http://127.0.0.1:1 leads"
        assert (await client.get("/healthz")).status_code == 200
        for method, path in (
            ("GET", "/v1/jobs/a%20b/samples?step=3&x=%26"),
            ("GET", "/v1/jobs"),
            ("POST", "/v1/jobs"),
            ("GET", "/v1/join"),
            ("POST", "/v1/join"),
            ("GET", "/v1/jobs/j/events"),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == 307, path
            assert answer.headers["location"] == f"http://127.0.0.1:1{path}"
        stranger = await client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"})
        assert stranger.status_code == 401


@pytest.mark.parametrize("token", [None, "guessed", ""])
async def test_standby_does_not_redirect_to_an_unsigned_leader(pair: Pair, token: str | None) -> None:
    """Clients send the token along, and an address in Redis may be anybody's."""
    stranger = manager_record("127.0.0.1", 9, "elsewhere", "http://elsewhere:1")
    stranger = stranger.model_copy(update={"signature": who(1).signature}) if token is None else stranger.signed(token)
    await pair.bus.acquire(names.MANAGER_LEASE, stranger.model_dump_json(), LEASE_S)
    assert not await pair.second.try_lead()
    async with rest(pair, pair.second) as client:
        answer = await client.get("/v1/jobs")
    assert (answer.status_code, answer.headers["retry-after"], "location" in answer.headers) == (503, "1", False)
    assert "http://elsewhere:1, is not signed with this manager's token" in answer.json()["detail"]


async def test_requests_without_a_leader_get_503_and_retry_after(pair: Pair) -> None:
    async with rest(pair, pair.second) as client:
        answer = await client.get("/v1/jobs")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["title"] == "No leader"
        assert (await client.get("/readyz")).status_code == 503


async def test_requests_during_a_recovery_get_503_and_how_far_it_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await pair.bus.append(names.TOKEN_LOG, Event(kind="k", at=0.0, source="s"))
    reads, read = [], pair.bus.read

    async def asked(cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        if list(cursors) == [names.TOKEN_LOG]:
            reads.append([(await client.get(path)).json()["detail"] for path in ("/v1/jobs", "/readyz")])
        return await read(cursors, count=min(count, 2), block_s=block_s)

    monkeypatch.setattr(pair.bus, "read", asked)
    async with rest(pair, pair.first) as client:
        assert await pair.first.try_lead()
        assert (await client.get("/v1/jobs")).status_code == 200
    far = "the manager restores its state from Redis: {} of 3 entries of the token log"
    assert reads == [[far.format(n) + ": try again", far.format(n)] for n in (0, 2, 3)]


async def test_superseded_leader_creates_no_job(pair: Pair) -> None:
    assert await pair.first.try_lead()
    pair.clock += LEASE_S + 0.1
    assert await pair.second.try_lead()
    async with rest(pair, pair.first) as client:
        answer = await client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "once"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert await pair.bus.hash_all(names.JOBS) == {}
    async with rest(pair, pair.second) as client:
        answer = await client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "once"})
        assert answer.status_code == 201
    assert set(await pair.bus.hash_all(names.JOBS)) == {answer.json()["id"]}


async def test_concurrent_requests_with_one_key_create_one_job(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    increment = pair.bus.increment

    async def slowly(key: str) -> int:
        await asyncio.sleep(0.02)
        return await increment(key)

    assert await pair.first.try_lead()
    monkeypatch.setattr(pair.bus, "increment", slowly)
    async with rest(pair, pair.first) as client:
        posts = [client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "once"}) for _ in range(2)]
        first, second = await asyncio.gather(*posts)
    assert first.json() == second.json()
    assert len(await pair.bus.read({names.JOB_COMMANDS: START})) == 1
    assert await increment(names.JOB_COUNTER) == 2


async def test_join_without_a_protocol_number_is_rejected_and_logged_once(pair: Pair) -> None:
    assert await pair.first.try_lead()
    async with rest(pair, pair.first) as client:
        request = {"name": "w", "role": "preemptible"}
        headers = {PROTOCOL_HEADER: str(PROTOCOL)}
        assert (await client.post("/v1/join", json=request, headers=headers)).status_code == 200
        with capture_logs() as logs:
            refused = [await client.post("/v1/join", json={**request, "name": "old"}) for _ in range(2)]
            refused.append(await client.get("/v1/join"))
    assert [(line["event"], line["name"]) for line in logs] == [("worker_refused", "old")]
    for answer in refused:
        assert answer.status_code == 409
        assert f"speaks protocol 1 and this manager {PROTOCOL}" in answer.json()["detail"]


async def test_metrics_show_which_manager_leads(pair: Pair) -> None:
    def leading(manager: Manager) -> float | None:
        registry = CollectorRegistry()
        registry.register(WorldCollector(lambda: manager.leads, lambda: manager.world))
        return registry.get_sample_value("rlboost_manager_leading")

    assert await pair.first.try_lead()
    assert [leading(pair.first), leading(pair.second)] == [1.0, 0.0]


@pytest.mark.parametrize("fails_at_first", [False, True])
async def test_jobs_that_redis_has_lost_fail_with_how_to_continue_them(pair: Pair, fails_at_first: bool) -> None:
    assert await pair.first.try_lead()
    for no, job_id in enumerate(("ended", "running"), start=1):
        await pair.create(job_id, no)
        await pair.first.turn()
    step = StepReport(job_id="running", step=6, metrics={})
    for report in (JobReport(job_id="ended", state="completed", step=1), step):
        await pair.bus.append(names.JOB_REPORTS, report)
    await pair.first.turn()
    pair.bus.lose_data()
    with pytest.raises(Fenced):
        await pair.first.turn()
    if fails_at_first:  # the lease is acquired, and its reply arrives; that of the next write does not
        pair.bus.before_next_transaction = lambda: setattr(pair.bus, "lose_next_reply", True)
        with pytest.raises(BusUnavailable):
            await pair.first.try_lead()
        assert await pair.bus.counter(names.MANAGER_EPOCH) == 1
    with structlog.testing.capture_logs() as logs:
        assert await pair.first.try_lead()
    (lost,) = [line for line in logs if line["event"] == "redis_lost_data"]
    assert (lost["log_level"], lost["jobs"]) == ("error", ["ended", "running"])
    jobs = pair.first.world.jobs
    assert {job.id: job.record.state for job in jobs.values()} == {"ended": "completed", "running": "failed"}
    assert "had completed 7 steps" in jobs["running"].record.error
    assert "trainer.resume" in jobs["running"].record.error
    await pair.first.turn()
    pair.clock += LEASE_S + RECOVERY_LEASE_S
    assert await pair.second.try_lead(), "the records are stored again"
    assert set(pair.second.world.jobs) == {"ended", "running"}


async def test_standby_that_takes_over_an_emptied_redis_says_so(pair: Pair) -> None:
    assert await pair.first.try_lead()
    assert not await pair.second.try_lead()
    pair.bus.lose_data()
    with structlog.testing.capture_logs() as logs:
        assert await pair.second.try_lead()
    assert "redis_lost_data" in {line["event"] for line in logs}


async def test_new_leader_of_an_intact_redis_reports_no_loss(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        for manager in (pair.first, pair.second, pair.first):
            assert await manager.try_lead()
            await pair.create("job")
            await manager.turn()
            await manager._leadership.resign()
    assert "redis_lost_data" not in {line["event"] for line in logs}
