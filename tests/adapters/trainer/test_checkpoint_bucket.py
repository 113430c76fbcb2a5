"""Checkpoints in a real S3-compatible server: kills, corruption, outages, and resuming on another machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import stamina
import structlog

from rlboost.services.trainer.adapters import checkpoint_bucket
from rlboost.services.trainer.adapters.checkpoint_bucket import CheckpointBucket, CheckpointLocations
from rlboost.services.trainer.adapters.checkpoint_folder import CheckpointFolder
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.shared import bucket
from rlboost.shared.bucket import Bucket
from rlboost.shared.errors import ConfigError, Corrupt, Fatal
from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[3]
PART = 1000


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_bucket, "PART_BYTES", PART)


def state(step: int) -> TrainState:
    return TrainState(step, f"{step}-0", 10, f"{step}-5", "abc")


def content(step: int) -> dict[str, bytes]:
    """Files of several parts, of a part to the byte, and of none."""
    return {"long": bytes([step % 251]) * (4 * PART + 7), "exact": bytes([step % 13]) * PART, "empty": b""}


def writing(step: int) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for name, data in content(step).items():
            (directory / name).write_bytes(data)

    return write


def read(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def objects(url: str) -> dict[str, int]:
    async def sizes() -> dict[str, int]:
        bucket = Bucket(url)
        return {
            f"{folder}/{name}": size
            for folder in ("manifests", "files", "probe")
            for name, size in (await bucket.sizes(folder)).items()
        }

    return asyncio.run(sizes())


def test_checkpoint_is_downloaded_exactly_on_another_machine(s3_url: str, tmp_path: Path) -> None:
    here = CheckpointBucket(s3_url, tmp_path / "here", 5.0)
    assert here.newest() is None
    for step in (5, 10, 15, 1_000_000):
        here.save(state(step), writing(step))
    assert list((tmp_path / "here").iterdir()) == [], "nothing stays on the disk"
    there = CheckpointBucket(s3_url, tmp_path / "there", 5.0)
    found = there.newest()
    assert found is not None
    assert found[0] == state(1_000_000)
    assert read(found[1]) == content(1_000_000)
    assert there.fallback() == state(15)
    assert [store.progress().split(",")[0] for store in (here, there)] == ["5.01 kB of 5.01 kB"] * 2
    names = objects(s3_url)
    documents = sorted(name.rpartition("-")[0] for name in names if name.startswith("manifests"))
    assert documents == ["manifests/step-000015", "manifests/step-1000000"]
    assert len(names) == 2 + 2 * (5 + 1)


SAVER = """
import asyncio, os, sys, pathlib
from rlboost.services.trainer.adapters import checkpoint_bucket
from rlboost.shared.bucket import Bucket
from tests.adapters.trainer.test_checkpoint_bucket import PART, state, writing
url, scratch = sys.argv[1], pathlib.Path(sys.argv[2])
checkpoint_bucket.PART_BYTES = PART
checkpoint_bucket._EXPIRY_S = 0.0

def mortal(request, life):
    async def call(self, *args):
        life[0] -= 1
        if life[0] == 0:
            # The request is sent, complete or not, and its answer is never read.
            asyncio.ensure_future(request(self, *args))
            await asyncio.sleep(0.002)
            os.kill(os.getpid(), 9)
        answer = await request(self, *args)
        if life[0] == 1:
            os.kill(os.getpid(), 9)  # this request is answered, the next one not sent
        return answer
    return call

for line in sys.stdin:
    step, n = map(int, line.split())
    child = os.fork()
    if child == 0:
        life = [n]
        for name in ("put", "remove"):
            setattr(Bucket, name, mortal(getattr(Bucket, name), life))
        checkpoint_bucket.CheckpointBucket(url, scratch, 5.0).save(state(step), writing(step))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def saver(url: str, scratch: Path) -> Iterator[Callable[[int, int], int]]:
    """Give what saves a step in a process that dies of its n-th request; it returns the exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, url, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines, answers = process.stdin, process.stdout

    def save(step: int, n: int) -> int:
        print(step, n, file=lines, flush=True)
        return int(answers.readline())

    with process:
        yield save
        lines.close()


def test_kill_at_any_request_leaves_complete_checkpoints_only(s3_url: str, tmp_path: Path) -> None:
    steps: list[int] = []
    with saver(s3_url, tmp_path / "theirs") as save:
        assert save(1, -1) == save(2, -1) == 0
        for n in range(1, 100):
            step = 2 + n
            code = save(step, n)
            assert code in (0, -9)
            with structlog.testing.capture_logs() as logs:
                found = CheckpointBucket(s3_url, tmp_path / "ours", 5.0).newest()
            assert logs == []
            assert found is not None
            newest = found[0].step
            assert newest >= max(steps, default=2)
            assert read(found[1]) == content(newest)
            steps.append(newest)
            if code == 0:
                break
        assert code == 0
        assert len(steps) > 8
        assert steps[0] == 2, "without its manifest there is no checkpoint"
    # What was killed has left objects; the last one, which was not, has removed them.
    assert len(objects(s3_url)) == 2 + 2 * (5 + 1)


def corrupt(url: str, name: str, data: bytes | None, step: str = "step-000020") -> None:
    async def change() -> None:
        bucket = Bucket(url)
        for path in [path for path in await bucket.sizes("files") if path.startswith(step) and name in path]:
            if data is None:
                await bucket.remove([f"files/{path}"])
            else:
                await bucket.put(f"files/{path}", data)

    asyncio.run(change())


@pytest.mark.parametrize("data", [b"x" * PART, b"", None], ids=["changed", "short", "gone"])
def test_corrupt_bucket_checkpoint_is_skipped_with_a_warning(s3_url: str, tmp_path: Path, data: bytes | None) -> None:
    store = CheckpointBucket(s3_url, tmp_path / "c", 5.0)
    store.save(state(10), writing(10))
    store.save(state(20), writing(20))
    corrupt(s3_url, "long/000001", data)
    with structlog.testing.capture_logs() as logs:
        found = store.newest()
    assert found is not None
    assert found[0] == state(10)
    assert [entry["event"] for entry in logs] == ["checkpoint_corrupt"]
    store.save(state(20), writing(20))
    found = store.newest()
    assert found is not None
    assert found[0] == state(20)
    corrupt(s3_url, "long/000001", data)
    corrupt(s3_url, "long/000001", data, "step-000010")
    with pytest.raises(Corrupt, match=rf"no checkpoint in {s3_url} verifies \(step-000020, step-000010;"):
        store.newest()


def test_late_upload_spares_its_successors_upload(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine, which both use for their files."""
    late, ours = (CheckpointBucket(s3_url, tmp_path / "c", 5.0) for _ in range(2))
    late.save(state(5), writing(5))
    found = ours.newest()
    put, ended = Bucket.put, list[str]()

    async def meanwhile(self: Bucket, path: str, data: bytes) -> None:
        await put(self, path, data)
        if path.startswith("files/") and not ended:
            ended.append(path)
            await asyncio.to_thread(late.save, state(10), writing(10))

    monkeypatch.setattr(Bucket, "put", meanwhile)
    ours.save(state(10), writing(10))
    assert found is not None
    with structlog.testing.capture_logs() as logs:
        found = ours.newest()
    assert logs == []
    assert found is not None
    assert found[0] == state(10)
    assert read(found[1]) == content(10)
    ours.save(state(20), writing(20))
    assert list((tmp_path / "c").iterdir()) == [], "the download is removed by the next save"
    assert len(objects(s3_url)) == 2 + 2 * (5 + 1), "and unused files of earlier steps are removed"


def interrupted(
    monkeypatch: pytest.MonkeyPatch, who: CheckpointBucket, before: Callable[[str], bool], meanwhile: Callable[[], None]
) -> None:
    """Have something happen before the first upload of `who` whose path is such a one."""
    put, done = Bucket.put, list[str]()

    async def late(self: Bucket, path: str, data: bytes) -> None:
        if self is who._bucket and before(path) and not done:
            done.append(path)
            await asyncio.to_thread(meanwhile)
        await put(self, path, data)

    monkeypatch.setattr(Bucket, "put", late)


def is_manifest(path: str) -> bool:
    return path.startswith("manifests/")


def is_third_part(path: str) -> bool:
    return path.endswith("long/000002")


@pytest.mark.parametrize("before", [is_manifest, is_third_part])
@pytest.mark.parametrize("theirs", [[10, 15], [15], [10, 15, 20, 25]])
def test_late_upload_of_an_earlier_step_breaks_no_checkpoint(
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[str], bool],
    theirs: list[int],
) -> None:
    """A trainer that was thought dead is slow with step 10, while its successor is far beyond."""
    late, ours = (CheckpointBucket(s3_url, tmp_path / name, 5.0) for name in ("late", "ours"))
    late.save(state(1), writing(1))
    late.save(state(5), writing(5))

    def meanwhile() -> None:
        assert ours.newest() is not None
        for step in theirs:
            ours.save(state(step), writing(step))

    interrupted(monkeypatch, late, before, meanwhile)
    late.save(state(10), writing(10))
    whole = sorted({5, 10, *theirs})[-2:]
    assert ours.fallback() == state(whole[0])
    corrupt(s3_url, "long/000001", None, f"step-{whole[1]:06d}")
    found = CheckpointBucket(s3_url, tmp_path / "third", 5.0).newest()
    assert found is not None
    assert found[0] == state(whole[0])
    assert read(found[1]) == content(whole[0])
    monkeypatch.setattr(checkpoint_bucket, "_EXPIRY_S", 0.0)
    for step in (30, 35):
        ours.save(state(step), writing(step))
    assert len(objects(s3_url)) == 2 + 2 * (5 + 1), "in the end all of it is gone"


def test_later_trainers_checkpoint_of_a_step_counts(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, ours = (CheckpointBucket(s3_url, tmp_path / name, 5.0) for name in ("late", "ours"))
    late.save(state(5), writing(5))
    ours.newest()
    ours._started_at = late._started_at + 1
    mine = replace(state(10), finished_cursor="ours")
    interrupted(monkeypatch, late, is_manifest, lambda: ours.save(mine, writing(10)))
    late.save(state(10), writing(10))
    found = CheckpointBucket(s3_url, tmp_path / "third", 5.0).newest()
    assert found is not None
    assert found[0] == mine
    assert ours.fallback() == state(5)


def test_upload_whose_files_are_removed_fails_without_manifest(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer was paused until its files had expired."""
    late, ours = (CheckpointBucket(s3_url, tmp_path / name, 5.0) for name in ("late", "ours"))
    late.save(state(5), writing(5))
    monkeypatch.setattr(checkpoint_bucket, "_EXPIRY_S", 0.0)

    def meanwhile() -> None:
        for step in (15, 20):
            ours.save(state(step), writing(step))

    interrupted(monkeypatch, late, is_manifest, meanwhile)
    with pytest.raises(Fatal, match=r"files of checkpoint step-000010-\w+ were removed .* look for another trainer"):
        late.save(state(10), writing(10))
    assert len(objects(s3_url)) == 2 + 2 * (5 + 1)


def test_removed_manifest_fails_the_checkpoint_by_name(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Bucket.put

    async def swept(self: Bucket, path: str, data: bytes) -> None:
        await put(self, path, data)
        if is_manifest(path):
            await self.remove([path])

    monkeypatch.setattr(Bucket, "put", swept)
    with pytest.raises(Fatal, match=r"files of checkpoint step-000005-\w+ were removed .* lifecycle rule"):
        CheckpointBucket(s3_url, tmp_path / "c", 5.0).save(state(5), writing(5))


def test_unavailable_object_store_fails_the_checkpoint_by_name(s3_url: str, tmp_path: Path) -> None:
    store = CheckpointBucket(s3_url.replace("s3://weights", "s3://no-such-bucket"), tmp_path / "c", 0.5)
    with pytest.raises(Fatal, match=r"step-000010 cannot be written to s3://no-such-bucket"):
        store.save(state(10), writing(10))


def test_unusable_bucket_is_rejected_before_the_first_step(s3_url: str, tmp_path: Path) -> None:
    store = CheckpointBucket(s3_url.replace("s3://weights", "s3://no-such-bucket"), tmp_path / "c", 0.5)
    with pytest.raises(ConfigError, match="create the bucket, or correct its name"):
        store.newest()


def test_outage_within_the_limit_is_retried(
    tmp_path_factory: pytest.TempPathFactory, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = S3Server(tmp_path_factory.mktemp("later"))
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    # Twelve tries, with what the client waits between its own, take half a minute.
    monkeypatch.setattr(bucket, "_RETRIES", {**bucket._RETRIES, "max_retries": 0})
    patient = stamina.retry_context
    monkeypatch.setattr(
        stamina, "retry_context", lambda **limits: patient(**limits | {"wait_max": 0.02, "wait_jitter": 0.0})
    )
    store = CheckpointBucket(f"s3://{server.bucket}/late", tmp_path / "c", 60.0)
    put, tries = Bucket.put, []
    starting = asyncio.Lock()  # it answers before its bucket is there, which other parts must not see

    async def counting(self: Bucket, path: str, data: bytes) -> None:
        tries.append(path)
        async with starting:
            if len(tries) == 12:
                await asyncio.to_thread(server.start)
        await put(self, path, data)

    monkeypatch.setattr(Bucket, "put", counting)
    try:
        store.save(state(10), writing(10))
        assert store.newest() is not None
    finally:
        server.stop()


def places(tmp_path: Path) -> CheckpointLocations:
    return CheckpointLocations(tmp_path / "runs" / "next", 5.0)


def test_job_has_its_own_prefix_in_the_bucket(s3_url: str, tmp_path: Path) -> None:
    places(tmp_path).store(f"{s3_url}/", "a").save(state(10), writing(10))
    assert places(tmp_path).store(s3_url, "b").newest() is None
    assert places(tmp_path).store(s3_url, "a").newest() is not None
    places(tmp_path).store(str(tmp_path / "disk"), "a").save(state(10), writing(10))
    assert (tmp_path / "disk/a/step-000010").is_dir()
    places(tmp_path).store("", "next").save(state(10), writing(10))
    assert (tmp_path / "runs/next/checkpoints/step-000010").is_dir()


def test_resume_finds_a_checkpoint_by_url_or_parent_url(s3_url: str, tmp_path: Path) -> None:
    store = places(tmp_path).store(s3_url, "a")
    store.save(state(10), writing(10))
    store.save(state(20), writing(20))
    for resume, step in ((f"{s3_url}/a", 20), (f"{s3_url}/a/", 20), (f"{s3_url}/a/step-000010", 10)):
        find = places(tmp_path).predecessor(resume)
        assert find is not None
        found, directory = find()
        assert found == state(step)
        assert read(directory) == content(step)


def test_resume_finds_a_checkpoint_by_folder_or_parent_folder(tmp_path: Path) -> None:
    job = tmp_path / "runs/a"
    store = CheckpointFolder(job / "checkpoints")
    store.save(state(10), writing(10))
    store.save(state(20), writing(20))
    for resume, step in ((job, 20), (job / "checkpoints", 20), (job / "checkpoints/step-000010", 10)):
        find = places(tmp_path).predecessor(str(resume))
        assert find is not None
        found, directory = find()
        assert found == state(step)
        assert (directory / "long").read_bytes() == content(step)["long"]


@pytest.mark.parametrize("where", ["{s3}/missing", "{disk}/missing", "{s3}/a/step-000030", "Auto"])
def test_resume_from_a_missing_checkpoint_names_the_alternatives(s3_url: str, tmp_path: Path, where: str) -> None:
    places(tmp_path).store(s3_url, "a").save(state(10), writing(10))
    find = places(tmp_path).predecessor(where.format(s3=s3_url, disk=tmp_path))
    assert find is not None
    with pytest.raises(ConfigError, match=r"no checkpoint at .*: give auto"):
        find()


def test_resume_from_a_corrupt_named_checkpoint_is_rejected(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).save(state(10), writing(10))
    (tmp_path / "step-000010/long").write_bytes(b"")
    find = places(tmp_path).predecessor(str(tmp_path / "step-000010"))
    assert find is not None
    with pytest.raises(ConfigError, match="is corrupt: long"):
        find()


def test_resume_words_name_no_job_and_unknown_scheme_is_rejected(tmp_path: Path) -> None:
    assert places(tmp_path).predecessor("auto") is places(tmp_path).predecessor("never") is None
    with pytest.raises(ConfigError, match=r"trainer.resume: hdfs:// is not supported"):
        places(tmp_path).predecessor("hdfs://x/y")
    with pytest.raises(ConfigError, match=r"trainer.checkpoints: hdfs:// is not supported"):
        places(tmp_path).store("hdfs://x/y", "a")
