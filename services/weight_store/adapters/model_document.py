"""A model as the JSON document `model.json`."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.shared.errors import Undecodable

_MODEL = TypeAdapter(JobVersions)


def encode_model(model: JobVersions) -> bytes:
    """Return the document."""
    return _MODEL.dump_json(model)


def decode_model(data: bytes) -> JobVersions:
    """Return the model of a document.

    Raises:
        Undecodable: the document is empty or damaged, or another version wrote it.

    """
    try:
        return _MODEL.validate_json(data)
    except ValidationError as error:
        raise Undecodable(f"model.json cannot be parsed: {error.errors()[0]['msg']}") from error
