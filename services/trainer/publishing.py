"""A job's versions in the weight store: what each consists of, and what to do where one is there already.

A version is the whole model; or, where an adapter is trained, the adapter alone, and version 0 is the frozen model that
all of them belong to. A version that an earlier process committed is the truth: where this one trained other bits
(another machine, say), or finds another base model, the committed ones are loaded.
"""

from __future__ import annotations

from services.trainer.device import DeviceThread
from services.trainer.link import JobLink
from services.trainer.ports import Exported, Loaded, PolicyEngine, WeightPublisher
from shared.errors import Fatal

BASE = 0
"""The version of the model below the adapters."""


class Publishing:
    """The versions of one job."""

    def __init__(self, engine: PolicyEngine, weights: WeightPublisher, device: DeviceThread, link: JobLink) -> None:
        """Prepare; `look` asks what is there."""
        self._engine = engine
        self._weights = weights
        self._device = device
        self._link = link
        self.head = -1
        """The newest committed version."""

    async def look(self) -> None:
        """Ask which version is the newest."""
        self.head = await self._weights.head()

    async def begin(self, version: int) -> None:
        """Have a version committed that the first step may begin with, and below it the base that it needs.

        Raises:
            Fatal: the base of the committed versions is gone.

        """
        if self._engine.adapter_json:
            await self._settle(BASE, "base")
        if self.head < version:
            await self.publish(version)

    async def publish(self, version: int) -> None:
        """Commit what the engine holds, or load what is committed as this version.

        Raises:
            Conflict: somebody else has committed since.

        """
        await self._settle(version, "adapter" if self._engine.adapter_json else "base")

    async def _settle(self, version: int, what: Loaded) -> None:
        if version > self.head:
            await self._commit(version, what)
            return
        same = await self._weights.equals(version, self._engine.export_shards(what))
        if same is None and what == "base" and self._engine.adapter_json:
            raise Fatal(f"version {version}, the model that the adapters belong to, is gone: start a new job")
        if same is False:
            shards = await self._weights.fetch(version)
            await self._device(lambda: self._engine.load_shards(shards, what))
            await self._link.tell("weights_restored", version=version)

    async def _commit(self, version: int, what: Exported) -> None:
        shards = self._engine.export_shards(what)
        if what == "adapter":
            adapter_json = self._engine.adapter_json
            await self._weights.publish(version, shards, expect=self.head, base_version=BASE, adapter_json=adapter_json)
        else:
            await self._weights.publish(version, shards, expect=self.head)
        self.head = version
