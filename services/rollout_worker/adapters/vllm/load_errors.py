"""Errors of a load as text: of an exception in one of its processes, vLLM passes on only the message."""

from __future__ import annotations

import re

from rlboost.shared.errors import Corrupt, Fatal, NotFound, RLBoostError, UnsuitableWeights

_CLASSES: dict[str, type[RLBoostError]] = {kind.__name__: kind for kind in (Fatal, UnsuitableWeights, Corrupt)}
_ENCODED = re.compile(r"<load-error (\w+)>(.*?)</load-error>", re.DOTALL)
_UNSUITABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, NotImplementedError)
"""What vLLM's model loaders raise for tensors that do not belong to the model."""


def encode_load_error(error: Exception) -> RuntimeError:
    """Return an error whose message carries the class that the worker raises; see `decode_load_error`."""
    if isinstance(error, NotFound):
        kind: type[RLBoostError] = Corrupt
    elif isinstance(error, (Fatal, UnsuitableWeights)):
        kind = next(found for found in type(error).__mro__ if found in _CLASSES.values())
    # Not its subclasses, which report a device that failed or has too little memory.
    elif isinstance(error, _UNSUITABLE) or type(error) is RuntimeError:
        kind = UnsuitableWeights
    else:
        kind = Fatal
    text = str(error) if isinstance(error, RLBoostError) else f"{type(error).__name__}: {error}"
    return RuntimeError(f"<load-error {kind.__name__}>{text}</load-error>")


def decode_load_error(error: Exception) -> RLBoostError:
    """Return the error that `encode_load_error` was given, with vLLM's wrapping removed; `Fatal` of any other error."""
    found = _ENCODED.search(str(error))
    if found is None:
        return Fatal(str(error))
    return _CLASSES[found[1]](found[2])
