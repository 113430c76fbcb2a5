"""A job's versions in the weight store: what each consists of, and what to do where one is there already.

A version is the whole model; or, where an adapter is trained, the adapter alone, and version 0 is the frozen model that
all of them belong to. A version that an earlier process committed is the truth: where this one trained other bits
(another machine, say), or finds another base model, the committed ones are loaded.

With each version goes what a forward pass of it says of a fixed probe. It is computed before the version is committed,
by the weights that are committed, so whoever serves the version can be held to it.
"""

from __future__ import annotations

from services.trainer.device import DeviceThread
from services.trainer.domain.canary import Probe, answered
from services.trainer.link import JobLink
from services.trainer.ports import Exported, Loaded, PolicyEngine, Row, WeightPublisher
from shared.columns import I32, pack
from shared.errors import Fatal

BASE = 0
"""The version of the model below the adapters."""


class Publishing:
    """The versions of one job."""

    def __init__(
        self,
        engine: PolicyEngine,
        weights: WeightPublisher,
        device: DeviceThread,
        link: JobLink,
        probe: Probe | None = None,
    ) -> None:
        """Prepare; `look` asks what is there."""
        self._engine = engine
        self._weights = weights
        self._device = device
        self._link = link
        self._probe = probe
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
            # Below an adapter that was trained already it is served to nobody, and the engine answers with the adapter.
            await self._settle(BASE, "base", scored=version == BASE)
        if self.head < version:
            await self.publish(version)

    async def publish(self, version: int) -> None:
        """Commit what the engine holds, or load what is committed as this version.

        Raises:
            Conflict: somebody else has committed since.

        """
        await self._settle(version, "adapter" if self._engine.adapter_json else "base")

    async def _settle(self, version: int, what: Loaded, *, scored: bool = True) -> None:
        new = version > self.head
        canary_json = await self._answer() if new and scored else ""
        # From the commit on others may generate with it, on this very device.
        await self._device(self._engine.rest)
        if new:
            await self._commit(version, what, canary_json)
            return
        same = await self._weights.equals(version, self._engine.export_shards(what))
        if same is None and what == "base" and self._engine.adapter_json:
            raise Fatal(f"version {version}, the model that the adapters belong to, is gone: start a new job")
        if same is False:
            shards = await self._weights.fetch(version)
            await self._device(lambda: self._engine.load_shards(shards, what))
            await self._link.tell("weights_restored", version=version)

    async def _answer(self) -> str:
        """Return the canary of the weights that the engine holds; empty where there is no probe."""
        if (probe := self._probe) is None:
            return ""
        rows = [Row(pack(prompt, I32), pack(completion, I32), b"", 0.0) for prompt, completion in probe.rows]
        return answered(probe, await self._device(lambda: self._engine.logprobs([rows]))).encode()

    async def _commit(self, version: int, what: Exported, canary_json: str) -> None:
        shards = self._engine.export_shards(what)
        if what == "adapter":
            await self._weights.publish(
                version,
                shards,
                expect=self.head,
                base_version=BASE,
                adapter_json=self._engine.adapter_json,
                canary_json=canary_json,
            )
        else:
            await self._weights.publish(version, shards, expect=self.head, canary_json=canary_json)
        self.head = version
