"""Access: the tokens of clients, and of workers the identity, the Redis user and what one that joins gets."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any
from urllib.parse import quote, urlsplit, urlunsplit

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlboost.services.rollout_manager.domain.workers import Departures, Fleet
from rlboost.services.rollout_manager.ports import WorkerUsers
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.errors import BusUnavailable, ConfigError, Fatal
from rlboost.shared.http.access import SYSTEM, Principal, TokenScope, is_token, issue_store_credential, peer_key
from rlboost.shared.http.problem import Problem
from rlboost.shared.ids import new_token
from rlboost.shared.job.agent import session_of_key
from rlboost.shared.messages import Role
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.redis.bus import RedisBus, as_text
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus, Delete, HashDelete, HashSet, Op

log = structlog.get_logger(__name__)

# --- access tokens ----------------------------------------------------------------------------------------------------


SECRET_BYTES = 32


class AccessToken(BaseModel):
    """The stored record of a token. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True)

    id: str
    scope: TokenScope
    job_id: str = ""
    """The job that a token of scope `trainer` is for; empty in other scopes."""
    name: str
    sha256: str
    """SHA-256 of the secret, in hexadecimal. A secret has 256 random bits, so it cannot be found by trying."""
    created_at: float
    expires_at: float | None
    """None if it does not expire."""

    def is_valid(self, now: float) -> bool:
        """Return True until the token expires."""
        return self.expires_at is None or now < self.expires_at

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        return self.model_dump(exclude={"sha256"})


def digest_of_secret(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal."""
    return hashlib.sha256(secret.encode()).hexdigest()


def principal_of(secret: str, tokens: Iterable[AccessToken], now: float) -> Principal | None:
    """Return the principal of a secret, None if no token has it or the token has expired."""
    digest = digest_of_secret(secret)
    for token in tokens:
        if token.sha256 == digest:
            return Principal(f"token {token.id}", token.scope, token.job_id) if token.is_valid(now) else None
    return None


# --- authentication of clients ----------------------------------------------------------------------------------------


REFRESH_S = 2.0
"""How old the table may be: a revoked token is rejected by every manager after at most this time."""


class TokenTable:
    """The access tokens as of the last `REFRESH_S` seconds: requests with unknown tokens cost no request to Redis."""

    def __init__(
        self,
        bus: Bus,
        system_token: str,
        join_token: str = "",
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing before the first request that needs it.

        Args:
            bus: holds the access tokens.
            system_token: grants everything.
            join_token: grants joining; empty for none.
            clock: Unix seconds.
            monotonic: monotonic seconds.

        """
        self._bus = bus
        self._system_token = system_token
        self._join_token = join_token
        self._clock = clock
        self._monotonic = monotonic
        self._tokens: tuple[AccessToken, ...] = ()
        self._read_at_s = -math.inf
        self._invalidations = 0
        self._reading = asyncio.Lock()

    async def authenticate(self, secret: str) -> Principal | None:
        """Return the principal of a token, None if the token is unknown or expired.

        Raises:
            Problem: 503, Redis does not answer, so it is unknown which tokens are valid.

        """
        if is_token(secret, self._system_token):
            return SYSTEM
        if is_token(secret, self._join_token):
            return Principal("join token", "worker")
        if session := session_of_key(self._system_token, secret):
            return Principal(f"session {session.subject}", "session", str(session))
        return principal_of(secret, await self.tokens(), self._clock()) if secret else None

    async def tokens(self) -> tuple[AccessToken, ...]:
        """Return all access tokens, oldest first; raises `Problem` as `authenticate` does."""
        async with self._reading:
            now_s = self._monotonic()
            if now_s - self._read_at_s >= REFRESH_S:
                before = self._invalidations
                try:
                    stored = await self._bus.hash_all(names.TOKENS)
                except BusUnavailable as error:
                    raise Problem(503, "No Redis", f"{error}: try again", headers={"Retry-After": "1"}) from error
                parsed = [token for text in stored.values() if (token := _parsed(text))]
                self._tokens = tuple(sorted(parsed, key=lambda token: token.created_at))
                # A change during the reading may not be in it.
                self._read_at_s = now_s if self._invalidations == before else -math.inf
        return self._tokens

    def invalidate(self) -> None:
        """Read the tokens again at the next request: they have changed."""
        self._invalidations += 1
        self._read_at_s = -math.inf


def _parsed(text: str) -> AccessToken | None:
    try:
        return AccessToken.model_validate_json(text)
    except ValidationError as error:
        # Not the error itself: it quotes the record.
        log.warning("token_unreadable", key=names.TOKENS, problems=error.error_count())
        return None


# --- Redis users of workers -------------------------------------------------------------------------------------------
#
# What a user may do is what its worker does, on its own keys.
#
# No user may write to a stream that another service or worker reads: XADD can also trim, which an ACL cannot forbid.


SETTING = "RLBOOST_MANAGER_WORKER_REDIS_USERS"
_SELECTORS_SINCE = 7
"""The Redis release that can limit a command to certain keys, and a key to reading."""
_CONNECTION = ("+ping", "+client|setname", "+select", "+multi", "+exec", "+discard")
_PROBE = "probe"
"""A user that is created and removed at the start. No worker has this id: it lacks a suffix."""


class RedisWorkerUsers:
    """`ports.WorkerUsers` on one Redis server."""

    def __init__(self, bus: RedisBus) -> None:
        """Use an open bus, whose user may manage users; see `check`."""
        self._bus = bus
        self._has_selectors = True

    async def check(self) -> None:
        """Find out what this Redis supports.

        Raises:
            ConfigError: it has no users, or this user may not manage them.

        """
        try:
            version = str((await self._bus.command("INFO", "server"))["redis_version"])
            self._has_selectors = int(version.partition(".")[0]) >= _SELECTORS_SINCE
            await self.put(_PROBE, "0" * 64)
            await self.remove([_PROBE])
            await self.present()
        except Fatal as error:
            raise ConfigError(
                f"each worker gets a Redis user of its own, which is not possible here ({error}): allow the manager's "
                f"user ACL SETUSER, ACL DELUSER, ACL USERS and INFO, or set {SETTING}=off if you trust all workers: "
                "they then get the manager's Redis URL"
            ) from error
        if not self._has_selectors:
            log.warning(
                "redis_users_less_strict",
                redis_version=version,
                reason="before Redis 7 a worker can disturb the manager and other workers' weight transfers: "
                "use Redis 7 or newer if you do not trust all workers",
            )

    async def put(self, worker: str, secret_sha256: str) -> None:
        rules = _rules(worker) if self._has_selectors else _rules_without_selectors(worker)
        user = names.worker_redis_user(worker)
        await self._bus.command("ACL", "SETUSER", user, "reset", "on", f"#{secret_sha256}", *rules)

    async def remove(self, workers: Collection[str]) -> None:
        await self._bus.command("ACL", "DELUSER", *map(names.worker_redis_user, workers))

    async def present(self) -> set[str]:
        found = [as_text(user) for user in await self._bus.command("ACL", "USERS")]
        prefix = names.worker_redis_user("")
        return {user.removeprefix(prefix) for user in found if user.startswith(prefix)}


def _rules(worker: str) -> Sequence[str]:
    own_leases = f"~{names.worker_lease(worker)} ~{names.weight_peer(worker)} ~{names.weight_claim('*')}"
    return (
        *_CONNECTION,
        f"(+xread %R~{names.worker_commands(worker)})",
        f"(+xtrim ~{names.worker_commands(worker)})",
        f"(+xadd +xlen ~{names.worker_reports(worker)})",
        f"(+set +get +mget +del {own_leases})",
        f"(+mget %R~{names.weight_peer('*')})",
        f"(+hgetall %R~{names.WEIGHT_PEERS})",
    )


def _rules_without_selectors(worker: str) -> Sequence[str]:
    keys = (
        names.worker_commands(worker),
        names.worker_reports(worker),
        names.worker_lease(worker),
        names.weight_peer("*"),
        names.weight_claim("*"),
        names.WEIGHT_PEERS,
    )
    commands = ("+xread", "+xtrim", "+xadd", "+xlen", "+set", "+get", "+mget", "+del", "+hgetall")
    return (*_CONNECTION, *commands, *(f"~{key}" for key in keys))


# --- identities of workers --------------------------------------------------------------------------------------------
#
# Each incarnation has an id, a stream of its own and, unless disabled, a Redis user.
#
# The leader creates an identity when a worker joins and removes it after the worker is gone. Identities are stored in
# Redis; the users follow them, since Redis forgets its users when it restarts.


Write = Callable[[Sequence[Op]], Awaitable[None]]
"""Applies operations as the leader."""


class IdentityRecord(BaseModel):
    """One worker's identity, as stored in Redis."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    secret_sha256: str = ""
    """SHA-256 of the password of its Redis user, in hexadecimal; empty if it has none."""


class WorkerIdentities:
    """The identities that the leader knows."""

    def __init__(self, bus: Bus, users: WorkerUsers | None = None) -> None:
        """Start empty.

        Args:
            bus: the broker.
            users: the workers' Redis users; None if workers use the manager's.

        """
        self._bus = bus
        self._users = users
        self._records: dict[str, IdentityRecord] = {}
        self._revoked: set[str] = set()
        """Workers whose users were removed; their streams are removed next."""
        self._departures = Departures()

    @property
    def roles(self) -> dict[str, Role]:
        """Return worker id -> role."""
        return {worker: record.role for worker, record in self._records.items()}

    @property
    def have_users(self) -> bool:
        """Return True if each worker has a Redis user of its own."""
        return self._users is not None

    async def load(self) -> None:
        """Replace what is known by what Redis has, as a new leader, and restore the Redis users."""
        self._records.clear()
        self._revoked.clear()
        for worker, text in (await self._bus.hash_all(names.WORKER_IDENTITIES)).items():
            try:
                self._records[worker] = IdentityRecord.model_validate_json(text)
            except ValidationError as error:
                log.warning("worker_identity_unreadable", worker=worker, reason=str(error))
        await self._update_users()

    async def create(self, name: str, role: Role, write: Write) -> tuple[str, str]:
        """Return the id of a new worker and the password of its Redis user, empty if it has none."""
        worker = f"{name}-{new_token()}"
        secret = new_token(SECRET_BYTES) if self._users else ""
        record = IdentityRecord(role=role, secret_sha256=digest_of_secret(secret) if secret else "")
        self._records[worker] = record  # first, so that a concurrent update does not remove the new user
        await write([HashSet(names.WORKER_IDENTITIES, {worker: record.model_dump_json()})])
        if self._users:
            await self._users.put(worker, record.secret_sha256)
        return worker, secret

    async def maintain(self, fleet: Fleet, now: float, write: Write) -> None:
        """Remove identities of workers that are gone: first the user, then the stream, once it is relayed."""
        due = set(self._departures.due(self._records, fleet, now))
        emptied = [worker for worker in due & self._revoked if not await self._bus.length(names.worker_reports(worker))]
        if emptied:
            deletes = [Delete(names.worker_reports(worker)) for worker in emptied]
            await write([*deletes, HashDelete(names.WORKER_IDENTITIES, tuple(emptied))])
            for worker in emptied:
                del self._records[worker]
        self._revoked = due - set(emptied)
        await self._update_users()

    async def _update_users(self) -> None:
        if self._users is None:
            return
        present = await self._users.present()
        expected = self._records.keys() - self._revoked
        if unexpected := present - expected:
            await self._users.remove(unexpected)
        for worker in expected - present:
            await self._users.put(worker, self._records[worker].secret_sha256)


# --- joining ----------------------------------------------------------------------------------------------------------


_LOGGED_REFUSALS = 1_000
"""Maximum number of refused workers that are remembered as logged."""


class JoinRequest(BaseModel):
    """A worker that wants to join."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$", description="prefix of the worker's id")]
    role: Role


class JoinAddresses(BaseModel):
    """The addresses of the other services."""

    model_config = ConfigDict(frozen=True)

    protocol: int
    redis_url: str = Field(description="for a worker that joined with its own user and password, where these exist")
    weight_store_url: str


class JoinAnswer(JoinAddresses):
    """What a worker needs; it never needs the system's token."""

    worker: str = Field(description="id of this incarnation")
    store_credential: str = Field(description="for the weight store; the manager sends new ones before it expires")
    manifest_key: str = Field(description="the public key under which manifests are signed")
    peer_key: str = Field(description="signs requests for weights to other workers")


def check_protocol(protocol: int, name: str = "") -> None:
    """Reject a worker with another protocol, and log it once if a worker of this name joins.

    Raises:
        Problem: it must be updated, or the manager.

    """
    if protocol != PROTOCOL:
        reason = (
            f"the worker speaks protocol {protocol} and this manager {PROTOCOL}: install the same version of rlboost "
            "on both"
        )
        if name:
            _log_refused(name, reason)
        raise Problem(409, "Protocol mismatch", reason)


@lru_cache(maxsize=_LOGGED_REFUSALS)
def _log_refused(name: str, reason: str) -> None:
    """Log a worker that may not join, once: supervisors restart it again and again."""
    log.warning("worker_refused", name=name, reason=reason)


def join_addresses(settings: Settings) -> JoinAddresses:
    """Return what a worker that joins connects to, without credentials."""
    redis_url = _with_login(_redis_url(settings), "")
    return JoinAddresses(protocol=PROTOCOL, redis_url=redis_url, weight_store_url=settings.weight_store_url)


async def join(request: JoinRequest, identities: WorkerIdentities, settings: Settings, write: Write) -> JoinAnswer:
    """Create the worker's identity."""
    worker, secret = await identities.create(request.name, request.role, write)
    url, token = _redis_url(settings), settings.token.get_secret_value()
    login = f"{quote(names.worker_redis_user(worker), safe='')}:{quote(secret, safe='')}@"
    return JoinAnswer(
        protocol=PROTOCOL,
        worker=worker,
        redis_url=_with_login(url, login) if secret else url,
        weight_store_url=settings.weight_store_url,
        store_credential=issue_store_credential(token, worker, time.time()),
        manifest_key=manifest_public_key(token),
        peer_key=peer_key(token),
    )


def _redis_url(settings: Settings) -> str:
    return settings.advertised_redis_url or settings.redis_url


def _with_login(url: str, login: str) -> str:
    """Return the URL with another `user:password@`, or without any."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=login + parts.netloc.rpartition("@")[2]))


@lru_cache(maxsize=1)
def manifest_public_key(token: str) -> str:
    """Return the key with which workers check manifests, in hexadecimal."""
    from rlboost.shared.weights.access import ManifestKey  # noqa: PLC0415 - not when a manager starts

    return ManifestKey(token).public
