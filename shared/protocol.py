"""The protocol version: a worker can join only a manager with the same number.

Messages grow only by fields with defaults (`shared.messages`), so releases with the same number work together. Any
other change raises the number. A new message type on a stream that the other side reads is such a change, since an
older reader would dead-letter it.
"""

from __future__ import annotations

PROTOCOL = 3
UNNUMBERED = 1
"""The number of clients that send none, because they are older than the header. It never changes."""
PROTOCOL_HEADER = "X-RLBoost-Protocol"
"""The request header with the number of a joining worker."""
