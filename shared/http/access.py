"""Who sent a request, and what they may do: tokens with scopes, signatures, credentials for the weight store.

Each HTTP route declares the scope that it needs.
"""

from __future__ import annotations

import base64
import hmac
import json
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar, get_args

from rlboost.shared.messages import JobCommand

TokenScope = Literal["admin", "agent", "job", "read", "trainer", "worker"]
"""Scope of a token that a user creates: `admin` may do everything, `job` run jobs, `read` see them, `trainer` train one
external job, `worker` join the fleet, `agent` take the sessions of remote agents."""
Scope = Literal[TokenScope, "models", "publish", "session", "weights"]
"""`models`: see which models are served; `publish`: upload and commit weights of one job; `session`: call the model as
one agent; `weights`: download weights. Users do not create tokens of these: a trainer issues keys of sessions, and the
manager gives external trainers and workers credentials for weights."""

_GRANTED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset(get_args(Scope)),
    "agent": frozenset({"agent"}),
    "job": frozenset({"agent", "job", "models", "read", "session", "trainer"}),
    "models": frozenset({"models"}),
    "publish": frozenset({"publish"}),
    "read": frozenset({"models", "read"}),
    "session": frozenset({"models", "session"}),
    "trainer": frozenset({"trainer"}),
    "worker": frozenset({"worker"}),
    "weights": frozenset({"weights"}),
}


class Principal(NamedTuple):
    """Who sent a request, and what it may do."""

    name: str
    """The sender's name in logs; never a secret."""
    scope: Scope
    subject: str = ""
    """What it is limited to: in the scope `session` a `shared.job.agent.SessionId`, in `trainer` a job, in `publish`
    a `shared.http.access.Publishing`."""

    def may(self, needed: Scope) -> bool:
        """Return True if the scope includes the needed one."""
        return needed in _GRANTED[self.scope]


SYSTEM = Principal("system", "admin")
"""The holder of the system token."""

# --- Limits how often one address may fail to authenticate ------------------------------------------------------------


BURST = 100
"""Failures of one address that are answered at once."""
REFILL_PER_S = 1.0
ADDRESSES_MAX = 4096


@dataclass(slots=True)
class FailureLimit:
    """A token bucket for each address, for the addresses that failed last."""

    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """Address -> failures left, and when that was computed."""

    def fail(self, address: str, now_s: float) -> int:
        """Count a failure; return after how many seconds the address may fail again, 0 if at once."""
        left, at_s = self._buckets.pop(address, (float(BURST), now_s))
        left = min(float(BURST), left + (now_s - at_s) * REFILL_PER_S)
        allowed = left >= 1.0
        self._buckets[address] = (left - 1.0 if allowed else left, now_s)
        while len(self._buckets) > ADDRESSES_MAX:
            self._buckets.popitem(last=False)
        return 0 if allowed else math.ceil((1.0 - left) / REFILL_PER_S)


# --- Message authentication codes that prove possession of a key without revealing it ---------------------------------
# The key is the system's token; of workers among themselves it is one derived from the token, since they do not have
# it.
#
# The token grants full access, so it is sent only to configured addresses and to those named by a holder of the token.
# An address read from Redis is neither. There, a signature under the token is used instead: it is valid for one purpose
# and one subject, and reveals nothing about the token.


Purpose = Literal[
    "chunk", "leader", "job-command", "metrics", "peers", "publish", "session", "weights", "trainer-machine"
]
"""`chunk`: read one blob of weights from a peer, under the peer key; `leader`: be the manager at one URL;
`job-command`: have a trainer execute one command; `metrics`: read metrics of workers, under the peer key; `peers`: the
key that all workers share; `publish`: publish weights of one job, as one holder of its lease and until one time;
`session`: call the model in one trainable session; `weights`: download weights from the store, as one worker and until
one time;
`trainer-machine`: one end of a connection between a trainer and a machine of its ranks."""


def sign(key: str, purpose: Purpose, subject: str) -> str:
    """Return the signature: HMAC-SHA256, in hexadecimal."""
    return hmac.digest(key.encode(), json.dumps(["rlboost", purpose, subject]).encode(), "sha256").hex()


def peer_key(token: str) -> str:
    """Return the key with which workers sign requests to each other; it reveals nothing about the token."""
    return sign(token, "peers", "")


def metrics_path(key: str) -> str:
    """Return the path of a worker's metrics for Prometheus, which needs no token there.

    Prometheus asks any address that a worker publishes, so it must not send a token. Who has the peer key can compute
    the path: every worker and the manager.
    """
    return f"/metrics/{sign(key, 'metrics', '')}"


def is_valid_signature(signature: str, key: str, purpose: Purpose, subject: str) -> bool:
    """Return True if the signature is valid, in constant time; with an empty key, none is."""
    return bool(key) and hmac.compare_digest(signature.encode(), sign(key, purpose, subject).encode())


# --- Who sent a request, by its bearer token, and the scope that a route needs ----------------------------------------


API_KEY_HEADER = "x-api-key"
Authenticator = Callable[[str], Awaitable[Principal | None]]
"""Bearer token -> its holder; None if the token is unknown or has expired."""
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., object])


def needs(scope: Scope) -> Callable[[_Endpoint], _Endpoint]:
    """Declare the scope that a route needs; without a declaration it needs `admin`."""

    def declare(endpoint: _Endpoint) -> _Endpoint:
        endpoint.__dict__["needed_scope"] = scope
        return endpoint

    return declare


def needed_scope(endpoint: Callable[..., object]) -> Scope:
    """Return the scope that a route's function needs."""
    scope: Scope = endpoint.__dict__.get("needed_scope", "admin")
    return scope


def bearer_token(authorization: str) -> str:
    """Return the token in an `Authorization` header, empty if there is none.

    Clients that cannot send one have it as the password of their URL (`http://any:TOKEN@host`), which they send as
    Basic credentials (RFC 7617).
    """
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(given, validate=True).decode().partition(":")[2]
    return given.strip() if scheme.lower() == "bearer" else ""


def credential_of(headers: Mapping[str, str]) -> str:
    """Return the token of a request, empty if there is none: a bearer token, or else what Anthropic's clients send."""
    return bearer_token(headers.get("Authorization", "")) or headers.get(API_KEY_HEADER, "").strip()


def is_token(given: str, token: str) -> bool:
    """Return True if the token is the given one, in constant time; an empty token equals none."""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


def system_token(token: str) -> Authenticator:
    """Return an authenticator that accepts one token, for everything; an empty one accepts none."""

    async def authenticate(given: str) -> Principal | None:
        return SYSTEM if is_token(given, token) else None

    return authenticate


# --- Short-lived credentials for the weight store: workers download with one, external trainers publish ---------------
# The manager signs them, the store checks them.
# The store keeps no list of them: a credential names its holder and its expiry, under a signature.


STORE_CREDENTIAL_LIFE_S = 3600.0


class Publishing(NamedTuple):
    """What an external trainer's credential is limited to."""

    job_id: str
    epoch: int
    """Of the trainer's lease on the job: once another trainer has taken it, nothing is published."""

    def __str__(self) -> str:
        """Return it as the subject of a credential."""
        return f"{self.job_id}:{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> Publishing:
        """Invert `str`."""
        job_id, _, epoch = text.rpartition(":")
        return cls(job_id, int(epoch))


def issue_store_credential(token: str, worker_id: str, now: float, life_s: float = STORE_CREDENTIAL_LIFE_S) -> str:
    """Return a credential for one worker, under the system's token; `now` is Unix seconds."""
    return _issue(token, "weights", worker_id, now + life_s)


def issue_publishing_credential(
    token: str, publishing: Publishing, now: float, life_s: float = STORE_CREDENTIAL_LIFE_S
) -> str:
    """Return a credential for one external trainer, under the system's token; `now` is Unix seconds."""
    return _issue(token, "publish", str(publishing), now + life_s)


def _issue(token: str, purpose: Purpose, holder: str, expires_at: float) -> str:
    subject = f"{holder}:{int(expires_at)}"
    return f"{purpose}:{subject}:{sign(token, purpose, subject)}"


def credential_holder(credential: str, token: str, now: float, purpose: Purpose = "weights") -> str | None:
    """Return the holder that a credential was issued to for a purpose, None if it is invalid or has expired."""
    prefix, _, rest = credential.partition(":")
    subject, _, signature = rest.rpartition(":")
    if prefix != purpose or not is_valid_signature(signature, token, purpose, subject):
        return None
    holder, _, expires_at = subject.rpartition(":")
    return holder if now < int(expires_at) else None


def store_principal(given: str, token: str, now: float) -> Principal | None:
    """Return who sent a request to the store: the holder of the system's token or of a credential; else None."""
    if is_token(given, token):
        return SYSTEM
    if worker_id := credential_holder(given, token, now):
        return Principal(worker_id, "weights")
    if subject := credential_holder(given, token, now, "publish"):
        return Principal(f"trainer of {Publishing.parse(subject).job_id}", "publish", subject)
    return None


def store_authenticator(token: str, clock: Callable[[], float]) -> Authenticator:
    """Return the weight store's authenticator."""

    async def authenticate(given: str) -> Principal | None:
        return store_principal(given, token, clock())

    return authenticate


def may_download(authorization: str, token: str, clock: Callable[[], float]) -> bool:
    """Return True if a request with this `Authorization` header may download weights."""
    principal = store_principal(bearer_token(authorization), token, clock())
    return principal is not None and principal.may("weights")


def may_upload(authorization: str, token: str, clock: Callable[[], float]) -> bool:
    """Return True if a request with this `Authorization` header may upload weights."""
    principal = store_principal(bearer_token(authorization), token, clock())
    return principal is not None and principal.may("publish")


# --- Signatures of job commands ---------------------------------------------------------------------------------------
# A trainer runs only what a manager with the system's token has accepted: a job's functions run with the trainer's
# rights, and any client that can write to Redis can append a command. A signature covers every field. It does not
# prevent that a signed command is appended again: commands are idempotent.


def signed(command: JobCommand, token: str) -> JobCommand:
    """Return the command with a signature under the system's token."""
    return command.model_copy(update={"signature": sign(token, "job-command", _subject(command))})


def is_signed(command: JobCommand, token: str) -> bool:
    """Return True if the command has a valid signature."""
    return is_valid_signature(command.signature, token, "job-command", _subject(command))


def _subject(command: JobCommand) -> str:
    return json.dumps([command.command_id, command.action, command.job_id, command.job_no, command.spec_json])
