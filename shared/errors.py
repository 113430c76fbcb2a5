"""One tree of errors, sorted by what the caller should do: retry, bury, or exit.

Adapters translate foreign errors into these; nothing else catches a library's own.
"""

from __future__ import annotations


class RLBoostError(Exception):
    """Base of all errors of this project."""


class Retryable(RLBoostError):
    """Try again later: the other side is away or busy, and nothing was lost."""


class BusUnavailable(Retryable):
    """Redis did not answer; whether the last write took place is unknown."""


class StoreUnavailable(Retryable):
    """The weight store did not answer, or broke off in the middle."""


class Timeout(Retryable):
    """A named wait reached its limit."""


class Bury(RLBoostError):
    """One message or item is bad: put it aside with the reason and go on."""


class Undecodable(Bury):
    """Bytes that are not a message of ours."""


class NotFound(Bury):
    """What is asked for does not exist, or is no longer kept."""


class Fatal(RLBoostError):
    """Going on makes no sense: say why, say what to do, exit non-zero."""


class ConfigError(Fatal):
    """A setting, a job file or a file it names is wrong; the text names it and says what to do."""


class Corrupt(Fatal):
    """Bytes that were verified once do not verify any more."""


class Conflict(RLBoostError):
    """The state forbids it (compare-and-set lost, or the wrong moment)."""


class Fenced(Conflict):
    """Another has taken over and nothing was written: stop acting, and forget what you thought you knew."""
