"""Virtual time and what workers and trainer share: the job, the machine, and the link to the manager."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import Message
from rlboost.simulation.policies import Policy
from rlboost.simulation.scenario import DELTA_SHARE, EngineSpec, Group, Machine, SimulatedJob, typical_kv

LATENCY_S = 0.02
"""Time of a message through Redis, in either direction."""
LEASE_S = 2.0
"""A worker that was killed without notice is lost after this time."""


class Environment:
    """The clock, the events that are due, and the constants of one run."""

    def __init__(self, job: SimulatedJob, machine: Machine, policy: Policy, seed: int, resolution_s: float) -> None:
        """Start at time 0.

        Args:
            job: what is generated and trained.
            machine: the hardware, with reserved engines and prices.
            policy: how weights travel, and the staleness.
            seed: seed of the sample lengths.
            resolution_s: the shortest time between two turns of the manager; real ones follow within 0.01 s.

        """
        self.job, self.machine, self.policy, self.seed = job, machine, policy, seed
        self.now = 0.0
        self.turn_s = self.finish_s = resolution_s
        """A complete sample is reported, and the manager takes a turn, at most once in this time."""
        self.report_s = 16 * resolution_s
        """Interval of reports on all samples: real workers flush every 0.05 s, and no decision needs more than this."""
        self.heartbeat_s = (8 if policy.rule == "rlboost" else 4) * resolution_s
        """The baselines see queues only as heartbeats report them; the real interval is 0.5 s."""
        self.send: Callable[[Message], None]
        """Sends a message to the manager; set by the simulation."""
        self.pulling = 0
        """Instances that download weights now."""
        self.slowdown = 1.0
        """Slowdown of the step that is trained: see `Machine.slowdowns`."""
        self.ended: Counter[int] = Counter()
        """Group -> its complete samples."""
        self._groups: dict[int, dict[int, Group]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call at a moment of virtual time."""
        self._n_events += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._n_events, call))

    def next_event(self) -> Callable[[], None]:
        """Move the clock to the next event and return its call."""
        self.now, _, call = heapq.heappop(self._events)
        return call

    def begin_step(self, step: int) -> None:
        """Set the speed of the machine in this step."""
        slowdowns = self.machine.slowdowns
        self.slowdown = slowdowns[(self.seed + step) % len(slowdowns)]

    @property
    def engine(self) -> EngineSpec:
        """Return an engine with the speed of this step."""
        return self.machine.engine.slowed(self.slowdown)

    def groups(self, step: int) -> dict[int, Group]:
        """Return the groups of a step by id."""
        if step not in self._groups:
            self._groups[step] = {group.id: group for group in self.job.groups(step, self.seed)}
            self._groups.pop(step - 4 - self.policy.staleness, None)
        return self._groups[step]

    def length_of(self, sample: int) -> int:
        """Return the length of a complete sample in tokens."""
        group = group_of(sample)
        return self.groups(SampleId.unpack(sample).step)[group].lengths[sample - group]

    @property
    def sent_share(self) -> float:
        """Return the bytes sent for one version, per byte of the bf16 model."""
        return DELTA_SHARE if self.policy.weights == "delta" else self.policy.bytes_factor


def generation_s(job: SimulatedJob, machine: Machine) -> float:
    """Return about how long the reserved engines alone generate a step; one engine where there are none."""
    middle = job.lengths.quantile(0.5)
    kv = typical_kv(job.mean_prompt_tokens, middle)
    tokens_per_s = machine.engine.tokens_per_s(machine.engine.max_batch(kv), kv)
    return job.samples * middle / (tokens_per_s * max(1, machine.reserved_engines))
