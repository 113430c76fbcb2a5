"""Services over HTTPS and Redis over TLS, with a throw-away authority. The TLS of Redis ends in a proxy before it."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlboost.client import Client, ClientError
from rlboost.services.rollout_worker.adapters.manager_http import join
from rlboost.shared.errors import BusUnavailable, ConfigError, Fatal, StoreUnavailable
from rlboost.shared.redis.bus import RedisBus, connect
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.rest_models import ModelList
from tests.support.certificates import Certificates, make_certificates
from tests.support.eventually import eventually
from tests.support.ports import reserved_port
from tests.support.programs import require_program
from tests.support.redis_server import RedisServer
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.small_job import small_job
from tests.support.tcp_proxy import TcpProxy

_GUIDE = Path(__file__).parents[2] / "docs/security.md"
ACL_RULES = re.findall(r"^ACL SETUSER (\S+) (.+)$", _GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
"""The users with the least rights that the docs name: of the manager, and of the trainer and the weight store."""


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "tls")


@pytest.fixture
async def rediss_url(certificates: Certificates, redis_server: RedisServer, redis_url: str) -> AsyncIterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.certificate, certificates.key)
    bus = RedisBus(redis_url)
    async with TcpProxy(redis_server.port, context) as proxy:
        for user, rules in ACL_RULES:
            await bus.command("ACL", "SETUSER", user, *rules.split())
        yield f"rediss://127.0.0.1:{proxy.port}/0"
        await bus.command("ACL", "DELUSER", *(user for user, _ in ACL_RULES))
    await bus.close()


class System:
    """Every service as a process, over TLS only, and as the Redis user that the docs name for it."""

    def __init__(self, folder: Path, redis_url: str, certificates: Certificates, stack: ExitStack) -> None:
        self._folder, self._redis_url, self._stack = folder, redis_url, stack
        self._env = certificates.server
        self.store = self.service("weight_store", "RLBOOST_WEIGHT_STORE_", DIR=str(folder / "weights"))
        self.manager = self.service("rollout_manager", "RLBOOST_MANAGER_", WEIGHT_STORE_URL=self.store.url)

    def service(self, name: str, prefix: str, **settings: str) -> ServiceProcess:
        env = self._env | {f"{prefix}{key}": value for key, value in settings.items()}
        number = 1 if name == "rollout_manager" else 2
        user = f"{ACL_RULES[number - 1][0]}:PASSWORD-{number}@"
        url = self._redis_url.replace("rediss://", f"rediss://{user}")
        process = ServiceProcess(name, prefix, self._folder, url, env)
        process.launch()
        self._stack.callback(process.kill)
        return process

    async def ready(self, process: ServiceProcess) -> None:
        """Wait until a process is ready."""
        await asyncio.to_thread(process.until_ready)


@pytest.fixture
def system(tmp_path: Path, rediss_url: str, certificates: Certificates) -> Iterator[System]:
    with ExitStack() as stack:
        yield System(tmp_path, rediss_url, certificates, stack)


async def test_redis_that_asks_for_a_client_certificate(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_program("redis-server")  # the one of a Python package has no TLS
    monkeypatch.setenv("RLBOOST_TLS_CA", str(certificates.ca))
    files = {"cert-file": certificates.certificate, "key-file": certificates.key, "ca-cert-file": certificates.ca}
    own = f"ssl_certfile={certificates.certificate}&ssl_keyfile={certificates.key}"
    with reserved_port() as port:
        options = {"tls-port": port} | {f"tls-{name}": path for name, path in files.items()}
        server = RedisServer(tmp_path / "redis", options=options)
        server.start()
        url = f"rediss://127.0.0.1:{port}/0"
        try:
            bus = await connect(f"{url}?{own}", "a-service")
            assert await bus.command("PING")
            await bus.close()
            with pytest.raises(Fatal, match=r"add \?ssl_certfile=FILE&ssl_keyfile=FILE if it asks for"):
                await connect(url, "a-service", limit_s=0.1)
            with pytest.raises(ConfigError, match=r"ssl_certfile .*no.pem .*cannot be used: .*No such file"):
                await connect(f"{url}?ssl_certfile={tmp_path}/no.pem", "a-service")
            with pytest.raises(Fatal, match="give rediss:// if it has TLS"):
                await connect(url.replace("rediss", "redis"), "a-service", limit_s=0.1)
        finally:
            server.stop()


@pytest.mark.long
async def test_job_completes_over_https_and_rediss(
    system: System, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBOOST_TLS_CA", str(certificates.ca))
    await system.ready(system.manager)
    store_url, url = system.store.url, system.manager.url
    system.service("trainer", "RLBOOST_TRAINER_", WEIGHT_STORE_URL=store_url, DIR=str(tmp_path / "runs"))
    system.service(
        "rollout_worker", "RLBOOST_WORKER_", URL=url, CACHE_DIR=str(tmp_path / "cache"), PEER_URL="off", SLOTS="8"
    )

    def submit() -> str:
        with Client(url, TOKEN, retry_for_s=30) as client:
            return str(client.jobs.create(small_job(steps=2))["id"])

    job_id = await asyncio.to_thread(submit)

    async def ended() -> bool:
        return (await jobs(system))[0]["state"] in {"completed", "failed"}

    await eventually(ended)
    assert (await jobs(system))[0]["state"] == "completed"
    async with StoreClient(store_url, TOKEN) as client:
        head = await client.head(job_id)
    assert head is not None
    assert head.version == 2


async def test_client_connects_only_if_it_trusts_the_authority(
    system: System, rediss_url: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in (system.store, system.manager):
        await system.ready(process)
    with pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"):
        await jobs(system)
    with pytest.raises(Fatal, match="CERTIFICATE_VERIFY_FAILED"):
        await join(system.manager.url, TOKEN, "w", "preemptible", limit_s=0.1)
    with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await models(system)
    with pytest.raises(BusUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await length(rediss_url)
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(system.manager.url.replace("https", "http") + "/healthz")
    monkeypatch.setenv("RLBOOST_TLS_CA", str(certificates.ca))
    assert await jobs(system) == []
    joined = await join(system.manager.url, TOKEN, "w", "preemptible")
    await joined.bus.close()
    assert joined.weight_store_url == system.store.url
    assert (await models(system)).models == ()
    assert await length(rediss_url) == 0


async def jobs(system: System) -> list[dict[str, Any]]:
    def listed() -> list[dict[str, Any]]:
        with Client(system.manager.url, TOKEN, retry_for_s=0) as client:
            return client.jobs.list()

    return await asyncio.to_thread(listed)


async def models(system: System) -> ModelList:
    async with StoreClient(system.store.url, TOKEN) as client:
        return await client.models()


async def length(url: str) -> int:
    bus = RedisBus(url)
    try:
        return await bus.length("no such stream")
    finally:
        await bus.close()
