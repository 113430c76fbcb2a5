"""The class of a load's error survives vLLM, which passes on only its message."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_worker.adapters.vllm.load_errors import decode_load_error, encode_load_error
from rlboost.shared.errors import Corrupt, Fatal, NotFound, UnsuitableWeights


class OutOfMemory(RuntimeError):
    """As torch derives its own."""


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (UnsuitableWeights("too wide"), UnsuitableWeights, "too wide"),
        (Corrupt("bad bytes"), Corrupt, "bad bytes"),
        (NotFound("no chunk"), Corrupt, "no chunk"),
        (KeyError("layers.9"), UnsuitableWeights, "KeyError: 'layers.9'"),
        (RuntimeError("shape [2]\nis not [3]"), UnsuitableWeights, "RuntimeError: shape [2]\nis not [3]"),
        (OutOfMemory("device"), Fatal, "OutOfMemory: device"),
        (OSError("I/O error"), Fatal, "OSError: I/O error"),
    ],
)
def test_wrapped_load_error_keeps_its_class(raised: Exception, kind: type[Fatal], text: str) -> None:
    found = decode_load_error(
        Exception(f"Worker failed with error '{encode_load_error(raised)}', please check the stack trace above")
    )
    assert type(found) is kind
    assert str(found) == text


def test_error_of_another_kind_is_no_wrong_configuration() -> None:
    assert type(decode_load_error(Exception("EngineCore: timed out"))) is Fatal
