"""Pulls weights from the weight store into this machine's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlboost.shared.weights.access import WorkerAccess
from rlboost.shared.weights.cached_version import cached_version
from rlboost.shared.weights.puller import Puller

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.ports import StagedWeights


class StoreWeights:
    """`ports.WeightSource` on one weight store."""

    def __init__(self, puller: Puller, access: WorkerAccess) -> None:
        """Use a puller whose client has this access."""
        self._puller = puller
        self._access = access

    async def pull(self, job_id: str, version: int) -> StagedWeights:
        """See `WeightSource`."""
        return cached_version(await self._puller.pull(job_id, version))

    def verify_cache_again(self) -> None:
        """See `WeightSource`."""
        self._puller.verify_cache_again()

    def renew_access(self, credential: str) -> None:
        """See `WeightSource`."""
        self._access.credential = credential
