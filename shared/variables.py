"""The project's environment variables, and what a misspelt one may mean.

A variable with a service's prefix is one of its settings; `shared/settings.py` rejects the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

PREFIX = "RLBOOST_"
SERVICE_PREFIXES = (
    "RLBOOST_MANAGER_",
    "RLBOOST_WEIGHT_STORE_",
    "RLBOOST_TRAINER_",
    "RLBOOST_WORKER_",
    "RLBOOST_MACHINE_",
)
COMMON = ("redis_url", "token", "tls_cert", "tls_key", "tls_ca", "proxy", "log_level", "log_format")
"""Settings of all services, which also exist without a service's prefix."""
OTHERS: Mapping[str, str] = {
    "RLBOOST_GATEWAY_API_KEY": "the key that clients of a gateway need",
    "RLBOOST_TINKER_API_KEY": "the key that clients of 'rlboost tinker' need",
    "RLBOOST_URL": "where the command line finds the manager",
    "RLBOOST_JOIN_TOKEN": "the workers' token, in docker-compose.yml",
    "RLBOOST_KIND": "kind of the workers that a provider command starts",
    "RLBOOST_WORKERS": "number of the workers that a provider command starts",
    "RLBOOST_LAST_EXIT": "how the process ended that a local system has restarted",
    "RLBOOST_RANK_KEY": "key of the connections between the processes of a trainer",
    "RLBOOST_VLLM_PARENT": "process id of a worker, for its engine",
    "RLBOOST_VLLM_UNPACKED": "that the engine of a worker keeps its weights unpacked",
}
"""Variables that are no settings of a service."""
LAST_EXIT = "RLBOOST_LAST_EXIT"
FAILED_IN_ORDER = "ended with exit code 1"
"""Value of `LAST_EXIT` after an error that the service itself has reported, such as an outage of Redis."""
KILLED_ON_REQUEST = "killed on request"
"""Value of `LAST_EXIT` after a kill that was asked for, as `rlboost ps` calls it."""
RENAMED: Mapping[str, str] = {
    "RLBOOST_WORKER_BEAT_INTERVAL_S": "RLBOOST_WORKER_HEARTBEAT_INTERVAL_S",
    "RLBOOST_WORKER_CANARY_TOLERANCE": "RLBOOST_WORKER_PARITY_TOLERANCE",
}
"""Former name of a variable -> its present name, which the error names."""
_FOR_TESTS = ("RLBOOST_TEST_", "RLBOOST_FUZZ_", "RLBOOST_WRITE_")
_SIMILAR = 0.9
"""Least similarity of a name or prefix to one that is meant, as `difflib` measures it."""


def ignored(names: Iterable[str]) -> list[str]:
    """Return a line for each of these variables that looks like one of the project's and is none."""
    return [f"environment variable {name} is ignored: {_hint(name)}" for name in sorted(names) if _is_unknown(name)]


def _is_unknown(name: str) -> bool:
    short = {f"{PREFIX}{one.upper()}" for one in COMMON}
    return name.startswith(PREFIX) and not (
        name.startswith((*SERVICE_PREFIXES, *_FOR_TESTS)) or name in {*short, *OTHERS}
    )


def _hint(name: str) -> str:
    """Return the name that is probably meant: one without a prefix, or the same one with a service's prefix."""
    known = [f"{PREFIX}{one.upper()}" for one in COMMON] + list(OTHERS)
    if similar := difflib.get_close_matches(name, known, 1, _SIMILAR):
        return f"did you mean {similar[0]}?"
    parts = [(name[: found.end()], name[found.end() :]) for found in re.finditer("_", name)]
    meant = [(_similarity(part, prefix), f"{prefix}{rest}") for part, rest in parts for prefix in SERVICE_PREFIXES]
    best, similar_name = max(meant)
    if best >= _SIMILAR:
        return f"did you mean {similar_name}?"
    return "no service has such a setting"


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
