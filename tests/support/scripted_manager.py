"""A manager without workers, for driving a trainer: each requested sample is answered from a script, once."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import stamina

from rlboost.shared.errors import BusUnavailable
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import EngineProfile, GroupRequested, SampleDropped, SampleFinished, SeedingEnded
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, Bus, Op
from rlboost.shared.wire import F32, I32, pack

Answer = SampleFinished | SampleDropped
Script = Callable[[GroupRequested, int], Answer]


def scripted(request: GroupRequested, sample: int, *, vocab: int = 64, finish: str = "stop") -> SampleFinished:
    """Return a completion that depends on the sample's id and the request's seed alone."""
    digest = hashlib.blake2b(f"{request.seed}/{sample}".encode(), digest_size=32).digest()
    n = 1 + digest[0] % request.sampling.max_tokens
    tokens = [3 + digest[i % 32] % (vocab - 3) for i in range(1, n)] + [2]
    logprobs = [-4.0 - digest[-1 - i % 32] / 512 for i in range(n)]
    return SampleFinished(
        sample=sample,
        tokens=pack(tokens, I32),
        logprobs=pack(logprobs, F32),
        finish="stop" if finish == "stop" else "length",
        spans=[("w-1", request.version, n)],
        attempts=1,
        group_done=False,
    )


@dataclass
class ScriptedManager:
    """Answers the requests of one job. The seeding of a step ends with its first request, unless told otherwise."""

    bus: Bus
    job_id: str
    script: Script = scripted
    seeding_ends: bool = True
    engines: list[EngineProfile] = field(default_factory=list)
    """What it has learned of the workers."""
    cursor: str = START
    requests: list[GroupRequested] = field(default_factory=list)
    """In the order in which they came, repeated ones too."""
    answered: Counter[int] = field(default_factory=Counter)
    """Sample -> how often it was generated."""
    held: set[int] = field(default_factory=set)
    """Steps that are not answered for now."""
    steps: set[int] = field(default_factory=set)
    """Steps of which something was asked."""
    withholds: Callable[[int], bool] = lambda _sample: False
    """Samples that are generated but not delivered before `release`."""
    _withheld: dict[int, Op] = field(default_factory=dict)

    async def release(self, still_withholds: Callable[[int], bool] = lambda _sample: False) -> None:
        """Deliver what was withheld, and from now on withhold only this."""
        self.withholds = still_withholds
        ops = {sample: op for sample, op in self._withheld.items() if not still_withholds(sample)}
        self._withheld = {sample: op for sample, op in self._withheld.items() if sample not in ops}
        async for attempt in stamina.retry_context(on=BusUnavailable, timeout=30.0, attempts=None, wait_max=0.2):
            with attempt:  # Redis may just have been restarted; the trainer drops what arrives twice
                await self.bus.transact(list(ops.values()))

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            try:
                await self.turn(block_s=0.5)
            except BusUnavailable:
                await asyncio.sleep(0.05)

    async def turn(self, block_s: float = 0.0) -> None:
        """Answer what is there."""
        entries = await self.bus.read({names.rollouts_requested(self.job_id): self.cursor}, block_s=block_s)
        for entry in entries:
            request = entry.message
            assert isinstance(request, GroupRequested)
            step = SampleId.unpack(request.group).step
            if step in self.held:
                await asyncio.sleep(0.01)
                return
            await self.bus.transact(self._answer(request, step))
            self.cursor = entry.id
            self.requests.append(request)

    def _answer(self, request: GroupRequested, step: int) -> list[Op]:
        stream = names.rollouts_finished(self.job_id)
        ops: list[Op] = []
        if self.seeding_ends and step not in self.steps:
            ops.append(
                Append(stream, SeedingEnded(step=step, window_s=0.0, reason="no_reserved", engines=self.engines))
            )
        self.steps.add(step)
        if self.answered[request.group]:
            return ops
        for sample in range(request.group, request.group + request.n):
            self.answered[sample] += 1
            answer = Append(stream, self.script(request, sample))
            if self.withholds(sample):
                self._withheld[sample] = answer
            else:
                ops.append(answer)
        return ops
