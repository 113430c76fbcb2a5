"""Proof that one has the system's token, for whoever must not get it.

The token opens everything, so it goes only to addresses that somebody has configured, and to those that whoever has it
already names. An address read from Redis is not one of them. What is sent there, or stands there to be believed, is a
message authentication code under the token: it is good for one purpose and one thing, and says nothing of the token.
"""

from __future__ import annotations

import hmac
import json
from typing import Literal

Purpose = Literal["chunk", "leader"]
"""To read one blob of weights from a worker; to be the manager at one URL."""


def prove(token: str, purpose: Purpose, thing: str) -> str:
    """Return the proof: HMAC-SHA256, in hexadecimal."""
    return hmac.digest(token.encode(), json.dumps(["rlboost", purpose, thing]).encode(), "sha256").hex()


def is_proved(given: str, token: str, purpose: Purpose, thing: str) -> bool:
    """Tell, in constant time, whether this is the proof. With an empty token nothing is proved."""
    return bool(token) and hmac.compare_digest(given.encode(), prove(token, purpose, thing).encode())
