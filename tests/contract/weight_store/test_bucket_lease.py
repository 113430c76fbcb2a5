"""One writer at a time in an object store, garbage that goes safely, and errors that say what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import obstore
import pytest

from rlboost.services.weight_store.adapters import origin
from rlboost.services.weight_store.adapters.objects import Lease, ObjectChunks, ObjectDocuments
from rlboost.services.weight_store.domain.versions import JobVersions, Version
from rlboost.services.weight_store.ports import LocalFile, Proxied, Redirect
from rlboost.shared.bucket import Bucket, Changed, ExclusiveObject
from rlboost.shared.errors import ConfigError, Fenced, NotFound, StoreUnavailable
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.manifest import ChunkRef, digest_of
from tests.support.s3_server import S3Server
from tests.support.stopwatch import Stopwatch

DATA = b"some weights"
CHUNK = ChunkRef(digest_of(DATA), len(DATA))
LEASE_S = 60.0


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    return Bucket("memory:///" if request.param == "memory" else request.getfixturevalue("s3_url"))


@pytest.fixture
def memory() -> Bucket:
    return Bucket("memory:///")


async def held(bucket: Bucket, lease_s: float = LEASE_S) -> Lease:
    return await Lease.acquire(bucket, lease_s, Waits())


def open_origin(url: str, directory: Path, redirect: Any = "auto") -> Any:
    return origin.open_origin(url, directory, Waits(), lease_s=LEASE_S, redirect=redirect, clock=lambda: 0.0)


class Lost:
    """An object store whose next answer to one kind of request is lost, the request carried out or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, carried_out: bool) -> None:
        request = getattr(obstore, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(obstore, name, request)
            if carried_out:
                await request(*args, **kwargs)
            raise obstore.exceptions.GenericError("the answer is lost")

        monkeypatch.setattr(obstore, name, call)


# The lease.


async def test_a_lease_that_was_given_back_is_taken_at_once(bucket: Bucket) -> None:
    await (await held(bucket)).release()
    second = await held(bucket)
    second.check()


async def test_a_lease_that_is_renewed_is_not_taken(bucket: Bucket) -> None:
    lease = await held(bucket, 1.0)
    stop = asyncio.Event()
    holding = asyncio.create_task(lease.hold(stop), name="hold")
    with pytest.raises(ConfigError, match=r"in use by process \d+ on .*: stop it, or give each"):
        await held(bucket)
    stop.set()
    await holding


async def test_dead_process_is_succeeded_after_its_lease(bucket: Bucket) -> None:
    dead = await held(bucket, 0.2)
    chunks = await ObjectChunks.opened(bucket, dead, 0.0, redirect=False)
    documents = ObjectDocuments(bucket, dead)
    await documents.versions_of("job-1")
    await held(bucket)
    with pytest.raises(StoreUnavailable, match="could not be renewed in time"):
        dead.check()
    for writing in (
        chunks.put(CHUNK.digest, [DATA], 1.0),
        chunks.missing([CHUNK], 1.0),
        chunks.remove({CHUNK.digest: 1.0}),
        documents.save_versions(JobVersions("job-1")),
        documents.put_manifest("job-1", 0, b"manifest"),
        documents.remove_manifest("job-1", 0),
    ):
        with pytest.raises(StoreUnavailable):
            await writing
    with pytest.raises(Fenced, match="written by another process"):
        await dead.hold(asyncio.Event())


async def test_of_two_that_begin_at_once_one_is_refused(bucket: Bucket) -> None:
    stop = asyncio.Event()

    async def acquire_and_hold() -> None:
        # The holder renews: the other may have read the document before it was written, or after.
        try:
            lease = await held(bucket, 1.0)
        except ConfigError:
            stop.set()
            raise
        await lease.hold(stop)

    results = await asyncio.gather(acquire_and_hold(), acquire_and_hold(), return_exceptions=True)
    [refused] = [result for result in results if result is not None]
    assert isinstance(refused, ConfigError)
    assert "in use by another process" in str(refused) or "in use by process" in str(refused)


async def test_foreign_owner_document_is_left_alone(memory: Bucket) -> None:
    await memory.put("owner.json", b'{"owner": 1}')
    with pytest.raises(ConfigError, match=r"owner\.json .*use another prefix"):
        await held(memory)


async def test_a_server_that_does_not_keep_to_conditions_is_refused(
    memory: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put_async

    async def heedless(*args: Any, **kwargs: Any) -> Any:
        return await put(*args, **{**kwargs, "mode": "overwrite"})

    monkeypatch.setattr(obstore, "put_async", heedless)
    with pytest.raises(ConfigError, match="conditional writes"):
        await held(memory)


# Compare-and-set.


async def test_of_two_processes_that_commit_on_one_head_one_is_fenced(bucket: Bucket) -> None:
    lease = await held(bucket)
    ours, theirs = ObjectDocuments(bucket, lease), ObjectDocuments(bucket, lease)
    assert await ours.versions_of("job-1") == await theirs.versions_of("job-1")
    first = JobVersions("job-1", versions=(Version(0, "d0", 10, 1.0),))
    await ours.save_versions(first)
    with pytest.raises(Fenced, match=r"models/job-1/model\.json .* was written by another process"):
        await theirs.save_versions(JobVersions("job-1", versions=(Version(0, "another", 10, 2.0),)))
    assert await theirs.versions_of("job-1") == first


@pytest.mark.parametrize("carried_out", [True, False])
async def test_write_with_a_lost_response_is_not_mistaken_for_another_process(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    document = ExclusiveObject(bucket, "document", None)
    await document.write(b"first")
    Lost(monkeypatch, "put_async", carried_out=carried_out)
    with pytest.raises(StoreUnavailable, match="the answer is lost"):
        await document.write(b"second")
    await document.write(b"third")
    assert (await bucket.get("document")).data == b"third"


async def test_late_write_of_a_dead_process_does_not_undo_a_newer_one(bucket: Bucket) -> None:
    await bucket.replace("document", b"of the dead")
    seen = (await bucket.get("document")).version
    await bucket.replace("document", b"of the living")
    with pytest.raises(Changed):
        await bucket.put_if_version("document", b"late", seen)
    assert (await bucket.get("document")).data == b"of the living"


# Garbage.


async def test_chunks_found_at_start_count_as_used_then(bucket: Bucket) -> None:
    lease = await held(bucket)
    await (await ObjectChunks.opened(bucket, lease, 1.0, redirect=False)).put(CHUNK.digest, [DATA], 2.0)
    restarted = await ObjectChunks.opened(bucket, lease, 100.0, redirect=False)
    assert await restarted.last_used() == {CHUNK.digest: 100.0}


@pytest.mark.parametrize("carried_out", [True, False])
async def test_chunk_with_an_unconfirmed_removal_is_not_present_or_accepted(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    chunks = await ObjectChunks.opened(bucket, await held(bucket), 0.0, redirect=False)
    await chunks.put(CHUNK.digest, [DATA], 1.0)
    Lost(monkeypatch, "delete_async", carried_out=carried_out)
    with pytest.raises(StoreUnavailable):
        await chunks.remove({CHUNK.digest: 1.0})
    assert await chunks.missing([CHUNK], 2.0) == [CHUNK.digest]
    with pytest.raises(StoreUnavailable, match="is being removed as garbage"):
        await chunks.put(CHUNK.digest, [DATA], 2.0)
    # The next collection finds nothing new, and ends what was begun.
    assert await chunks.last_used() == {}
    await chunks.remove({})
    with pytest.raises(NotFound):
        await chunks.read(CHUNK.digest)
    await chunks.put(CHUNK.digest, [DATA], 3.0)
    assert await chunks.missing([CHUNK], 4.0) == []


async def test_hanging_removal_is_cancelled_before_the_lease_expires(
    memory: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = await ObjectChunks.opened(memory, await held(memory, 0.5), 0.0, redirect=False)
    await chunks.put(CHUNK.digest, [DATA], 1.0)

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(obstore, "delete_async", hang)
    stopwatch = Stopwatch()
    with pytest.raises(StoreUnavailable, match="did not answer within the lease"):
        await chunks.remove({CHUNK.digest: 1.0})
    assert stopwatch.read() < 0.5


async def test_upload_with_a_lost_response_is_collected_like_any_other(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = await ObjectChunks.opened(bucket, await held(bucket), 0.0, redirect=False)
    Lost(monkeypatch, "put_async", carried_out=True)
    with pytest.raises(StoreUnavailable):
        await chunks.put(CHUNK.digest, [DATA], 7.0)
    assert await chunks.last_used() == {CHUNK.digest: 7.0}
    assert await chunks.missing([CHUNK], 8.0) == []


async def test_chunk_removed_externally_is_reported_missing(bucket: Bucket) -> None:
    chunks = await ObjectChunks.opened(bucket, await held(bucket), 0.0, redirect=False)
    await chunks.put(CHUNK.digest, [DATA], 1.0)
    await bucket.remove([f"chunks/{CHUNK.digest}"])
    assert await chunks.last_used() == {}
    assert await chunks.missing([CHUNK], 2.0) == [CHUNK.digest]


# What the origin is.


async def test_a_path_or_a_file_url_is_a_folder(tmp_path: Path) -> None:
    for url, folder in [("", "plain"), ((tmp_path / "by url").as_uri(), "by url")]:
        async with open_origin(url, tmp_path / "plain") as found:
            await found.chunks.put(CHUNK.digest, [DATA], 0.0)
            source = await found.chunks.source(CHUNK.digest)
            assert isinstance(source, LocalFile)
            assert source.path.is_relative_to(tmp_path / folder)


async def test_readers_are_redirected_if_the_object_store_can_sign(s3_url: str, tmp_path: Path) -> None:
    for url, redirect, kind in [
        (s3_url, "auto", Redirect),
        (s3_url, "off", Proxied),
        ("memory:///", "auto", Proxied),
    ]:
        async with open_origin(url, tmp_path, redirect) as found:
            await found.chunks.put(CHUNK.digest, [DATA], 0.0)
            assert isinstance(await found.chunks.source(CHUNK.digest), kind)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("weights", "use s3://bucket/prefix, gs://, az:// or file:///folder"),
        ("http://127.0.0.1:8701", "use s3://bucket/prefix"),
        ("ftp://host/path", "use s3://bucket/prefix"),
        ("file://host/path", "use file:///path"),
        ("s3://", "Unable to recognise URL"),
        ("az://container/prefix", "Account must be specified"),
        ("s3://no-such-bucket/prefix", "The specified bucket does not exist.*create the bucket, or correct its name"),
    ],
)
async def test_an_origin_that_cannot_be_one_is_a_configuration_error(
    s3_url: str, tmp_path: Path, url: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        async with open_origin(url, tmp_path):
            pass


async def test_missing_credentials_are_named_in_the_error(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"no credentials were found; set the .*AWS_ACCESS_KEY_ID"):
        async with open_origin(s3_url, tmp_path):
            pass


async def test_credentials_that_are_refused_are_a_configuration_error(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = S3Server(tmp_path, strict=True)
    await asyncio.to_thread(strict.start)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", strict.env["AWS_ENDPOINT_URL"])
        with pytest.raises(
            ConfigError, match=r"refuses: .*check that its credentials may read, write, list and delete there"
        ):
            async with open_origin(s3_url, tmp_path):
                pass
    finally:
        strict.stop()


async def test_unresponsive_object_store_is_not_a_config_error(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match=f"object store {s3_url}"):
        async with open_origin(s3_url, tmp_path):
            pass


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "az://container/prefix", "az://container"])
def test_bucket_accepts_urls_of_other_clouds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert Bucket(url).url == url
