"""Short-lived credentials with which a worker downloads weights: signed by the manager, checked by the weight store.

The store keeps no list of them: a credential names its worker and its expiry, under a signature.
"""

from __future__ import annotations

from collections.abc import Callable

from rlboost.shared.http.authentication import Authenticator, bearer_token, is_token
from rlboost.shared.http.scopes import Principal
from rlboost.shared.http.token_signature import is_valid_signature, sign

STORE_CREDENTIAL_LIFE_S = 3600.0
_PREFIX = "weights"


def issue_store_credential(token: str, worker_id: str, now: float, life_s: float = STORE_CREDENTIAL_LIFE_S) -> str:
    """Return a credential for one worker, under the system's token; `now` is Unix seconds."""
    subject = f"{worker_id}:{int(now + life_s)}"
    return f"{_PREFIX}:{subject}:{sign(token, 'weights', subject)}"


def credential_holder(credential: str, token: str, now: float) -> str | None:
    """Return the worker that a credential was issued to, None if it is invalid or has expired."""
    prefix, _, rest = credential.partition(":")
    subject, _, signature = rest.rpartition(":")
    if prefix != _PREFIX or not is_valid_signature(signature, token, "weights", subject):
        return None
    worker_id, _, expires_at = subject.rpartition(":")
    return worker_id if now < int(expires_at) else None


def store_principal(given: str, token: str, now: float) -> Principal | None:
    """Return whose bearer token this is: the system's for everything, a credential to download weights; else None."""
    if is_token(given, token):
        return Principal("system", "admin")
    worker_id = credential_holder(given, token, now)
    return None if worker_id is None else Principal(worker_id, "weights")


def store_authenticator(token: str, clock: Callable[[], float]) -> Authenticator:
    """Return the weight store's authenticator."""

    async def authenticate(given: str) -> Principal | None:
        return store_principal(given, token, clock())

    return authenticate


def may_download(authorization: str, token: str, clock: Callable[[], float]) -> bool:
    """Return True if a request with this `Authorization` header may download weights."""
    principal = store_principal(bearer_token(authorization), token, clock())
    return principal is not None and principal.may("weights")


def may_upload(authorization: str, token: str) -> bool:
    """Return True if a request with this `Authorization` header may upload weights."""
    return is_token(bearer_token(authorization), token)
