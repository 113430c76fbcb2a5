"""All messages on the wire, frozen and tagged. `shared.messages.codec` encodes them.

Rules, each held by `tests/unit/shared/test_messages.py` and the golden bytes in `tests/golden`:

- a message is a map `{"t": tag, field: value, ...}`; the tag names the class;
- a field may be added with a default, and removed if no release of the same protocol reads it; no field is renamed or
  retyped;
- a reader ignores unknown fields, so an older service can read a newer message;
- columns with one entry per token or sample are bytes (`shared.wire`), never lists;
- a value that no service sends, such as a negative count or an infinite rate, does not decode.

Times are Unix seconds, durations seconds, sizes bytes.
"""

from __future__ import annotations

from rlboost.shared.messages.codec import *
from rlboost.shared.messages.jobs import *
from rlboost.shared.messages.requests import *
from rlboost.shared.messages.token_log import *
from rlboost.shared.messages.workers import *
