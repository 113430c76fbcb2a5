"""The bus over Redis Streams, with commands that Redis 6.2 has.

Only this package imports redis-py.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import ssl
import time
from collections import OrderedDict
from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, assert_never, cast
from urllib.parse import parse_qsl, urlsplit

import redis.asyncio as aioredis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rlboost.shared.errors import BusUnavailable, ConfigError, CredentialRejected, Fatal, Undecodable
from rlboost.shared.messages import Message
from rlboost.shared.messages.codec import decode, encode
from rlboost.shared.process.waiting import count_timeout, retry_while
from rlboost.shared.redis.fenced_connection import ACQUIRE_FENCED, CAP_AND_READ_LEASES, FencedConnection
from rlboost.shared.streams.bus import (
    MAX_DEAD_LETTERS,
    START,
    Ack,
    Append,
    AppendRaw,
    Delete,
    Entry,
    Expire,
    Fence,
    HashDelete,
    HashSet,
    Op,
    RawEntry,
    Remove,
    Renew,
    Trim,
    WrongType,
    dead_letter_op,
    report_dead_letter,
)
from rlboost.shared.streams.names import DEAD_LETTERS, worker_key_type
from rlboost.shared.tls import CA_VARIABLE

log = structlog.get_logger(__name__)

# --- What makes Redis accept a rejected command later -----------------------------------------------------------------


_CODES: dict[type[ResponseError], str] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
}
"""The codes that redis-py replaces by a class; of other replies it keeps the code in the text."""
_REMEDIES = {
    "OOM": "raise its maxmemory; what consumers have read is trimmed in the meantime",
    "READONLY": "it is a replica: waiting for the primary",
    "MASTERDOWN": "waiting for its primary",
    "UNBLOCKED": "it became a replica during a read: waiting for the primary",
    "CLUSTERDOWN": "waiting for the cluster",
    "LOADING": "it loads its data",
    "BUSY": "it runs a script",
    "MISCONF": "free space on its disk, or memory for its fork: its log says which",
    "NOREPLICAS": "start its replicas",
}
_BEFORE_REPLY = re.compile(r""".*(caused error: \(['"]|@user_script: ?\d+: -?)""", re.DOTALL)
"""What precedes the reply to a command in a transaction (redis-py) or in a script (before Redis 7)."""


def reply_code(error: ResponseError) -> str:
    """Return the first word of Redis's reply to the command that failed: its code, if the reply has one."""
    return _CODES.get(type(error)) or _BEFORE_REPLY.sub("", str(error), count=1).partition(" ")[0]


def remedy(error: ResponseError) -> str | None:
    """Return what makes Redis accept the command later, None if it never will."""
    return _REMEDIES.get(reply_code(error))


# --- The bus ----------------------------------------------------------------------------------------------------------


_FIELD = b"m"
_SOCKET_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Maximum number of connections of one client. redis-py rejects an operation beyond it; here it waits for one."""
CONNECTION_WAIT_S = 10.0
"""How long an operation waits for a connection."""
MAX_BLOCK_S = 2.0
"""The longest blocking read: well below the socket timeout, or a quiet stream would look like a dead server."""

RAW_BYTES = 64 << 20
"""Target size of what one read returns of raw streams, whose writers nothing else limits."""
_READ_RAW = """
local count, limit, size = tonumber(ARGV[1]), tonumber(ARGV[2]), 0
for _, stream in ipairs(KEYS) do
  size = size + (redis.call('MEMORY', 'USAGE', stream, 'SAMPLES', 0) or 0)
end
local found = {}
for i, stream in ipairs(KEYS) do
  if size <= limit then
    found[i] = redis.call('XRANGE', stream, '-', '+', 'COUNT', count)
  else
    local rows, left, from = {}, limit / #KEYS, '-'
    while #rows < count and left > 0 do
      local row = redis.call('XRANGE', stream, from, '+', 'COUNT', 1)[1]
      if not row then break end
      for _, part in ipairs(row[2]) do left = left - #part - 64 end
      rows[#rows + 1], from = row, '(' .. row[1]
    end
    found[i] = rows
  end
end
return found
"""
"""Read the oldest entries of streams: of large ones, at least one each and about `limit` bytes in all."""

T = TypeVar("T")


class NoConsumerGroup(Fatal):
    """The stream or its consumer group does not exist."""


class GroupExists(Fatal):
    """The stream has this consumer group already."""


_BY_CODE = {"WRONGTYPE": WrongType, "NOGROUP": NoConsumerGroup, "BUSYGROUP": GroupExists}
"""Errors by the code that begins the reply; redis-py has no classes for these."""
_CLOSED_TRANSPORT = "the handler is closed"
"""The end of uvloop's RuntimeError for a write to a connection that the peer has closed."""


class RedisBus:
    """`shared.streams.bus.Bus` on one Redis server."""

    def __init__(self, url: str, name: str = "rlboost", *, dead_letters: str = DEAD_LETTERS) -> None:
        """Create a connection pool; no connection is opened yet.

        Args:
            url: `redis://[[user]:password@]host:port/db`, or `rediss://` for TLS.
            name: identifies this client in Redis's `CLIENT LIST` and in dead letters.
            dead_letters: the stream that receives what this client cannot decode.

        """
        self._name = name
        self._dead_letters = dead_letters
        try:
            parts = urlsplit(url)
            self.address = parts.netloc.rpartition("@")[2] or parts.path
            # redis-py's own retries are off: they would repeat an XADD whose reply was lost.
            self._redis = aioredis.Redis.from_url(
                url,
                client_name=name,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=2.0,
                retry=Retry(NoBackoff(), 0),
                max_connections=MAX_CONNECTIONS,
                **_trusted(url),
            )
            _check_database(url)
            self._redis.connection_pool.make_connection()  # opens none, and rejects options that it does not know
        except (ValueError, TypeError):
            # Neither the URL nor the parser's error is quoted: a badly split URL exposes the password.
            raise ConfigError(
                "the Redis URL is invalid: give redis://[:PASSWORD@]HOST:PORT/DB, or rediss:// for TLS, with a number "
                "as DB, and with / as %2F, @ as %40, # as %23, ? as %3F and % as %25 in the password; it names one "
                "server: Redis Cluster and Sentinel are not supported"
            ) from None
        _check_certificate(url)
        self._fenced = FencedConnection(self._redis.connection_pool)
        self._places = asyncio.Semaphore(MAX_CONNECTIONS - 1)
        """One for each connection but the fenced one."""
        self._undecodable: OrderedDict[tuple[str, str], None] = OrderedDict()
        """The newest entries that did not decode, by stream and id: each gets one dead letter, however often read."""

    async def _call(self, what: Awaitable[T]) -> T:
        """Await an operation that takes a connection of the pool."""
        is_placed = False
        try:
            async with asyncio.timeout(CONNECTION_WAIT_S):
                is_placed = await self._places.acquire()
        except TimeoutError as error:
            count_timeout("a connection to Redis", "other operations use all", CONNECTION_WAIT_S)
            text = f"waited {CONNECTION_WAIT_S:g} s for one of {MAX_CONNECTIONS} connections, which others use"
            raise BusUnavailable(f"Redis at {self.address}: {text}") from error
        finally:
            if not is_placed and inspect.iscoroutine(what):
                what.close()  # it will not be awaited
        try:
            return await self._answer(what)
        finally:
            self._places.release()

    async def _answer(self, what: Awaitable[T]) -> T:
        """Await an operation and translate its errors."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            answer = await what
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            text = str(error)
            if isinstance(error, AuthenticationError):
                raise CredentialRejected(f"Redis at {self.address} rejected the password: {text}") from error
            raise BusUnavailable(f"Redis at {self.address}: {text or type(error).__name__}") from error
        except ResponseError as error:
            code = reply_code(error)
            if code in {"READONLY", "UNBLOCKED"}:
                # After a failover: this connection is to the former primary. A new one may reach the new primary.
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            if advice := remedy(error):
                raise BusUnavailable(f"Redis at {self.address} accepts no writes: {error}; {advice}") from error
            kind = _BY_CODE.get(code, Fatal)
            raise kind(f"Redis at {self.address} rejected a command: {error}") from error
        except RedisError as error:
            raise BusUnavailable(f"Redis at {self.address}: {error!r}") from error
        except RuntimeError as error:
            if _CLOSED_TRANSPORT not in str(error):
                raise
            # redis-py does not expect it, and keeps the connection, whose handshake may be incomplete.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise BusUnavailable(f"Redis at {self.address} closed the connection") from error
        if task and task.cancelling() > cancels:
            # Before Python 3.12, asyncio.wait_for in redis-py's send can lose a cancellation that arrives as it ends.
            raise asyncio.CancelledError
        return answer

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        if not ops:
            return
        try:
            await self._transact(ops, fence)
        except WrongType:
            # The other commands took effect.
            removed = await self._remove_wrong_types({_key_of(op) for op in ops})
            if not removed:
                raise
            await self._transact([op for op in ops if _key_of(op) in removed], fence)

    async def _transact(self, ops: Sequence[Op], fence: Fence | None) -> None:
        pipe = self._redis.pipeline(transaction=True)
        for op in ops:
            _queue(pipe, op)
        if fence is None:
            await self._call(pipe.execute())
        else:
            await self._answer(self._fenced.transact([command for command, _ in pipe.command_stack], fence))

    async def append(self, stream: str, message: Message, max_len: int | None = None) -> str:
        entry_id = await self._call(self._redis.xadd(stream, {_FIELD: encode(message)}, maxlen=max_len))
        return as_text(entry_id)

    async def read(self, cursors: Mapping[str, str], *, count: int = 512, block_s: float = 0.0) -> list[Entry]:
        return (await self.read_with_raw(cursors, (), count=count, block_s=block_s))[0]

    async def read_with_raw(
        self, cursors: Mapping[str, str], raw_streams: Collection[str], *, count: int = 512, block_s: float = 0.0
    ) -> tuple[list[Entry], list[RawEntry]]:
        streams, block_ms = list(raw_streams), _block_ms(block_s)
        while True:
            waits_s = None if streams else block_ms
            try:
                reply, raw = await self._call(self._read_both(cursors, streams, count, waits_s))
                if streams and block_ms and not reply and not raw:
                    # Only waits: a blocking read returns as many entries as there are, of any size.
                    positions: Any = {**dict.fromkeys(streams, START), **cursors}
                    await self._call(self._redis.xread(positions, count=1, block=block_ms))
                    reply, raw = await self._call(self._read_both(cursors, streams, count, None))
            except WrongType:
                if not await self._remove_wrong_types([*streams, *cursors]):
                    raise
                continue
            if (entries := await self._entries(reply)) or raw or not reply:
                return entries, raw
            # No entry of this batch decoded; the streams may have more after them.
            cursors = {**cursors, **{stream: as_text(rows[-1][0]) for stream, rows in reply}}

    async def _read_both(
        self, cursors: Mapping[str, str], raw_streams: Sequence[str], count: int, block_ms: int | None
    ) -> tuple[list[tuple[str, Any]], list[RawEntry]]:
        positions = cast("Any", dict(cursors))
        if not raw_streams:
            return list(_streams(await self._redis.xread(positions, count=count, block=block_ms))), []
        pipe = self._redis.pipeline(transaction=False)
        pipe.eval(_READ_RAW, len(raw_streams), *raw_streams, count, RAW_BYTES)
        if cursors:
            pipe.xread(positions, count=count)
        found, *read = await pipe.execute()
        raw = [
            RawEntry(stream, as_text(raw_id), dict(zip(fields[::2], fields[1::2], strict=True)).get(_FIELD, b""))
            for stream, rows in zip(raw_streams, found, strict=True)
            for raw_id, fields in rows
        ]
        return [row for reply in read for row in _streams(reply)], raw

    async def consume(
        self, stream: str, group: str, consumer: str, *, count: int = 64, block_s: float = 0.0
    ) -> list[Entry]:
        try:
            reply = await self._call(
                self._redis.xreadgroup(group, consumer, {stream: ">"}, count=count, block=_block_ms(block_s))
            )
        except NoConsumerGroup:
            await self._create_group(stream, group)
            return await self.consume(stream, group, consumer, count=count, block_s=block_s)
        return await self._entries(_streams(reply), group)

    async def claim(
        self, stream: str, group: str, consumer: str, *, min_idle_s: float, count: int = 64
    ) -> list[tuple[Entry, int]]:
        await self._create_group(stream, group)
        reply = await self._call(
            self._redis.xautoclaim(stream, group, consumer, int(min_idle_s * 1000), START, count=count)
        )
        rows = [row for row in reply[1] if row[1]]
        entries = await self._entries([(stream, rows)], group)
        if not entries:
            return []
        pending = await self._call(
            self._redis.xpending_range(stream, group, entries[0].id, entries[-1].id, max(count, len(entries)), consumer)
        )
        times = {as_text(row["message_id"]): int(row["times_delivered"]) for row in pending}
        return [(entry, times.get(entry.id, 1)) for entry in entries]

    async def dead_letter(self, stream: str, group: str, entry: Entry, reason: str) -> None:
        report_dead_letter(stream, entry.id, reason)
        letter = self._letter(stream, entry.id, encode(entry.message), reason)
        await self.transact([letter, Ack(stream, group, (entry.id,))])

    async def length(self, stream: str) -> int:
        try:
            return int(await self._call(self._redis.xlen(stream)))
        except WrongType:
            if not await self._remove_wrong_types([stream]):
                raise
            return 0

    async def increment(self, key: str) -> int:
        return int(await self._call(self._redis.incr(key)))

    async def counter(self, key: str) -> int:
        return int(await self._call(self._redis.get(key)) or 0)

    async def hash_get(self, key: str, field: str) -> str | None:
        value = await self._call(cast("Awaitable[Any]", self._redis.hget(key, field)))
        return None if value is None else as_text(value)

    async def hash_some(self, key: str, fields: Sequence[str]) -> list[str | None]:
        return _as_texts(await self._call(cast("Awaitable[list[Any]]", self._redis.hmget(key, list(fields)))))

    async def hash_all(self, key: str) -> dict[str, str]:
        fields = await self._call(cast("Awaitable[dict[Any, Any]]", self._redis.hgetall(key)))
        return {as_text(name): as_text(value) for name, value in fields.items()}

    async def acquire(self, lease: str, value: str, ttl_s: float) -> bool:
        if await self._call(self._redis.set(lease, value, px=int(ttl_s * 1000), nx=True)):
            return True
        return await self.lease_values([lease]) == [value]

    async def lease_values(self, leases: Sequence[str]) -> list[str | None]:
        if not leases:
            return []
        return _as_texts(await self._call(self._redis.mget(list(leases))))

    async def cap_and_read_leases(self, leases: Sequence[str]) -> list[str | None]:
        if not leases:
            return []
        return _as_texts(await self._call(self._redis.eval(CAP_AND_READ_LEASES, len(leases), *leases)))

    async def acquire_fenced(
        self, lease: str, value: str, ttl_s: float, *, epoch: str, replacing: str | None
    ) -> int | None:
        arguments = (lease, epoch, value, str(int(ttl_s * 1000)), replacing or "")
        new_epoch = await self._call(self._redis.eval(ACQUIRE_FENCED, 2, *arguments))
        return None if new_epoch is None else int(new_epoch)

    async def command(self, *words: str) -> Any:
        """Execute one command that `Bus` has no method for, and return redis-py's reply."""
        client: Any = self._redis  # redis-py gives this method no types
        return await self._call(client.execute_command(*words))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _remove_wrong_types(self, keys: Collection[str]) -> set[str]:
        """Remove those keys that a worker has replaced by one of another type: that is to cost this worker only."""
        expected = {key: kind for key in keys if (kind := worker_key_type(key))}
        pipe = self._redis.pipeline(transaction=False)
        for key in expected:
            pipe.type(key)
        found = await self._call(pipe.execute()) if expected else []
        wrong = {
            key: as_text(kind)
            for key, kind in zip(expected, found, strict=True)
            if as_text(kind) not in {expected[key], "none"}
        }
        for key, kind in wrong.items():
            log.warning("worker_key_removed", key=key, type=kind, expected=expected[key])
        if wrong:
            await self._call(self._redis.delete(*wrong))
        return set(wrong)

    def _letter(self, stream: str, entry_id: str, body: bytes, reason: str) -> Append:
        return dead_letter_op(stream, entry_id, self._name, reason, body, time.time(), to=self._dead_letters)

    async def _create_group(self, stream: str, group: str) -> None:
        with contextlib.suppress(GroupExists):
            await self._call(self._redis.xgroup_create(stream, group, id="0", mkstream=True))

    async def _entries(self, streams: Iterable[tuple[str, Any]], group: str | None = None) -> list[Entry]:
        found: list[Entry] = []
        for stream, rows in streams:
            for raw_id, fields in rows:
                entry_id, body = as_text(raw_id), fields.get(_FIELD, b"")
                try:
                    found.append(Entry(stream, entry_id, decode(body), len(body)))
                except Undecodable as error:
                    await self._dead_letter_raw(stream, group, entry_id, body, str(error))
        return found

    async def _dead_letter_raw(self, stream: str, group: str | None, entry_id: str, body: bytes, reason: str) -> None:
        # The entry stays in its stream: a newer release may have written it, and can read it.
        ops: list[Op] = [Ack(stream, group, (entry_id,))] if group is not None else []
        if (stream, entry_id) not in self._undecodable:
            report_dead_letter(stream, entry_id, reason)
            ops.append(self._letter(stream, entry_id, body, reason))
        await self.transact(ops)
        self._undecodable[stream, entry_id] = None
        if len(self._undecodable) > MAX_DEAD_LETTERS:
            self._undecodable.popitem(last=False)


async def connect(url: str, name: str, limit_s: float = 60.0, *, dead_letters: str = DEAD_LETTERS) -> RedisBus:
    """Return a connected bus, waiting up to `limit_s` for the server to answer.

    Raises:
        ConfigError: the server rejected the password; the text names its address.
        Fatal: it did not answer within the limit.

    """
    bus = RedisBus(url, name, dead_letters=dead_letters)
    try:
        await retry_while(_may_answer_later, lambda: bus.command("PING"), limit_s=limit_s, longest_s=1.0)
    except CredentialRejected as error:
        await bus.close()
        raise ConfigError(f"{error}: correct the Redis URL") from error
    except BusUnavailable as error:
        await bus.close()
        raise Fatal(f"{error}; no answer for {limit_s:.0f} s: {_connection_advice(url, str(error))}") from error
    return bus


def _connection_advice(url: str, failure: str) -> str:
    if "loading the dataset" in failure:
        return "start this again when Redis has loaded its data; its log shows the progress"
    if "CERTIFICATE_VERIFY_FAILED" in failure:
        return f"set {CA_VARIABLE} to the authority of its certificate, and give a host that the certificate names"
    hint = "give rediss:// if it has TLS"
    if url.startswith("rediss:"):
        # A server that asks for a client certificate may only reset the connection.
        hint = "add ?ssl_certfile=FILE&ssl_keyfile=FILE if it asks for a client certificate, give redis:// without TLS"
    return f"start Redis, or correct the Redis URL ({hint})"


def _may_answer_later(error: Exception) -> bool:
    return isinstance(error, BusUnavailable) and not isinstance(error, CredentialRejected)


def _key_of(op: Op) -> str:
    match op:
        case HashSet(key) | HashDelete(key) | Expire(key) | Delete(key):
            return key
        case Renew(lease):
            return lease
        case Append(stream) | AppendRaw(stream) | Remove(stream) | Ack(stream) | Trim(stream):
            return stream
    assert_never(op)


def _queue(pipe: Any, op: Op) -> None:  # noqa: C901 - one flat table
    match op:
        case Append(stream, message, max_len):
            pipe.xadd(stream, {_FIELD: encode(message)}, maxlen=max_len)
        case AppendRaw(stream, body, max_len):
            pipe.xadd(stream, {_FIELD: body}, maxlen=max_len)
        case Remove(stream, ids):
            pipe.xdel(stream, *ids)
        case Ack(stream, group, ids):
            pipe.xack(stream, group, *ids)
        case Trim(stream, min_id):
            pipe.xtrim(stream, minid=min_id, approximate=False)
        case HashSet(key, fields):
            pipe.hset(key, mapping=dict(fields))
        case HashDelete(key, names):
            pipe.hdel(key, *names)
        case Expire(key, ttl_s):
            pipe.pexpire(key, int(ttl_s * 1000))
        case Delete(key):
            pipe.delete(key)
        case Renew(lease, value, ttl_s):
            pipe.set(lease, value, px=int(ttl_s * 1000))
        case _:
            assert_never(op)


def _streams(reply: Any) -> Iterator[tuple[str, Any]]:
    """Yield each stream of a reply with its rows (id, fields)."""
    for stream, rows in reply.items() if isinstance(reply, dict) else reply or ():
        # redis-py nests the rows once more under RESP3.
        is_nested = rows and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], list | tuple)
        yield as_text(stream), rows[0] if is_nested else rows


def _check_database(url: str) -> None:
    """Raise ValueError if the path is no number: redis-py would use database 0, which may be another system's."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and (database := parts.path.strip("/")):
        int(database)


def _check_certificate(url: str) -> None:
    """Raise ConfigError if the files of the URL's client certificate cannot be loaded."""
    given = dict(parse_qsl(urlsplit(url).query))
    certificate, key = given.get("ssl_certfile"), given.get("ssl_keyfile")
    if certificate is None and key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate or "", key, given.get("ssl_password", ""))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile {certificate} and ssl_keyfile {key} of the Redis URL cannot be used: {error}; give PEM "
            "files of a client certificate and its key on this machine"
        ) from error


def _trusted(url: str) -> dict[str, Any]:
    """Return the option that adds authorities to the system's, for a URL with TLS."""
    authorities = os.environ.get(CA_VARIABLE)
    return {"ssl_ca_certs": authorities} if authorities and url.startswith("rediss:") else {}


def _block_ms(block_s: float) -> int | None:
    return max(1, int(min(block_s, MAX_BLOCK_S) * 1000)) if block_s > 0 else None


def _as_texts(values: Sequence[Any]) -> list[str | None]:
    return [None if value is None else as_text(value) for value in values]


def as_text(value: Any) -> str:
    """Return a reply as text."""
    # Invalid UTF-8 means a damaged value: its parser rejects it.
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)
