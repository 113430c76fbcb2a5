"""Every source of notices against what plays its cloud on loopback, with the faults that such services have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import get_args

import pytest

from services.rollout_worker.adapters.metadata import Aws, Azure, Google, Metadata
from services.rollout_worker.adapters.notice_file import NoticeFile
from services.rollout_worker.domain.notices import Advice, Notice
from services.rollout_worker.ports import NoticeSource
from shared.errors import ConfigError, Retryable
from tests.support.eventually import eventually
from tests.support.fake_metadata import EVENT_ID, Cloud, FakeMetadata
from tests.support.redis_server import free_port
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
async def test_it_says_nothing_until_the_machine_is_to_go(
    cloud: FakeMetadata, clients: list[Client], lead_s: float
) -> None:
    source = source_of(cloud, clients)
    assert await source.ask() is None
    cloud.preempt(lead_s)
    notice = await source.ask()
    assert isinstance(notice, Notice)
    assert notice.reason.startswith(f"{cloud.cloud}: ")
    if cloud.cloud == "gcp":
        assert notice.lead_s is None, "Google does not say"
    else:
        assert notice.lead_s == pytest.approx(lead_s, abs=2.0)


async def test_a_notice_from_before_the_first_question_is_heard(cloud: FakeMetadata, clients: list[Client]) -> None:
    cloud.preempt(30.0)
    assert isinstance(await source_of(cloud, clients).ask(), Notice)


async def test_a_cloud_is_found_where_it_is_and_nowhere_else(cloud: FakeMetadata, clients: list[Client]) -> None:
    source_of(cloud, clients)
    found = [name for name, source in clients[0].sources.items() if await source.found()]
    assert found == [cloud.cloud]


@pytest.mark.parametrize("body", [b"<html>sign in to this network</html>", b"\xff\xfe\x00", b""], ids=repr)
async def test_a_page_of_somebody_else_is_neither_a_cloud_nor_a_notice(
    cloud: FakeMetadata, clients: list[Client], body: bytes
) -> None:
    source = source_of(cloud, clients)
    await source.ask()
    cloud.preempt(30.0)
    cloud.garbage = body
    with pytest.raises(Retryable):
        await source.ask()
    cloud.garbage = None
    assert isinstance(await source.ask(), Notice)


@pytest.mark.parametrize("status", [403, 429, 500, 503])
async def test_a_status_is_survived(cloud: FakeMetadata, clients: list[Client], status: int) -> None:
    source = source_of(cloud, clients)
    cloud.status = status
    with pytest.raises(Retryable, match=str(status)):
        await source.ask()
    assert not await source.found()
    cloud.status = 0
    assert await source.ask() is None


async def test_a_slow_answer_is_not_waited_for(cloud: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(cloud, clients, limit_s=0.1)
    cloud.slow_s = 30.0
    stopwatch = Stopwatch()
    with pytest.raises(Retryable, match=r"no answer within|Timeout"):
        await source.ask()
    assert stopwatch.read() < 5.0


async def test_nobody_there_is_survived(clients: list[Client]) -> None:
    clients.append(Client(f"http://127.0.0.1:{free_port()}"))
    for source in clients[0].sources.values():
        assert not await source.found()
        with pytest.raises(Retryable):
            await source.ask()


async def test_a_proxy_in_the_environment_is_passed_by(
    cloud: FakeMetadata, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert "HTTP_PROXY" in os.environ
    assert await source_of(cloud, clients).ask() is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:here", "http://xn--", "nowhere"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="metadata_url"):
        Metadata(url)


# --- Amazon -----------------------------------------------------------------------------------------------------------


async def test_an_expired_token_is_renewed_in_the_same_question(aws: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(aws, clients)
    assert await source.ask() is None
    aws.expire_tokens()
    aws.preempt(120.0)
    assert isinstance(await source.ask(), Notice)
    assert aws.requests.count("PUT /latest/api/token") == 2


async def test_one_token_serves_many_questions(aws: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(aws, clients)
    for _ in range(5):
        await source.ask()
    assert aws.requests.count("PUT /latest/api/token") == 1


async def test_a_rebalance_recommendation_is_advice_until_there_is_a_notice(
    aws: FakeMetadata, clients: list[Client]
) -> None:
    source = source_of(aws, clients)
    aws.recommend_rebalance()
    assert isinstance(await source.ask(), Advice)
    aws.preempt(120.0)
    assert isinstance(await source.ask(), Notice)


# --- Google -----------------------------------------------------------------------------------------------------------


async def test_google_answers_at_the_moment_of_the_change(gcp: FakeMetadata, clients: list[Client]) -> None:
    source = source_of(gcp, clients, limit_s=10.0)
    assert await source.ask() is None
    asking = asyncio.create_task(source.ask())
    await eventually(lambda: len(gcp.requests) == 2)
    assert not asking.done()
    gcp.preempt(11.0)
    assert isinstance(await asking, Notice)


# --- Azure ------------------------------------------------------------------------------------------------------------


async def test_azure_is_told_that_the_machine_is_not_needed_any_more(
    azure: FakeMetadata, clients: list[Client]
) -> None:
    source = source_of(azure, clients)
    azure.preempt(30.0)
    notice = await source.ask()
    assert isinstance(notice, Notice)
    await source.acknowledge(notice)
    assert [event_id for event_id, _ in azure.acknowledged] == [EVENT_ID]


async def test_the_event_of_another_machine_of_the_scale_set_is_none_of_ours(
    azure: FakeMetadata, clients: list[Client]
) -> None:
    source = source_of(azure, clients)
    azure.preempt(30.0, machine="spot_8")
    assert await source.ask() is None
    azure.preempt(30.0)
    assert isinstance(await source.ask(), Notice)


async def test_a_scale_set_that_takes_the_machine_down_gives_notice_too(
    azure: FakeMetadata, clients: list[Client]
) -> None:
    azure.preempt(300.0, kind="Terminate")
    notice = await source_of(azure, clients).ask()
    assert isinstance(notice, Notice)
    assert notice.reason == "azure: Terminate"


# --- a file -----------------------------------------------------------------------------------------------------------


async def test_a_file_is_a_notice_by_being_there(tmp_path: Path) -> None:
    path = tmp_path / "spot"
    source = NoticeFile(path)
    assert await source.found()
    assert await source.ask() is None
    path.write_text("25\n")
    assert await source.ask() == Notice(f"file: {path}", 25.0)


async def test_a_folder_in_its_place_or_bytes_that_are_no_text_are_a_notice_too(tmp_path: Path) -> None:
    (tmp_path / "spot").write_bytes(b"\xff" * 200)
    for path in (tmp_path, tmp_path / "spot"):
        assert await NoticeFile(path).ask() == Notice(f"file: {path}")


async def test_a_place_that_cannot_be_looked_at_is_survived(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Retryable, match="cannot look for"):
        await NoticeFile(tmp_path / "file" / "spot").ask()
