"""What a worker finds out about a new version before it stops its engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from rlboost.services.rollout_worker.generator import Generator
from rlboost.services.rollout_worker.ports import Changes, StagedWeights
from rlboost.shared.errors import Corrupt
from tests.support.engines import request
from tests.support.eventually import eventually
from tests.support.worker_fakes import FakeEngine, FakeEngineFactory, FakeStagedWeights

if TYPE_CHECKING:
    from rlboost.shared.weights.changed_words import ChangedWords

OLD, NEW = {"a": 1, "b": 1}, {"a": 1, "b": 2}


class Engine(FakeEngine):
    """Records the changes that it gets."""

    def __init__(self) -> None:
        super().__init__(slots=4)
        self.changes: list[Changes | None] = []
        self.damaged: list[str] = []
        self.compared = 0

    async def load_weights(
        self, version: int, weights: StagedWeights, changes: Changes | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        self.changes.append(changes)
        if changes is not None and changes.words is not None:
            assert cast("Any", changes.words).path.exists()
        return await super().load_weights(version, weights, changes, keep_kv=keep_kv)

    async def differing(self, weights: StagedWeights) -> list[str]:
        del weights
        self.compared += 1
        return self.damaged


class Words:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def remove(self) -> None:
        self.path.unlink()


class Version(FakeStagedWeights):
    """The version after the loaded one; `find` gives its changed words."""

    def __init__(self, find: Callable[[], Words | None]) -> None:
        super().__init__(contents=NEW)
        self._find = find

    def changed_words(self, since: Any, names: Container[str]) -> ChangedWords | None:  # type: ignore[override]
        super().changed_words(since, names)
        return cast("ChangedWords | None", self._find())


async def loaded(*, busy: bool = True) -> tuple[Generator, Engine]:
    """Return a generator whose engine holds the old version and runs a request, if it is busy."""
    factory = FakeEngineFactory(Engine)
    generator = Generator(factory)
    await generator.replace_weights(FakeStagedWeights(contents=OLD), 0, lambda: None)
    await generator.resume("loading")
    engine = cast("Engine", factory.engine)
    if busy:
        generator.submit([request(1, max_tokens=1000)])
        engine.tick()
        assert engine.stats().running == 1
    return generator, engine


def is_empty(directory: Path) -> bool:
    return not any(directory.iterdir())


async def test_busy_engine_gets_the_changed_words_and_then_they_are_removed(tmp_path: Path) -> None:
    generator, engine = await loaded()
    words = Words(tmp_path / "words")
    version = Version(lambda: words)
    await generator.replace_weights(version, 1, lambda: None)
    assert version.compared == [{"b"}]
    assert engine.changes == [None, Changes({"b"}, cast("ChangedWords", words))]
    assert not words.path.exists()


async def test_idle_engine_loads_whole_tensors_at_once() -> None:
    generator, engine = await loaded(busy=False)
    version = Version(lambda: None)
    await generator.replace_weights(version, 1, lambda: None)
    assert (version.compared, engine.compared, engine.changes[-1]) == ([], 0, Changes({"b"}))


async def test_memory_that_is_no_longer_the_loaded_version_is_loaded_whole(tmp_path: Path) -> None:
    generator, engine = await loaded()
    engine.damaged = ["a"]
    await generator.replace_weights(Version(lambda: Words(tmp_path / "words")), 1, lambda: None)
    assert engine.changes == [None, None]
    assert is_empty(tmp_path)


async def test_memory_is_not_compared_for_a_load_of_whole_tensors() -> None:
    generator, engine = await loaded()
    await generator.replace_weights(Version(lambda: None), 1, lambda: None)
    assert (engine.compared, engine.changes[-1]) == (0, Changes({"b"}))


@pytest.mark.parametrize("error", [Corrupt("removed"), OSError("disk full")])
async def test_unknown_words_mean_whole_tensors(error: Exception) -> None:
    def fail() -> None:
        raise error

    generator, engine = await loaded()
    await generator.replace_weights(Version(fail), 1, lambda: None)
    assert engine.changes[-1] == Changes({"b"})


async def test_version_after_a_failed_load_is_loaded_whole(tmp_path: Path) -> None:
    generator, engine = await loaded()
    wrong = Version(lambda: Words(tmp_path / "words"))
    wrong.wrong_loads = 1
    with pytest.raises(Corrupt):
        await generator.replace_weights(wrong, 1, lambda: None)
    assert is_empty(tmp_path)
    await generator.replace_weights(Version(lambda: None), 2, lambda: None)
    assert engine.changes[-1] is None


async def test_words_of_a_cancelled_update_are_removed(tmp_path: Path) -> None:
    generator, engine = await loaded()
    began, may_end = threading.Event(), threading.Event()

    def find() -> Words:
        words = Words(tmp_path / "words")
        began.set()
        may_end.wait(60)
        return words

    update = asyncio.create_task(generator.replace_weights(Version(find), 1, lambda: None), name="update")
    await eventually(began.is_set)
    update.cancel()
    await asyncio.wait({update})
    assert not generator.is_paused
    may_end.set()
    await eventually(lambda: is_empty(tmp_path))
    assert engine.changes == [None]
