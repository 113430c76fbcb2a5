"""math-verify as it is, in a process of its own: `python -m tests.support.plain_math_verify < PAIRS > VERDICTS`.

PAIRS is JSON, a list of a text with what is right and a completion; VERDICTS one of true, false, and null where nothing
can be read in what is right.
"""

from __future__ import annotations

import json
import sys

from math_verify import parse, verify

LIMIT_S = 10


def verdict(gold: str, completion: str) -> bool | None:
    found = parse(gold, parsing_timeout=LIMIT_S)
    answer = parse(completion, parsing_timeout=LIMIT_S)
    return verify(found, answer, timeout_seconds=LIMIT_S) if found else None


if __name__ == "__main__":
    json.dump([verdict(*pair) for pair in json.load(sys.stdin)], sys.stdout)
