"""A recorded stream gives the same decisions again: nothing in the domain depends on a clock, chance or hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import rlboost.simulation.policies.rlboost as driver
from rlboost.services.rollout_manager.domain.apply_messages import apply_frames, apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Effect, Now
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import Message, TokenFrame
from rlboost.shared.messages.codec import decode, encode
from rlboost.simulation import POLICIES
from rlboost.simulation.environment import LEASE_S
from tests.support.simulated import simulated

Turn = tuple[list[tuple[bytes, str]], Now, list[str]]
"""What was read, encoded, with its entries' ids; when; whose lease had run out."""


class Recorder:
    """Stands in for the functions with which the manager is driven, and notes what they were given."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.acted: list[list[str]] = []
        self._read: list[tuple[bytes, str]] = []
        self._applied: list[Effect] = []

    def apply_message(self, world: World, message: Message, entry_id: str, now: Now) -> list[Effect]:
        self._read.append((encode(message), entry_id))
        effects = apply_message(world, message, entry_id, now)
        self._applied += effects
        return effects

    def apply_frames(self, world: World, frames: Sequence[TokenFrame]) -> list[Effect]:
        self._read += [(encode(frame), "") for frame in frames]
        effects = apply_frames(world, frames)
        self._applied += effects
        return effects

    def decide(self, world: World, now: Now, dead: Iterable[str]) -> list[Effect]:
        gone = list(dead)
        effects = decide(world, now, gone)
        self.turns.append((self._read, now, gone))
        self.acted.append(shown([*self._applied, *effects]))
        self._read, self._applied = [], []
        return effects


def shown(effects: Iterable[Effect]) -> list[str]:
    return [repr(effect) for effect in effects]


def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Steps in which workers are preempted and others join."""
    recorder = Recorder()
    monkeypatch.setattr(driver, "apply_frames", recorder.apply_frames)
    monkeypatch.setattr(driver, "apply_message", recorder.apply_message)
    monkeypatch.setattr(driver, "decide", recorder.decide)
    simulated(POLICIES["rlboost"])
    return recorder


def test_recorded_stream_gives_the_same_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch)
    assert sum("Assign" in text for turn in recorder.acted for text in turn) > 30
    world = World(LEASE_S)
    for (read, now, dead), acted in zip(recorder.turns, recorder.acted, strict=True):
        effects: list[Effect] = []
        for body, entry_id in read:
            effects += apply_message(world, decode(body), entry_id, now)
        assert shown([*effects, *decide(world, now, dead)]) == acted


@pytest.mark.parametrize("seed", ["1", "2"])
def test_hash_seed_changes_no_decision(seed: str) -> None:
    program = (
        "from rlboost.simulation import POLICIES; "
        "from tests.support.simulated import simulated; "
        "print(simulated(POLICIES['rlboost']))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    here = simulated(POLICIES["rlboost"])
    assert there.stdout.strip() == str(here)
