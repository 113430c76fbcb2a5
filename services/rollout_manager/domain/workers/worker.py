"""One worker: its state, what it serves, and its load."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.command_check import CommandCheck
from rlboost.services.rollout_manager.domain.workers.kv_usage import KvUsage
from rlboost.services.rollout_manager.domain.workers.throughput_model import Profile, is_possible, speed_after
from rlboost.shared.messages import Wait, WorkerHeartbeat, WorkerJoined

State = Literal["joining", "pulling", "ready", "suspended", "draining", "lost", "left"]
Serving = tuple[str, int]
"""What a worker serves: (job id, weight version)."""
DISTURBED_S = 2.0
"""How long the prefill of migrated samples shows in a worker's measured throughput."""


@dataclass(slots=True)
class Worker:
    """One incarnation of a worker."""

    joined: WorkerJoined
    id: str = field(init=False)
    """Id of this incarnation."""
    price_per_hour: float = field(init=False)
    """Its own setting in dollars, else what its kind costs: see `Fleet.prices`."""
    last_seen_at: float
    """When its last heartbeat was read (manager's clock)."""
    state: State = "joining"
    job_id: str = ""
    version: int = -1
    """The weight version that its engine has loaded, as it reports."""
    tokens_per_s: float = 0.0
    update_s: float = 0.0
    """How long its last weight update took; 0 before the first."""
    update_pause_s: float = 0.0
    """Part of `update_s` in which the engine could not generate."""
    last_heartbeat_at: float = 0.0
    """Worker's clock, Unix seconds."""
    resident_bytes: int = 0
    device_used_bytes: int = 0
    device_total_bytes: int = 0
    """Memory as of its last heartbeat: of its process, and of its device; 0 where it is not known."""
    has_reported: bool = False
    """False until this manager has read a heartbeat of it: until then its state is a guess."""
    assigned_version: Serving | None = None
    """The last (job, version) it was commanded to use."""
    assigned_active: bool | None = None
    """A reserved worker: whether it was last commanded to generate; None before the first command."""
    noticed: bool = False
    """It has sent a preemption notice."""
    invalid_samples: set[int] = field(default_factory=set)
    """Samples of which it sent rows that no engine sends, and which are not delivered yet."""
    n_invalid_confirmed: int = 0
    """How many of these samples another worker completed, so that this worker is to blame and not the weights."""
    drain_commanded: bool = False
    """It was commanded to drain."""
    unbilled_startup_s: float = 0.0
    """Time before its join that no job was charged with yet."""
    samples: set[int] = field(default_factory=set)
    """Changed by `add`, `remove` and `set_samples`, which count the tokens in `kv`."""
    releasing: dict[int, float] = field(default_factory=dict)
    """Members of `samples` that it was asked to release -> when (manager's clock)."""
    profile: Profile = field(default_factory=Profile)
    """Throughput model shared by all workers of its kind."""
    speed: float = 1.0
    """Measured throughput divided by the profile's."""
    batch_cap: int = 0
    """Samples it should run at once: its slots, or the batching plateau where that is less."""
    headroom: int = 0
    """Samples it queues in addition, so that a free slot is filled without a round trip."""
    kv: KvUsage = field(default_factory=KvUsage)
    max_request_tokens: int = 0
    """Longest sample, prompt included, that its engine accepts; 0 where it accepts any."""
    returns_routed_experts: bool = True
    """True if its engine accepts samples that ask for the experts of each token."""
    disturbed_at: float = -math.inf
    """When it was last assigned samples that need a long prefill (manager's clock)."""
    waiting: Wait | None = None
    """What it waits for, as of its last heartbeat."""
    gone_reason: str = ""
    """Why it has departed; empty while it is present."""
    command_check: CommandCheck = field(default_factory=CommandCheck)
    """Whether the worker's digest of its commands agrees with the manager's."""
    starting: bool = False
    """True from its first heartbeat in state `joining` until it is first ready; its startup is measured in between."""
    _last_running: int = 0
    _changed: dict[str, None] = field(default_factory=dict, repr=False, compare=False)
    """Ids of changed workers, shared with the `Fleet`: `mark_changed` adds this worker's."""

    def __post_init__(self) -> None:
        """Take the id, the price and the capacity from the join message."""
        self.id, self.kv.capacity = self.joined.worker, self.joined.kv_tokens
        self.price_per_hour = max(0.0, self.joined.price_per_hour)

    @property
    def reserved(self) -> bool:
        """Return True if it shares its device with the trainer."""
        return self.joined.role == "reserved"

    @property
    def load(self) -> int:
        """Return how many samples it holds and is not asked to release."""
        return len(self.samples) - len(self.releasing)

    @property
    def job(self) -> str:
        """Return the job that it was last commanded to serve; empty if none."""
        return self.assigned_version[0] if self.assigned_version else ""

    @property
    def pending(self) -> int:
        """Return how many of its samples wait for a slot."""
        return max(0, len(self.samples) - self.joined.slots)

    @property
    def generates(self) -> bool:
        """Return True if it can take samples now, of the job and for the version that it serves."""
        settled = self.assigned_version is None or self.assigned_version == (self.job_id, self.version)
        return self.state == "ready" and self.has_reported and settled and self.assigned_active is not False

    def expected_tokens_per_s(self) -> float:
        """Return the throughput with a full batch, 0 while its kind is not profiled."""
        if not self.profile.known or self.state == "draining":
            return 0.0
        return self.profile.tokens_per_s(self.batch_cap, self.batch_cap * self._tokens_each) * self.speed

    @property
    def _tokens_each(self) -> float:
        """Return how many tokens of its KV cache one of its samples takes on average."""
        return self.kv.held / len(self.samples) if self.samples else 0.0

    @property
    def age_s(self) -> float:
        """Return how long it has existed, by its own clock."""
        return max(0.0, self.last_heartbeat_at - self.joined.at)

    def batch_share(self) -> float:
        """Return the part of its decode time that grows with the batch, by the batch in its last heartbeat.

        The rest is the same for any batch: see `Profile.fixed_s`. While its kind is not profiled, a full batch counts
        as all of the time.
        """
        running = self._last_running
        if not self.profile.known:
            return min(1.0, running / max(1, self.batch_cap))
        return 1.0 - self.profile.fixed_s / self.profile.step_s(running, running * self._tokens_each)

    def add(self, sample: Sample) -> None:
        """Take a sample, and count its tokens."""
        self.kv.add(sample, has_sibling=self._has_sibling(sample))
        self.samples.add(sample.id)
        self.mark_changed()

    def remove(self, sample: Sample) -> None:
        """Remove a sample that it has, and its tokens."""
        self.samples.remove(sample.id)
        self.releasing.pop(sample.id, None)
        self.kv.remove(sample, has_sibling=self._has_sibling(sample))
        self.mark_changed()

    def release(self, sample_ids: Iterable[int], now: float) -> None:
        """Record that the worker was asked to release these of its samples."""
        self.releasing.update(dict.fromkeys(sample_ids, now))
        self.mark_changed()

    def set_samples(self, samples: Iterable[Sample]) -> None:
        """Set the samples that it has, and count their tokens from scratch."""
        held = list(samples)
        self.samples = {sample.id for sample in held}
        self.kv.recount(held)
        self.mark_changed()

    def set_batch(self, cap: int, headroom: int) -> None:
        """Set how many samples it should run and queue."""
        self.batch_cap, self.headroom = cap, headroom
        self.mark_changed()

    def set_active(self, *, active: bool) -> None:
        """Record that the worker was commanded to generate, or to suspend generation."""
        self.assigned_active = active
        self.mark_changed()

    def on_tokens(self, n_tokens: int) -> None:
        """Count tokens by which its samples have grown; its rank follows at its next heartbeat."""
        self.kv.held += n_tokens

    def mark_changed(self) -> None:
        """Have it ranked again among the candidates for the next sample."""
        self._changed[self.id] = None

    def _has_sibling(self, sample: Sample) -> bool:
        request = sample.request
        return bool(self.kv.block_tokens) and not self.samples.isdisjoint(
            range(request.group, request.group + request.n)
        )

    def on_heartbeat(self, heartbeat: WorkerHeartbeat, now: float) -> State | None:
        """Apply a heartbeat; return the previous state if the heartbeat changed it."""
        before = self.state
        self.last_seen_at, self.has_reported, self.last_heartbeat_at = now, True, heartbeat.at
        self.job_id, self.version, self.tokens_per_s = heartbeat.job_id, heartbeat.version, heartbeat.tokens_per_s
        self.update_s, self.update_pause_s = heartbeat.update_s, heartbeat.update_pause_s
        self.resident_bytes = heartbeat.resident_bytes
        self.device_used_bytes, self.device_total_bytes = heartbeat.device_used_bytes, heartbeat.device_total_bytes
        self.kv.capacity, self.kv.block_tokens = heartbeat.kv_tokens or self.joined.kv_tokens, heartbeat.kv_block_tokens
        self.max_request_tokens = heartbeat.max_request_tokens
        self.returns_routed_experts = heartbeat.returns_routed_experts
        self.waiting = heartbeat.waiting
        drains = self.noticed or self.drain_commanded
        self.state = "draining" if drains else heartbeat.state
        self._observe_throughput(heartbeat, now)
        self.mark_changed()
        return before if before != self.state else None

    def _observe_throughput(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        self._last_running = heartbeat.running
        batch, step_s = heartbeat.batch, heartbeat.step_s
        is_settled = heartbeat.state == "ready" and now - self.disturbed_at > DISTURBED_S
        if is_settled and is_possible(batch, step_s, self.joined.slots):
            tokens_per_s, tokens = batch / step_s, batch * self._tokens_each
            if self.profile.known:
                self.speed = speed_after(self.speed, self.profile.tokens_per_s(batch, tokens), tokens_per_s)
            self.profile.observe(batch, tokens, tokens_per_s)

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        return {
            "id": self.id,
            "role": self.joined.role,
            "kind": self.joined.kind,
            "state": self.state,
            "job_id": self.job_id or None,
            "weight_version": self.version if self.version >= 0 else None,
            "slots": self.joined.slots,
            "running": min(len(self.samples), self.joined.slots),
            "pending": self.pending,
            "tokens_per_s": self.tokens_per_s,
            "batch": self.batch_cap or self.joined.slots,
            "speed": round(self.speed, 3),
            "resident_bytes": self.resident_bytes or None,
            "device_used_bytes": self.device_used_bytes or None,
            "device_total_bytes": self.device_total_bytes or None,
            "price_per_hour": self.price_per_hour,
            "host": self.joined.host,
            "pid": self.joined.pid,
            "joined_at": self.joined.at,
            "last_heartbeat_at": self.last_heartbeat_at or self.joined.at,
            "waiting": self.waiting.public() if self.waiting else None,
            "gone_reason": self.gone_reason or None,
        }
