"""Publishes a job's weight versions, and reconciles them with versions that are committed already.

A version is the whole model; if an adapter is trained, the adapter alone, and version 0 is its frozen base model. A
version that an earlier process committed wins: if this process trained other bits (on another machine, for example) or
has another base model, it loads the committed weights.

Each version comes with a parity reference: the log-probabilities of fixed canary prompts, computed with the weights
that are committed. Workers must reproduce it before they serve the version.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from rlboost.services.trainer.domain.canary_prompts import build_reference
from rlboost.services.trainer.domain.plan import SequenceRow
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.engine import Exported, Loaded
from rlboost.shared.errors import Fatal
from rlboost.shared.wire import I32, pack

log = structlog.get_logger(__name__)

RESTORE_EVERY_S = 5.0
"""How often the store is asked for damaged chunks."""
RENEW_IMAGES_EVERY_S = 60.0
"""The store keeps a chunk without a version for an hour; one that it has lost is uploaded again."""
BASE = 0
"""The version of the base model of adapters."""


async def renew_images(job: Job) -> None:
    """Keep the images of unfinished steps in the weight store, until cancelled."""
    while (images := job.resources.images) is not None:
        await asyncio.sleep(RENEW_IMAGES_EVERY_S)
        await images.renew(job.step)


async def publish_models(job: Job) -> None:
    """Publish the other models of a job that are not published yet, each as version 0 of the job that serves it.

    Raises:
        Conflict: another process has published other weights meanwhile.
        WaitTimedOut: the weight store was unavailable for too long.

    """
    for name, model in job.resources.models.items():
        if await model.weights.head() < 0:
            await model.weights.publish(0, model.shards(), expect=-1)
            await job.emit_event("model_published", model=name, serving_job=model.job_id)


class VersionPublisher:
    """The weight versions of one job."""

    def __init__(self, job: Job) -> None:
        """Bind to the job's store. Call `refresh_head` before any other method."""
        self._job = job
        self._engine = job.resources.engine
        self._weights = job.resources.weights
        self.head = -1
        """The newest committed version."""
        self._exporting = asyncio.Lock()
        self._searched: tuple[int, frozenset[str]] = (-1, frozenset())
        """(head, damaged chunks) of the last search in the engine's weights, without those that it had."""

    async def refresh_head(self) -> None:
        """Ask the weight store for the newest version."""
        self.head = await self._weights.head()

    async def ensure_published(self, version: int) -> None:
        """Publish the version that the first step starts from, and its base model, if they are not committed.

        Raises:
            Fatal: the base model of committed adapters is no longer in the store.

        """
        if self._engine.adapter_json:
            # A base model below a trained adapter is not served, and the engine would answer with the adapter.
            await self._publish_or_load(BASE, "base", with_parity=version == BASE)
        if self.head < version:
            await self.publish(version)

    async def publish(self, version: int) -> None:
        """Commit the engine's weights as a version, or load the version if it is committed.

        Raises:
            Conflict: another process has committed a version since `refresh_head`.

        """
        async with self._exporting:
            await self._publish_or_load(version, "adapter" if self._engine.adapter_json else "base")

    async def digest(self, version: int) -> str:
        """Return the digest of the tensors of the newest version that this process has trained or loaded."""
        async with self._exporting:
            shards = self._engine.export_shards("adapter" if self._engine.adapter_json else "base")
            return await self._weights.digest(version, shards)

    async def restore_periodically(self) -> None:
        """Restore damaged chunks every `RESTORE_EVERY_S` seconds, until cancelled."""
        while True:
            await asyncio.sleep(RESTORE_EVERY_S)
            await self.restore_damaged()

    async def restore_damaged(self) -> None:
        """Upload chunks of the engine's weights, and of the job's other models, again that the store has lost.

        A chunk is known by its digest: while a step changes the weights, none matches, and a later call finds them.
        """
        damaged = await self._weights.damaged()
        if not damaged or (self._searched[0] == self.head and damaged <= self._searched[1]):
            return  # the engine does not have them: they are of other jobs or of earlier versions
        restored: set[str] = set()
        async with self._exporting:
            for what in self._published():
                export = partial(self._engine.export_shards, what)
                chunks = await self._job.device.run(lambda: self._weights.chunks_among(export(), damaged))  # noqa: B023 - awaited at once
                if chunks:
                    await self._weights.restore(chunks)
                    restored.update(ref.digest for ref, _ in chunks)
                    log.warning("weights_restored_in_store", version=self.head, chunks=len(chunks))
        for model in self._job.resources.models.values():
            if damaged == restored:
                break  # reading a model for nothing takes long
            found = await asyncio.to_thread(lambda: model.weights.chunks_among(model.shards(), damaged - restored))  # noqa: B023 - awaited at once
            if found:
                await model.weights.restore(found)
                restored.update(ref.digest for ref, _ in found)
                log.warning("weights_restored_in_store", job=model.job_id, chunks=len(found))
        self._searched = self.head, damaged - restored

    def _published(self) -> tuple[Exported, ...]:
        return ("base", "adapter") if self._engine.adapter_json else ("base",)

    async def _publish_or_load(self, version: int, what: Loaded, *, with_parity: bool = True) -> None:
        new = version > self.head
        parity_json = await self._parity_json() if new and with_parity else ""
        # From the commit on, reserved engines may generate with it on this device.
        await self._job.device.run(self._engine.offload)
        if new:
            await self._commit(version, what, parity_json)
            return
        same = await self._weights.equals(version, self._engine.export_shards(what))
        if same is None and what == "base" and self._engine.adapter_json:
            raise Fatal(
                f"version {version}, the base model of the adapters, is no longer in the store: start a new job"
            )
        if same is False:
            shards = await self._weights.fetch(version)
            await self._job.device.compute(lambda: self._engine.load_shards(shards, what))
            await self._job.emit_event("weights_restored", version=version)

    async def _parity_json(self) -> str:
        """Return the parity reference of the engine's weights as JSON, an empty text without canary prompts."""
        if (canaries := self._job.resources.canary_prompts) is None:
            return ""
        rows = [SequenceRow(pack(prompt, I32), pack(completion, I32)) for prompt, completion in canaries.rows]
        return build_reference(canaries, await self._job.device.compute(lambda: self._engine.logprobs([rows]))).encode()

    async def _commit(self, version: int, what: Exported, parity_json: str) -> None:
        shards, epoch = self._engine.export_shards(what), self._job.lease.epoch
        if what == "adapter":
            await self._weights.publish(
                version,
                shards,
                expect=self.head,
                epoch=epoch,
                base_version=BASE,
                adapter_json=self._engine.adapter_json,
                parity_json=parity_json,
            )
        else:
            await self._weights.publish(version, shards, expect=self.head, epoch=epoch, parity_json=parity_json)
        self.head = version
