"""Message authentication codes that prove possession of a key without revealing it.

The key is the system's token; of workers among themselves it is one derived from the token, since they do not have it.

The token grants full access, so it is sent only to configured addresses and to those named by a holder of the token. An
address read from Redis is neither. There, a signature under the token is used instead: it is valid for one purpose and
one subject, and reveals nothing about the token.
"""

from __future__ import annotations

import hmac
import json
from typing import Literal

Purpose = Literal["chunk", "leader", "job-command", "metrics", "peers", "weights", "trainer-machine"]
"""`chunk`: read one blob of weights from a peer, under the peer key; `leader`: be the manager at one URL;
`job-command`: have a trainer execute one command; `metrics`: read metrics of workers, under the peer key; `peers`: the
key that all workers share; `weights`: download weights from the store, as one worker and until one time;
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
