"""The record of a run: what each step trained on, and a signed hash chain over it. Anyone can check it.

In the folder `record` of the run's folder, `chain.jsonl` has a *link* in each line:

- `start`: a trainer begins or continues the job: its job file, data and code;
- `step`: a finished step: digests of its samples' file, its row of the run log and its weights;
- `end`: the job is done: its last weights and the files with the final model.

A link names the digest of the line before it and is signed, so no line can be changed, removed or inserted by someone
without the system's token. A step that is trained again gets a further link; the last one of a step counts.
`step-000003.msgpack` has the samples of step 3, which the command line calls step 4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from blake3 import blake3

from rlboost.shared.errors import Corrupt
from rlboost.shared.weights.access import RecordKey, is_signed

FOLDER = "record"
CHAIN = f"{FOLDER}/chain.jsonl"
FINAL_FOLDERS = ("model", "adapter")
"""Folders of a run's folder with what it has trained."""

# --- Links of the chain -----------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """A link, as it is in its line."""

    fields: Mapping[str, Any]
    signature: str
    """By the key of the last start; see `RecordKey`."""
    digest: str
    """Of its line, which the next link has in `previous`."""

    def is_signed_by(self, public_key: str) -> bool:
        """Return True if the owner of the key has signed it."""
        return is_signed(_canonical(self.fields), self.signature, public_key)


def line_of(fields: Mapping[str, Any], previous: str, key: RecordKey) -> bytes:
    """Return the line of a new link after the one with the digest `previous`, which is empty for the first."""
    link = {**fields, "previous": previous}
    return _canonical({"link": link, "signature": key.sign(_canonical(link))}) + b"\n"


def link_of(line: bytes) -> Link:
    """Return the link in a line.

    Raises:
        Corrupt: the line is not as a trainer writes it.

    """
    try:
        body = json.loads(line)
        link = Link(dict(body["link"]), str(body["signature"]), digest_of(line))
        is_canonical = body.keys() == {"link", "signature"} and _canonical(body) + b"\n" == line
    except (ValueError, KeyError, TypeError, RecursionError):
        is_canonical = False
    if not is_canonical:
        raise Corrupt("it is not a link as a trainer writes it")
    return link


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of(data: bytes) -> str:
    """Return the BLAKE3 digest in hexadecimal."""
    return blake3(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the BLAKE3 digest of a file in hexadecimal."""
    return blake3(max_threads=1).update_mmap(path).hexdigest()


# --- The samples of a step --------------------------------------------------------------------------------------------


def samples_path(step: int) -> str:
    """Return the path of the file with a step's samples, in the run's folder."""
    return f"{FOLDER}/step-{step:06d}.msgpack"


def pack_groups(groups: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the file of a step's groups, each with its digest, so that a damaged one is known by its name."""
    packed = ((group["group"], msgpack.packb(group)) for group in groups)
    return bytes(msgpack.packb([[name, data, blake3(data).digest()] for name, data in packed]))


def damage_of(data: bytes) -> str:
    """Return where a file of samples is damaged, as far as its own digests tell; empty if they do not."""
    try:
        for name, group, digest in msgpack.unpackb(data):
            if blake3(group).digest() != digest:
                return f"group {name}"
    except (ValueError, TypeError, msgpack.UnpackException):
        return "its structure"
    return ""


def unpack_groups(data: bytes) -> list[dict[str, Any]]:
    """Return the groups of a file whose digest is right."""
    return [msgpack.unpackb(group) for _, group, _ in msgpack.unpackb(data)]
