"""Assembles a manifest from the parts that the ranks of a trainer have staged."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from rlboost.services.weight_store.ports import Documents
from rlboost.shared.errors import Conflict, NotFound
from rlboost.shared.weights.manifest import Manifest, Part, digest_of
from rlboost.shared.weights.rest_models import CommitRequest


async def assemble(documents: Documents, job_id: str, version: int, request: CommitRequest) -> Manifest:
    """Return the manifest assembled from the staged parts that a commit names.

    Raises:
        Conflict: a part is missing or has another digest, or the shards do not cover whole tensors.

    """
    parts = []
    for rank, digest in enumerate(request.parts):
        try:
            data = await documents.part(job_id, version, rank)
        except NotFound as error:
            raise Conflict(
                f"version {version} of job {job_id}: rank {rank} of {len(request.parts)} has not published"
            ) from error
        if digest_of(data) != digest:
            raise Conflict(
                f"version {version} of job {job_id}: the part of rank {rank} does not have the digest in the commit"
            )
        parts.append(await asyncio.to_thread(Part.decode, data))
    try:
        return Manifest(
            job_id=job_id,
            version=version,
            config_json=request.config_json,
            parts=tuple(parts),
            base_version=request.base_version,
            adapter_json=request.adapter_json,
            parity_json=request.parity_json,
            signature=request.signature,
        )
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise Conflict(f"version {version} of job {job_id} is incomplete: {reason}") from error
