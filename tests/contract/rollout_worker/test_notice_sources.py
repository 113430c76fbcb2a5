"""Every source of notices against what plays its cloud on loopback, with the faults that such services have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import get_args

import pytest

from rlboost.services.rollout_worker.adapters.preemption import Aws, Azure, Google, Metadata, NoticeFile, site_of
from rlboost.services.rollout_worker.domain.preemption import Notice, RebalanceRecommendation
from rlboost.services.rollout_worker.ports import NoticeSource
from rlboost.shared.errors import ConfigError, Retryable
from tests.support.eventually import eventually
from tests.support.fake_metadata import EVENT_ID, Cloud, FakeMetadata
from tests.support.ports import reserved_port
from tests.support.stopwatch import Stopwatch

LIMIT_S = 1.5
CLOUDS = get_args(Cloud)


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Iterator[FakeMetadata]:
    """The metadata service of each cloud."""
    fake = FakeMetadata(request.param)
    yield fake
    fake.close()


@pytest.fixture
def aws() -> Iterator[FakeMetadata]:
    fake = FakeMetadata("aws")
    yield fake
    fake.close()


@pytest.fixture
def gcp() -> Iterator[FakeMetadata]:
    fake = FakeMetadata("gcp")
    yield fake
    fake.close()


@pytest.fixture
def azure() -> Iterator[FakeMetadata]:
    fake = FakeMetadata("azure")
    yield fake
    fake.close()


class Client:
    """The adapters, on one address."""

    def __init__(self, url: str, limit_s: float = LIMIT_S) -> None:
        self.metadata = Metadata(url, limit_s)
        sources: list[NoticeSource] = [Aws(self.metadata), Google(self.metadata), Azure(self.metadata)]
        self.sources = {source.name: source for source in sources}


@pytest.fixture
async def clients() -> AsyncIterator[list[Client]]:
    """Those that a test has made."""
    made: list[Client] = []
    yield made
    for client in made:
        await client.metadata.close()


def source_of(fake: FakeMetadata, clients: list[Client], limit_s: float = LIMIT_S) -> NoticeSource:
    clients.append(Client(fake.url, limit_s))
    return clients[-1].sources[fake.cloud]


# --- every cloud ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead_s", [120.0, 30.0, 11.0, 0.0])
async def test_source_is_silent_until_the_preemption(cloud: FakeMetadata, clients: list[Client], lead_s: float) -> None:
    source = source_of(cloud, clients)
    assert await source.poll() is None
    cloud.preempt(lead_s)
    notice = await source.poll()
    assert isinstance(notice, Notice)
    assert notice.reason.startswith(f"{cloud.cloud}: ")
    if cloud.cloud == "gcp":
        assert notice.lead_s is None, "Google does not say"
    else:
        assert notice.lead_s == pytest.approx(lead_s, abs=2.0)


async def test_notice_before_the_first_poll_is_returned(cloud: FakeMetadata, clients: list[Client]) -> None:
    cloud.preempt(30.0)
    assert isinstance(await source_of(cloud, clients).poll(), Notice)


async def test_cloud_is_detected_only_on_its_machines(cloud: FakeMetadata, clients: list[Client]) -> None:
    source_of(cloud, clients)
    found = [name for name, source in clients[0].sources.items() if await source.is_available()]
    assert found == [cloud.cloud]


async def test_site_is_the_region_of_the_cloud_only_if_asked_for(cloud: FakeMetadata, clients: list[Client]) -> None:
    source_of(cloud, clients)
    regions = {"aws": "eu-west-1", "gcp": "us-central1", "azure": "westeurope"}
    metadata = clients[0].metadata
    assert await site_of("auto", metadata) == regions[cloud.cloud]
    cloud.garbage = b"<html>sign in to this network</html>"
    with pytest.raises(
        ConfigError, match="RLBOOST_WORKER_SITE is auto, and no cloud's metadata service names a region"
    ):
        await site_of("auto", metadata, limit_s=0.5)
    assert [await site_of(setting, metadata) for setting in ("", "office-2")] == ["", "office-2"]


@pytest.mark.parametrize("body", [b"<html>sign in to this network</html>", b"\xff\xfe\x00", b""], ids=repr)
async def test_unrelated_web_page_is_neither_a_cloud_nor_a_notice(
    cloud: FakeMetadata, clients: list[Client], body: bytes
) -> None:
    source = source_of(cloud, clients)
    await source.poll()
    cloud.preempt(30.0)
    cloud.garbage = body
    with pytest.raises(Retryable):
        await source.poll()
    cloud.garbage = None
    assert isinstance(await source.poll(), Notice)


@pytest.mark.parametrize("status", [403, 429, 500, 503])
async def test_error_status_is_retryable(cloud: FakeMetadata, clients: list[Client], status: int) -> None:
    source = source_of(cloud, clients)
    cloud.status = status
    with pytest.raises(Retryable, match=str(status)):
        await source.poll()
    assert not await source.is_available()
    cloud.status = 0
    assert await source.poll() is None


async def test_a_slow_answer_is_not_waited_for(cloud: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(cloud, clients, limit_s=0.1)
    cloud.slow_s = 30.0
    stopwatch = Stopwatch()
    with pytest.raises(Retryable, match=r"no answer within|Timeout"):
        await source.poll()
    assert stopwatch.read() < 5.0


async def test_refused_connection_is_retryable(clients: list[Client]) -> None:
    with reserved_port() as port:
        clients.append(Client(f"http://127.0.0.1:{port}"))
        for source in clients[0].sources.values():
            assert not await source.is_available()
            with pytest.raises(Retryable):
                await source.poll()


async def test_proxy_settings_are_ignored(
    cloud: FakeMetadata, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    with reserved_port() as port:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert "HTTP_PROXY" in os.environ
        assert await source_of(cloud, clients).poll() is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:here", "http://xn--", "nowhere"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="metadata_url"):
        Metadata(url)


# --- Amazon -----------------------------------------------------------------------------------------------------------


async def test_expired_token_is_renewed_in_the_same_poll(aws: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(aws, clients)
    assert await source.poll() is None
    aws.expire_tokens()
    aws.preempt(120.0)
    assert isinstance(await source.poll(), Notice)
    assert aws.requests.count("PUT /latest/api/token") == 2


async def test_one_token_serves_many_polls(aws: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(aws, clients)
    for _ in range(5):
        await source.poll()
    assert aws.requests.count("PUT /latest/api/token") == 1


async def test_rebalance_recommendation_is_returned_until_the_notice(aws: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(aws, clients)
    aws.recommend_rebalance()
    assert isinstance(await source.poll(), RebalanceRecommendation)
    aws.preempt(120.0)
    assert isinstance(await source.poll(), Notice)


# --- Google -----------------------------------------------------------------------------------------------------------


async def test_google_answers_at_the_moment_of_the_change(gcp: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(gcp, clients, limit_s=10.0)
    assert await source.poll() is None
    asking = asyncio.create_task(source.poll())
    await eventually(lambda: len(gcp.requests) == 2)
    assert not asking.done()
    gcp.preempt(11.0)
    assert isinstance(await asking, Notice)


# --- Azure ------------------------------------------------------------------------------------------------------------


async def test_azure_acknowledgment_releases_the_machine(azure: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(azure, clients)
    azure.preempt(30.0)
    notice = await source.poll()
    assert isinstance(notice, Notice)
    await source.acknowledge(notice)
    assert [event_id for event_id, _ in azure.acknowledged] == [EVENT_ID]


async def test_azure_event_of_another_machine_is_ignored(azure: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(azure, clients)
    azure.preempt(30.0, machine="spot_8")
    assert await source.poll() is None
    azure.preempt(30.0)
    assert isinstance(await source.poll(), Notice)


async def test_azure_terminate_event_is_a_notice(azure: FakeMetadata, clients: list[Client]) -> None:
    azure.preempt(300.0, kind="Terminate")
    notice = await source_of(azure, clients).poll()
    assert isinstance(notice, Notice)
    assert notice.reason == "azure: Terminate"


# --- a file -----------------------------------------------------------------------------------------------------------


async def test_a_file_is_a_notice_by_being_there(tmp_path: Path) -> None:
    path = tmp_path / "spot"
    source = NoticeFile(path)
    assert await source.is_available()
    assert await source.poll() is None
    path.write_text("25\n")
    assert await source.poll() == Notice(f"file: {path}", 25.0)


async def test_notice_file_that_is_a_folder_or_binary_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "spot").write_bytes(b"\xff" * 200)
    for path in (tmp_path, tmp_path / "spot"):
        assert await NoticeFile(path).poll() == Notice(f"file: {path}")


async def test_unreadable_notice_path_is_retryable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Retryable, match="spot"):
        await NoticeFile(tmp_path / "file" / "spot").poll()
