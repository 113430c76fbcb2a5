"""Which protocol this version speaks: workers and managers of different numbers refuse each other when a worker joins.

Messages only grow, by fields with defaults (`shared.messages`), so versions of one number work together. The number is
raised by a change after which an older worker or manager would misunderstand the other.
"""

from __future__ import annotations

PROTOCOL = 1
PROTOCOL_HEADER = "X-RLBoost-Protocol"
"""In which a worker that joins gives its number."""
