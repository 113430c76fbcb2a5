"""What a worker is given when it joins."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.access import JoinRequest, WorkerIdentities, join
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import ConfigError
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.settings import read
from tests.support.manager_fakes import FakeWorkerUsers
from tests.support.memory_bus import MemoryBus


@pytest.mark.parametrize(
    ("advertised", "expected"),
    [
        ("redis://:the-password@10.0.0.5:6379/0", "redis://{}@10.0.0.5:6379/0"),
        ("rediss://admin:p%40ss@redis.example/2?ssl_cert_reqs=none", "rediss://{}@redis.example/2?ssl_cert_reqs=none"),
        ("redis://[::1]:6379/0", "redis://{}@[::1]:6379/0"),
    ],
)
async def test_redis_url_of_a_worker_has_only_its_own_password(advertised: str, expected: str) -> None:
    bus, users = MemoryBus(), FakeWorkerUsers()
    settings = Settings(token="t", advertised_redis_url=advertised)
    request = JoinRequest(name="w", role="preemptible")
    answer = await join(request, WorkerIdentities(bus, users), settings, bus.transact)
    user, _, rest = answer.redis_url.partition("://")[2].partition(":")
    password = rest.partition("@")[0]
    assert answer.redis_url == expected.format(f"rlboost-worker-{answer.worker}:{password}")
    assert (user, len(password)) == (f"rlboost-worker-{answer.worker}", 64)
    assert list(users.secrets) == [answer.worker]
    assert password not in str(bus._hashes), "only its digest is stored"
    RedisBus(answer.redis_url)


async def test_worker_without_a_user_gets_the_advertised_url() -> None:
    bus = MemoryBus()
    settings = Settings(token="t", redis_url="redis://:p@here:1/0")
    answer = await join(JoinRequest(name="w", role="reserved"), WorkerIdentities(bus), settings, bus.transact)
    assert answer.redis_url == "redis://:p@here:1/0"


@pytest.mark.parametrize("url", ["redis://:secret@:6379/0", "10.0.0.7:6379", "redis:///0"])
def test_advertised_redis_url_without_a_host_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ConfigError, match=r"advertised_redis_url.*names no host") as error:
        read(Settings, ["--advertised-redis-url", url])
    assert "secret" not in str(error.value)
