"""Which protocol this version speaks: workers and managers of different numbers refuse each other when a worker joins.

Messages only grow, by fields with defaults (`shared.messages`), so versions of one number work together. The number is
raised by a change after which an older worker or manager would misunderstand the other. A new type of message is such a
change on a stream that the other side reads: an older reader buries what it cannot decode among the dead letters.
"""

from __future__ import annotations

PROTOCOL = 1
UNNUMBERED = 1
"""What those speak that give no number: it came after them. It stays when the number is raised."""
PROTOCOL_HEADER = "X-RLBoost-Protocol"
"""In which a worker that joins gives its number."""
