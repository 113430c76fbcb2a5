"""A process that sends the rows of a job's agent: `python -m rlboost.services.trainer.children.agent_rows SPEC SPLIT`.

SPEC is JSON: the fields of `AgentSpec`. Messages are maps, as `child` describes: `rows`, a list of rows, several times;
then `end`, or `failed`, why there are no more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any

from rlboost.services.trainer.children.child import Pipe
from rlboost.shared.job.agent import check_time, load_agent
from rlboost.shared.user_code import InvalidUserFunction, describe_import_error

_ROWS_PER_MESSAGE = 256


def main() -> int:
    """Send all rows."""
    pipe = Pipe()
    spec, split = json.loads(sys.argv[1]), sys.argv[2]
    try:
        agent = load_agent(spec["function"], spec["arguments"])
        check_time(agent, spec["timeout_s"])
        rows = iter(_rows(agent, split))
        while block := list(islice(rows, _ROWS_PER_MESSAGE)):
            pipe.write({"rows": block})
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, or exit
        pipe.write({"failed": describe_import_error(spec["function"], "agent", error)})
        return 1
    pipe.write({"end": True})
    return 0


def _rows(agent: Any, split: str) -> Iterable[dict[str, Any]]:
    if not callable(rows := getattr(agent, "rows", None)):
        raise InvalidUserFunction("it has no rows: name a class with a method rows(self, split), or a file in data")
    found: Iterable[dict[str, Any]] = rows(split)
    return found


if __name__ == "__main__":
    sys.exit(main())
