"""Processor time per scheduling decision, with up to 1,000 workers and 100,000 samples in flight.

    OMP_NUM_THREADS=1 python -m benchmarks.decisions [--workers 10 100 1000] [--ended 16 256] [--queued 0]

The manager's own domain code, without Redis and without decoding messages. Every worker runs as many samples as it has
slots, and `--queued` samples are queued in addition. In each turn `--ended` samples end, anywhere, and whole groups are
requested in their place, so as many are placed as have ended. Figures, each the best of `--rounds`:

- `decide_us`: all that is decided in a turn, per placed sample;
- `turn_us`: the same with the reading of the turn's messages (frames, requests, the manager's own records);
- `heartbeat_us`: reading one heartbeat of a worker with all its samples;
- `reference_us`: a fixed loop, which is slower too on a busy machine. Compare figures by their ratio to it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator

from rlboost.shared.ids import SampleId
from rlboost.shared.messages import (
    FINISH_STOP,
    Assign,
    GroupRequested,
    Message,
    Sampling,
    TokenFrame,
    WeightsCommitted,
    WorkerHeartbeat,
    WorkerJoined,
)
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.process.system import collect_garbage_rarely
from rlboost.shared.wire import F32, I32, U8, U32, U64, pack
from rlboost.simulation import POLICIES, Lengths, SimulatedJob
from rlboost.simulation.policies.rlboost import DomainManager
from rlboost.simulation.scenario import JOB_ID, JOB_NO

GROUP_SIZE = 8
TOKENS = 16
"""Of each sample when it ends: few, as their bytes are not what is measured."""
TURN_S = 0.02


class Load:
    """A manager, workers that are full, and what one turn brings."""

    def __init__(self, workers: int, samples_each: int) -> None:
        collect_garbage_rarely()  # as the manager's process does
        prompts = workers * samples_each // GROUP_SIZE
        job = SimulatedJob(lengths=Lengths(cap=5120, median=1200, sigma=0.7), train_s_per_token=0.0, prompts=prompts)
        self.manager = DomainManager(job, POLICIES["rlboost"])
        self.now = 0.0
        self.held: dict[int, tuple[str, int]] = {}
        """Sample -> (owner, attempt)."""
        self.placed = 0
        self._ids: list[int] = []
        self._rng = random.Random(0)
        self._requests = self._make_requests()
        names = [f"w{i:04}" for i in range(workers)]
        self.turn([WeightsCommitted(job_id=JOB_ID, version=0, manifest_digest="", n_bytes=1, at=0.0)])
        self.turn([_joined(name, samples_each) for name in names])
        self.turn(self.requests(workers * samples_each))
        self.turn([_beat(name) for name in names])
        # Placement may take several turns: it goes on until the fleet is as full as the policy wants it.
        while self.turn([]):
            pass

    def requests(self, samples: int) -> list[Message]:
        """Return requests for so many samples."""
        return [next(self._requests) for _ in range(samples // GROUP_SIZE)]

    def ends(self, samples: int) -> list[Message]:
        """Return the frames with which so many samples end, drawn from all in flight."""
        frames: list[Message] = []
        for _ in range(samples):
            at = self._rng.randrange(len(self._ids))
            self._ids[at], self._ids[-1] = self._ids[-1], self._ids[at]
            sample = self._ids.pop()
            worker, attempt = self.held.pop(sample)
            frames.append(_ended(worker, sample, attempt))
        return frames

    def turn(self, messages: list[Message]) -> int:
        """Let the manager take a turn; return how many samples it placed."""
        self.now += TURN_S
        commands = self.manager.turn(messages, self.now, lambda _: True).commands
        placed = 0
        for worker, command in commands:
            if isinstance(command, Assign):
                placed += len(command.samples)
                for assignment in command.samples:
                    if assignment.sample not in self.held:
                        self._ids.append(assignment.sample)
                    self.held[assignment.sample] = worker, assignment.attempt
        self.placed += placed
        return placed

    def _make_requests(self) -> Iterator[Message]:
        prompt = pack(range(64), I32)
        step, group = 0, 0
        while True:
            packed = SampleId(JOB_NO, False, step, group, 0).pack()
            yield GroupRequested(
                job_id=JOB_ID, group=packed, n=GROUP_SIZE, prompt=prompt, sampling=Sampling(), version=0, seed=group
            )
            group += 1
            if group == 1 << 15:
                step, group = step + 1, 0


def _joined(worker: str, slots: int) -> WorkerJoined:
    return WorkerJoined(
        worker=worker,
        role="preemptible",
        kind="k",
        slots=slots,
        host=worker,
        pid=1,
        price_per_hour=1.0,
        at=0.0,
        protocol=PROTOCOL,
    )


def _beat(worker: str) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker=worker,
        state="ready",
        job_id=JOB_ID,
        version=0,
        running=0,
        pending=0,
        tokens_per_s=0.0,
        at=0.0,
        last_command="1-1",
    )


def _ended(worker: str, sample: int, attempt: int) -> TokenFrame:
    return TokenFrame(
        worker=worker,
        seq=0,
        samples=pack([sample], U64),
        attempts=pack([attempt], U32),
        offsets=pack([0], U32),
        counts=pack([TOKENS], U32),
        versions=pack([0], U32),
        finish=pack([FINISH_STOP], U8),
        tokens=bytes(I32.itemsize * TOKENS),
        logprobs=bytes(F32.itemsize * TOKENS),
    )


def reference_s() -> float:
    """Return the processor time of a loop of 100 additions, the mean of 1,000 such loops."""
    began = time.process_time()
    total = 0
    for number in range(100_000):
        total += number
    return (time.process_time() - began) / 1_000


def measure(load: Load, ended: int, turns: int) -> dict[str, float]:
    """Return microseconds per placed sample, of the decisions and of whole turns, per heartbeat and of the loop."""
    turn_s = 0.0
    decide_s, placed = load.manager.decide_s, load.placed
    for _ in range(turns):
        messages = [*load.requests(ended), *load.ends(ended)]
        began = time.process_time()
        load.turn(messages)
        turn_s += time.process_time() - began
    placed = load.placed - placed
    if not placed:
        raise RuntimeError("nothing was placed: the fleet is not in a steady state")
    decide_s = load.manager.decide_s - decide_s
    began = time.process_time()
    load.turn([_beat(worker) for worker in load.manager.world.fleet.workers])
    heartbeats_s = time.process_time() - began
    return {
        "decide_us": 1e6 * decide_s / placed,
        "turn_us": 1e6 * turn_s / placed,
        "heartbeat_us": 1e6 * heartbeats_s / len(load.manager.world.fleet.workers),
        "reference_us": 1e6 * reference_s(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--samples-each", type=int, default=100)
    parser.add_argument("--ended", type=int, nargs="+", default=[16, 256], help="samples that end in a turn")
    parser.add_argument("--queued", type=int, default=0, help="samples that are queued all the time")
    parser.add_argument("--turns", type=int, default=50, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for workers in args.workers:
        load = Load(workers, args.samples_each)
        load.turn(load.requests(args.queued))
        for ended in args.ended:
            in_flight = len(load.held)
            rounds = [measure(load, ended, args.turns) for _ in range(args.rounds)]
            best = {name: round(min(figures[name] for figures in rounds), 1) for name in rounds[0]}
            row = {"benchmark": "decisions", "workers": workers, "in_flight": in_flight, "queued": args.queued}
            print(json.dumps(row | {"ended_a_turn": ended} | best), flush=True)


if __name__ == "__main__":
    main()
