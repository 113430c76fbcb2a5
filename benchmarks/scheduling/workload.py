"""What happens to every policy alike: the samples' lengths, and which workers go and come when.

Comings and goings are tied to steps ("20 s into step 3"), not to the time since the start: so a faster policy meets
the same ones as a slower one, and none is asked to survive more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from benchmarks.scheduling.cases import Case, Lengths
from rlboost.shared.ids import SampleId

JOB_NO = 1
_LATEST = 0.8
"""Events happen in the first so much of the shortest time that the step can take."""


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt of one step."""

    id: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Of each member's completion."""

    @property
    def tokens(self) -> int:
        """Return the tokens to train on."""
        return sum(self.lengths) + self.prompt_tokens * len(self.lengths)


@dataclass(frozen=True, slots=True)
class Joining:
    """A worker comes."""

    worker: str
    speed: float


@dataclass(frozen=True, slots=True)
class Going:
    """A worker goes, with notice or without."""

    worker: str
    noticed: bool


@dataclass(frozen=True, slots=True)
class SpotEvent:
    """Something that the cloud does, so long after a step's begin."""

    after_s: float
    what: Joining | Going


@dataclass(frozen=True, slots=True)
class Workload:
    """One run's outside world."""

    case: Case
    steps: tuple[tuple[Group, ...], ...]
    fleet: tuple[Joining, ...]
    """Preemptible workers that are there at the start."""
    spot: tuple[tuple[SpotEvent, ...], ...]
    """By step, in order of time."""

    def length_of(self) -> dict[int, int]:
        """Return the length of each sample by its id."""
        return {group.id + i: length for step in self.steps for group in step for i, length in enumerate(group.lengths)}


def workload(case: Case, preemptions: int, seed: int, step_s: float) -> Workload:
    """Draw a workload.

    Args:
        case: what kind.
        preemptions: how many workers go during the measured steps; each is replaced.
        seed: the same gives the same.
        step_s: no policy takes less for a step.

    """
    rng = np.random.default_rng([seed, 1])
    steps = tuple(
        tuple(_group(case, step, number, rng) for number in range(case.prompts)) for step in range(case.steps)
    )
    fleet = tuple(Joining(f"spot-{i:03}", speed) for i, speed in enumerate(case.preemptible))
    spot = _spot(case, fleet, preemptions, np.random.default_rng([seed, 2]), _LATEST * step_s)
    return Workload(case, steps, fleet, spot)


def _group(case: Case, step: int, number: int, rng: np.random.Generator) -> Group:
    between = case.lengths.between
    own, common = rng.standard_normal(case.group_size), rng.standard_normal()
    normal = common * between**0.5 + own * (1.0 - between) ** 0.5
    return Group(
        id=SampleId(JOB_NO, False, step, number, 0).pack(),
        prompt_tokens=int(rng.integers(*case.prompt_tokens, endpoint=True)),
        lengths=tuple(_length(case.lengths, z) for z in normal),
    )


def _length(lengths: Lengths, normal: float) -> int:
    if lengths.quantiles:
        probabilities, tokens = zip(*lengths.quantiles, strict=True)
        value = float(np.exp(np.interp(NormalDist().cdf(normal), probabilities, np.log(tokens))))
    else:
        value = lengths.median * float(np.exp(lengths.sigma * normal))
    return max(1, min(lengths.cap, round(value)))


def _spot(
    case: Case, fleet: tuple[Joining, ...], preemptions: int, rng: np.random.Generator, latest_s: float
) -> tuple[tuple[SpotEvent, ...], ...]:
    events: list[list[SpotEvent]] = [[] for _ in range(case.steps)]
    times = sorted(
        zip(rng.integers(case.warm_up, case.steps, preemptions).tolist(), rng.random(preemptions).tolist(), strict=True)
    )
    alive = [(0, 0.0, worker) for worker in fleet]
    for i, (step, part) in enumerate(times):
        there = [item for item in alive if item[:2] < (step, part)]
        if not there:
            continue
        _, _, victim = gone = there[int(rng.integers(len(there)))]
        alive.remove(gone)
        events[step].append(SpotEvent(part * latest_s, Going(victim.worker, noticed=i % 2 == 1)))
        # The replacement comes 0.2 to 1.2 such times later, in this step or in the next.
        later = part + 0.2 + float(rng.random())
        to, at = (step, later) if later < 1.0 else (step + 1, later - 1.0)
        if to < case.steps:
            joining = Joining(f"spot-{len(fleet) + i:03}", victim.speed)
            alive.append((to, at, joining))
            events[to].append(SpotEvent(at * latest_s, joining))
    return tuple(tuple(sorted(step, key=lambda event: event.after_s)) for step in events)
