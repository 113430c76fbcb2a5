"""The protocol version: services with the same number work together, in any mix of releases.

Messages of the same number differ only by fields with defaults: fields are added, and removed if no release with the
number reads them (`shared.messages`). Any other change raises the number. A new message type on a stream that the other
side reads is such a change, since an older reader would dead-letter it, and later trim it. `streams.state_protocol`
holds services to the leader's number.
"""

from __future__ import annotations

PROTOCOL = 4
OLDEST_STATE = 3
"""The lowest number whose streams and keys this release continues; a release that cannot read them raises it."""
UNNUMBERED_WORKER = 3
"""The number of a `WorkerJoined` without one. It never changes."""
UNNUMBERED = 1
"""The number of a client that sends none. It never changes."""
PROTOCOL_HEADER = "X-RLBoost-Protocol"
"""The request header with the number of a joining worker."""
