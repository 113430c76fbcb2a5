"""The project's errors, grouped by what the caller should do.

- `Retryable`: try again later.
- `Unprocessable`: dead-letter this one item with the reason, and continue with the next.
- `Rejected`: report it to the requester; the request is understood and cannot be granted now.
- `Fatal`: end the work with the cause: the trainer fails its job and takes the next one, any other process exits
  non-zero.

Adapters translate a library's errors into these; nothing else catches a library's own.
"""

from __future__ import annotations


class RLBoostError(Exception):
    """Base of all errors of this project."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions within nested groups, in order; the error itself if it is no group."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


class Retryable(RLBoostError):
    """Try again later: the other side is unavailable or busy, and nothing was lost."""


class BusUnavailable(Retryable):
    """Redis did not answer; the last write may or may not have taken effect."""


class CredentialRejected(BusUnavailable):
    """Redis does not know the user, or its password is another; a Redis that restarted gets its users again."""


class StoreUnavailable(Retryable):
    """The weight store did not answer, or closed the connection during a transfer."""


class DiskFull(Retryable):
    """A disk has no space left: what was to be written is still there, and can be written once space is free."""


class ProcessEnded(Retryable):
    """A process that this one needs has died, such as one that the system has killed as memory ran out."""


class WaitTimedOut(Retryable):
    """A named wait reached its limit."""


class Unprocessable(RLBoostError):
    """One message or item is invalid: dead-letter it with the reason and continue with the next."""


class Undecodable(Unprocessable):
    """The bytes are not a valid message or document of this project."""


class BadSignature(Unprocessable):
    """A document is not signed with the key that it must be signed with: do not use it."""


class UnsuitableWeights(Unprocessable):
    """The weights of a version, or its `config.json`, do not fit the engine: serve another version or job."""


class Rejected(RLBoostError):
    """The request cannot be granted in the present state: report it to the requester, do not retry as is."""


class NotFound(Rejected):
    """The requested object does not exist, or is no longer retained."""


class Conflict(Rejected):
    """The present state forbids the operation, for example because a compare-and-set lost."""


class Fenced(Conflict):
    """Another holder has taken over and nothing was written: stop acting and discard cached state."""


class Fatal(RLBoostError):
    """The work cannot continue: report the cause and what to do. Fails the trainer's job; ends any other process."""


class ConfigError(Fatal):
    """A setting, a job file or a file it names is wrong; the text names it and says what to do."""


class Corrupt(Fatal):
    """Bytes that were verified before no longer match their digest."""
