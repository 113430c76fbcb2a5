"""The edges to one version, as a client of the weight store gets them."""

from __future__ import annotations

from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.delta_graph import VersionEdges


async def edges_to(client: StoreClient, job_id: str, version: int) -> VersionEdges | None:
    """Return the edges to a version; None if there are none or they are corrupt."""
    documents = await client.route(job_id, version, version - 1)
    return next((document for document in documents if document.version == version), None)
