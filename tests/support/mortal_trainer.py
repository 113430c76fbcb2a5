"""A trainer that kills itself at a named point of its work: `python -m tests.support.mortal_trainer`.

Consumes: lines `POINT STEP`; an empty point lets it live. Produces: for each a trainer in a process of its own, forked
from this one, which has imported torch already; its id, and when it has ended its exit code. Ends with its input.

The points are set by wrapping the ports and the bus that the service is made of. The service itself knows of none.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rlboost.services.trainer import __main__ as service
from rlboost.services.trainer import build as composition
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.services.trainer.ports.storage import JobResources, TrainState
from rlboost.services.trainer.settings import Settings
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import GroupRequested, StepReport
from rlboost.shared.process.lifecycle import run_service
from rlboost.shared.redis.bus import RedisBus, connect
from rlboost.shared.streams.bus import Append, Fence, HashSet, Op, Trim
from rlboost.shared.weights.manifest import Shard

POINTS = (
    "requested",
    "resampled",
    "stepped",
    "uploading",
    "uploaded",
    "committed",
    "logged",
    "reported",
    "captured",
    "written",
    "half-written",
    "kept",
    "trimmed",
    "exporting",
)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives that")


class Fate:
    """Where and when to die."""

    def __init__(self, point: str, step: int) -> None:
        self._point = point
        self._step = step

    def comes(self, point: str, step: int) -> None:
        """Die if it is here and now."""
        if (point, step) == (self._point, self._step):
            die()


class Wrapper:
    """Everything as in what it wraps, but for what a subclass has."""

    def __init__(self, inner: Any, fate: Fate) -> None:
        self._inner = inner
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Weights(Wrapper):
    """Publishing: before it, in the middle of the upload, before and after the commit."""

    async def publish(self, version: int, shards: Iterable[Shard], **rest: Any) -> None:
        step = version - 1
        self._fate.comes("stepped", step)
        publisher = self._inner._publisher
        commit: Callable[..., Awaitable[Any]] = type(publisher).commit

        async def committing(*args: Any, **kwargs: Any) -> Any:
            self._fate.comes("uploaded", step)
            answer = await commit(publisher, *args, **kwargs)
            self._fate.comes("committed", step)
            return answer

        publisher.commit = committing
        await self._inner.publish(version, self._some(shards, step), **rest)

    def _some(self, shards: Iterable[Shard], step: int) -> Iterator[Shard]:
        for number, shard in enumerate(shards):
            if number == 2:
                self._fate.comes("uploading", step)
            yield shard


class Store(Wrapper):
    """A checkpoint: captured, its files written or half written, durable."""

    def save(self, state: TrainState, write: Snapshot) -> None:
        def writing(directory: Path) -> None:
            self._fate.comes("captured", state.step)
            write(directory)
            self._fate.comes("written", state.step)
            file = max(directory.iterdir(), key=lambda file: file.stat().st_size)
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            self._fate.comes("half-written", state.step)
            file.write_bytes(whole)

        self._inner.save(state, writing)
        self._fate.comes("kept", state.step)


class Folder(Wrapper):
    """The run's folder: after a row of metrics, and before the final model."""

    def log_step(self, step: int, *of: Any) -> Any:
        answer = self._inner.log_step(step, *of)
        self._fate.comes("logged", step)
        return answer

    def export(self, shards: Iterable[Shard]) -> Path:
        self._fate.comes("exporting", -1)
        path: Path = self._inner.export(shards)
        return path


class MortalBus(RedisBus):
    """Redis: after requests, after the record that a group is followed by another, after a report, after a trim."""

    fate = Fate("", 0)

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        await super().transact(ops, fence)
        for op in ops:
            match op:
                case Append(message=GroupRequested(group=group)):
                    self.fate.comes("requested", SampleId.unpack(group).step)
                case HashSet(key=key, fields=fields) if key.endswith(":resampled"):
                    for replaced in fields:
                        self.fate.comes("resampled", SampleId.unpack(int(replaced)).step)
                case Append(message=StepReport(step=step)):
                    self.fate.comes("reported", step)
                case Trim():
                    self.fate.comes("trimmed", -1)
                case _:
                    pass


def live(fate: Fate) -> int:
    """Be a trainer until the stop, or until fate comes."""
    build = composition.build_resources

    def building(*args: Any, **named: Any) -> JobResources:
        made = build(*args, **named)
        return replace(
            made,
            weights=Weights(made.weights, fate),
            checkpoints=Store(made.checkpoints, fate),
            folder=Folder(made.folder, fate),
        )

    async def connecting(url: str, name: str, *limit_s: float, **named: Any) -> RedisBus:
        await (await connect(url, name, *limit_s, **named)).close()
        bus = MortalBus(url, name)
        bus.fate = fate
        return bus

    composition.build_resources = building
    vars(service)["connect"] = connecting
    return run_service("trainer", Settings, service.main)


def main() -> None:
    """Fork a trainer a line."""
    for line in sys.stdin:
        point, _, step = line.strip().partition(" ")
        child = os.fork()
        if child == 0:
            os._exit(live(Fate(point, int(step or -1))))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
