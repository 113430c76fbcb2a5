"""What Redis refuses, and whether it is worth trying again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlboost.shared.errors import BusUnavailable, ConfigError, Fatal, RLBoostError
from rlboost.shared.messages import Drain
from rlboost.shared.process.lifecycle import EXIT_CONFIG
from rlboost.shared.redis import bus as redis_bus
from rlboost.shared.redis.bus import MAX_BLOCK_S, MAX_CONNECTIONS, RedisBus, connect
from rlboost.shared.redis.durability import CLUSTER, Durability, durability, refusal
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, AppendRaw, Fence, HashSet, Op, Remove, WrongType
from rlboost.shared.weights.peers.directory import list_peers
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tests.support.service_process import ServiceProcess


@asynccontextmanager
async def server_that_refuses_writes(reply: str) -> AsyncIterator[RedisBus]:
    answers = {b"MULTI": "+OK", b"EXEC": "-EXECABORT Transaction discarded because of previous errors."}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                n_bytes = int((await reader.readline())[1:])
                words.append((await reader.readexactly(n_bytes + 2))[:-2])
            writes = words[0] in {b"HSET", b"XADD"}
            writer.write(f"{f'-{reply}' if writes else answers.get(words[0], '+OK')}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bus = RedisBus(f"redis://127.0.0.1:{port}/0?protocol=2")
    try:
        yield bus
    finally:
        await bus.close()
        server.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("MISCONF Errors writing to the AOF file: No space left on device", BusUnavailable),
        ("OOM command not allowed when used memory > 'maxmemory'.", BusUnavailable),
        ("READONLY You can't write against a read only replica.", BusUnavailable),
        ("NOREPLICAS Not enough good replicas to write.", BusUnavailable),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", Fatal),
    ],
)
async def test_refused_write_is_retryable_when_redis_may_accept_it_later(reply: str, error: type[RLBoostError]) -> None:
    async with server_that_refuses_writes(reply) as bus:
        with pytest.raises(error, match=re.escape(reply.partition(" ")[2])):
            await bus.append("stream", Drain())
        with pytest.raises(error, match=re.escape(reply.partition(" ")[2])):
            await bus.transact([HashSet("key", {"a": "b"}), HashSet("key", {"c": "d"})])


async def test_writes_wait_out_a_snapshot_that_redis_cannot_save(tmp_path: Path) -> None:
    """A folder in the snapshot's place makes saving fail, for root too."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    bus = RedisBus(server.url)
    ops: list[Op] = [HashSet("key", {"a": "b"}), Append("stream", Drain())]

    async def is_refused() -> str:
        try:
            await bus.transact(ops)
        except BusUnavailable as error:
            return str(error)
        return ""

    async def is_saved() -> bool:
        return bool((await bus.command("INFO", "persistence"))["rdb_last_bgsave_status"] == "ok")

    try:
        (snapshot := tmp_path / "redis/dump.rdb").mkdir()
        await bus.command("CONFIG", "SET", "save", "1 1")
        refusal = await eventually(is_refused)
        assert "MISCONF" in refusal
        assert "free space on its disk, or memory for its fork: its log says which" in refusal
        assert "MISCONF" in await refusal_of(bus.transact(ops, Fence("epoch", 0)))
        snapshot.rmdir()
        await bus.command("BGSAVE", "SCHEDULE")
        await eventually(is_saved)
        await bus.transact(ops)
    finally:
        await bus.close()
        server.stop()


async def refusal_of(write: Awaitable[None]) -> str:
    with pytest.raises(BusUnavailable) as refused:
        await write
    return str(refused.value)


async def test_operations_beyond_the_connections_wait_for_one(redis_url: str) -> None:
    bus = RedisBus(redis_url)
    try:
        assert set(await asyncio.gather(*(bus.hash_get(f"key-{i}", "field") for i in range(1000)))) == {None}
    finally:
        await bus.close()


@pytest.mark.parametrize("fence", [None, Fence("epoch", 0)])
async def test_wrong_type_of_a_worker_key_costs_that_worker_only(redis_url: str, fence: Fence | None) -> None:
    """Before Redis 7 a worker may replace its own streams, and the list of peers."""
    bus = RedisBus(redis_url)
    good, bad = names.worker_reports("good-1"), names.worker_reports("bad-1")
    commands = names.worker_commands("bad-1")
    try:
        await bus.append(good, Drain(reason="kept"))
        for key in (bad, commands, names.WEIGHT_PEERS):
            await bus.command("SET", key, "x")
        assert await list_peers(bus) == []
        entries, raw = await bus.read_with_raw({}, [bad, good])
        assert ([entry.stream for entry in raw], entries) == ([good], [])
        await bus.command("SET", bad, "x")
        assert await bus.length(bad) == 0
        ops: list[Op] = [
            HashSet("other", {"a": "1"}),
            Append(commands, Drain(reason="x")),
            Append("log", Drain(reason="once")),
        ]
        await bus.transact([*ops, HashSet(names.WEIGHT_PEERS, {"good-1": ""})], fence)
        assert await bus.hash_all(names.WEIGHT_PEERS) == {"good-1": ""}
        assert [await bus.length(stream) for stream in (commands, "log")] == [1, 1]
        await bus.command("SET", "mine", "x")
        with pytest.raises(WrongType):
            await bus.read({"mine": START})
        with pytest.raises(WrongType):
            await bus.transact([Append("mine", Drain(reason="x"))])
    finally:
        await bus.close()


async def test_read_of_large_raw_entries_is_bounded(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may write entries of any size, many in one transaction, small ones first; others lose nothing."""
    monkeypatch.setattr(redis_bus, "RAW_BYTES", 1 << 20)
    bus = RedisBus(redis_url)
    try:
        bodies = [*[b"small"] * 200, *[bytes(1 << 18)] * 16]
        await bus.transact([AppendRaw("bad", body, None) for body in bodies])
        await bus.transact([AppendRaw("good", b"fine", None)] * 3)
        read, n_good = list[bytes](), 0
        while raw := (await bus.read_with_raw({}, ["bad", "good"], count=1024))[1]:
            assert sum(entry.n_bytes for entry in raw) <= (1 << 20)
            read += [entry.body for entry in raw if entry.stream == "bad"]
            n_good += len([entry for entry in raw if entry.stream == "good"])
            await bus.transact([Remove(entry.stream, (entry.id,)) for entry in raw])
        assert (read, n_good) == (bodies, 3)
    finally:
        await bus.close()


async def test_operation_without_a_connection_names_the_reason(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_bus, "CONNECTION_WAIT_S", 0.1)
    bus = RedisBus(redis_url)
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(MAX_CONNECTIONS - 1):  # the other one is for fenced transactions
                group.create_task(bus.read({f"stream-{i}": "0-0"}, block_s=MAX_BLOCK_S), name=f"read-{i}")
            await asyncio.sleep(0)
            with pytest.raises(BusUnavailable, match="one of 64 connections, which others use"):
                await bus.hash_get("key", "field")
    finally:
        await bus.close()


async def test_blocked_read_of_a_server_that_becomes_a_replica_is_retryable(redis_url: str) -> None:
    bus = RedisBus(redis_url)
    try:
        reads = [
            asyncio.create_task(read)
            for read in (
                bus.read({"quiet": "0-0"}, block_s=MAX_BLOCK_S),
                bus.consume("jobs", "group", "consumer", block_s=MAX_BLOCK_S),
            )
        ]

        async def are_blocked() -> bool:
            return int((await bus.command("INFO", "clients"))["blocked_clients"]) == len(reads)

        await eventually(are_blocked)
        await bus.command("REPLICAOF", "127.0.0.1", "1")
        for read in reads:
            with pytest.raises(BusUnavailable, match="waiting for the primary"):
                await read
        await bus.command("REPLICAOF", "NO", "ONE")
        await bus.append("quiet", Drain())
    finally:
        await bus.command("REPLICAOF", "NO", "ONE")
        await bus.close()


async def test_service_that_waits_for_a_redis_which_loads_says_so() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Fatal, match="start this again when Redis has loaded its data"):
            await connect(f"redis://127.0.0.1:{port}/0", "a-service", limit_s=0.1)


async def test_durability_of_a_server_that_loses_data(redis_url: str) -> None:
    bus = RedisBus(redis_url)
    try:
        await bus.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        found = await durability(bus)
        assert (found.policy, found.has_file, found.evicted) == ("allkeys-lru", False, 0)
        text = refusal(found.losses, bus.address)
        for part in ("set maxmemory-policy noeviction", "set appendonly yes", "RLBOOST_MANAGER_REDIS_DURABILITY=off"):
            assert part in text
    finally:
        await bus.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await bus.close()


async def test_manager_refuses_a_node_of_redis_cluster(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, aof=True, options={"cluster-enabled": "yes"})
    server.start()
    manager = ServiceProcess(
        "rollout_manager", "RLBOOST_MANAGER_", tmp_path, server.url, {"RLBOOST_MANAGER_REDIS_DURABILITY": "off"}
    )
    try:
        manager.launch()
        assert await asyncio.to_thread(manager.wait) == EXIT_CONFIG
        assert f"127.0.0.1:{server.port}: {CLUSTER}" in manager.log()
    finally:
        manager.kill()
        server.stop()


@pytest.mark.parametrize(
    "url", ["redis+sentinel://sentinel:26379/mymaster", "redis+cluster://a:6379", "redis://a:6379,b:6379/0"]
)
def test_url_of_several_servers_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="Redis Cluster and Sentinel are not supported"):
        RedisBus(url)


def test_durability_names_what_loses_data() -> None:
    assert Durability().losses == Durability().warnings == []
    sound = Durability("noeviction", True, "always")
    assert sound.losses == sound.warnings == []
    assert "appendfsync no" in sound._replace(sync="no").losses[0]
    assert "up to two seconds" in sound._replace(sync="everysec").warnings[0]
    assert "7 keys were evicted" in sound._replace(evicted=7).warnings[0]
    for policy in ("volatile-lru", "allkeys-lru", "volatile-ttl", "allkeys-random", "volatile-lfu"):
        assert policy in sound._replace(policy=policy).losses[0]
