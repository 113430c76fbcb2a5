"""Tokens a second of the manager's token plane, and its ratio to the bare limit on the same frames in the same run.

    python -m benchmarks.token_plane [--samples 64 256] [--tokens 1 4 16] [--seconds 6] [--direct]

A real manager on a real Redis; load workers write frames as real workers do, obey assignments,
finish samples; a trainer takes what is delivered and asks for as much again, so that work in flight stays constant
while ledger, delivery, restating and trimming all run. One JSON line per case (samples a frame x tokens a sample in
it), then a table.

- `tokens_per_cpu_s`: tokens that became part of the ledger by processor second of the manager, all its threads: what
  one core sustains, little disturbed by whatever else runs on the machine. `tokens_per_s` is on the wall.
- `bare_tokens_per_cpu_s`: a process that does nothing but XREADGROUP the same frames, as many at a time, and unpack
  them with msgpack. `ratio` is of the two.
- `latency`: from a worker's flush until the manager's stored state covers the frame, at a fifth of the sustained rate.

Measure with two idle cores at least: load, Redis and manager share them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import redis
from rich.console import Console
from rich.table import Table

from benchmarks.support.system import System, cpu_s
from benchmarks.support.trainer import GROUP_SIZE, RequestingTrainer
from benchmarks.support.workers import Fleet, Frame, FrameWriter, Join, Sent

SLOTS = 1024
"""Of the whole fleet."""
IN_FLIGHT = 1280
"""More than there are slots, so that each of them is busy while a group is asked for."""
MEAN_TOKENS = 2048
BURST_ROWS = 16 * SLOTS
"""Frames of so many rows are sent at a time, the next as soon as the manager has taken those before: it works in full
turns, as it does when it has all that it can do, also where load and Redis share two cores with it."""
BATCH = 1024
"""Entries that the bare reader asks for at a time, as the manager does."""
BARE_STREAM = "bare"
BARE_FRAMES = 4096
LATENCY_LOAD = 0.2


@dataclass
class Case:
    samples: int
    """In a frame."""
    tokens: int
    """Of a sample in a frame."""
    seconds: float
    url: str
    join: Join | None
    """Gives a worker an identity, so that the manager relays its frames; None if it writes to the token log."""


def trainer(case: Case, pipe: Connection) -> None:
    """Ask and take until told to end; answer each question with (samples, tokens) delivered."""
    job = RequestingTrainer(case.url, 1, groups=IN_FLIGHT // GROUP_SIZE, groups_per_step=64, mean_tokens=MEAN_TOKENS)
    pipe.send("ready")
    while True:
        job.step()
        if pipe.poll(0.005):
            if pipe.recv() == "end":
                job.end()
                return
            pipe.send((job.samples, job.tokens))


class Load:
    """Frames of the whole fleet, at full speed or paced."""

    def __init__(self, case: Case) -> None:

        self._fleet = Fleet(case.url, SLOTS // case.samples, case.samples, join=case.join)
        self._tokens, self._burst = case.tokens, BURST_ROWS // case.samples
        self.sent = self.frames = self.tokens = 0
        self.recent: list[Frame] = []
        """The last burst."""

    def run(self, seconds: float) -> None:
        """Send as fast as the manager takes it."""
        limit = time.monotonic() + seconds
        burst: list[Frame] = []
        sent: Sent | None = None
        while time.monotonic() < limit:
            made = self._fleet.step(self._tokens) if len(burst) < self._burst else []
            burst += made
            if len(burst) >= self._burst and (sent is None or self._fleet.is_taken(sent)):
                sent = self._send(burst)
                self.recent = burst
                burst = []
            elif not made:
                time.sleep(0.0005)
        while sent and not self._fleet.is_taken(sent):
            time.sleep(0.0005)

    def run_paced(self, seconds: float, frames_per_s: float) -> list[float]:
        """Send frames one by one at a rate; return the seconds from each one's sending to the stored state."""
        began, sent, latencies = time.monotonic(), 0, list[float]()
        ahead: deque[tuple[Sent, float]] = deque()
        ready: deque[Frame] = deque()
        while (now := time.monotonic()) - began < seconds or ahead:
            if now - began < seconds and sent < (now - began) * frames_per_s:
                ready = ready or deque(self._fleet.step(self._tokens))
                if ready:
                    at = time.monotonic()
                    ahead.append((self._send([ready.popleft()]), at))
                    sent += 1
            else:
                time.sleep(0.0003)
            while ahead and self._fleet.is_taken(ahead[0][0]):
                latencies.append(time.monotonic() - ahead.popleft()[1])
            if now - began > seconds + 10.0:
                raise RuntimeError(f"the manager has not taken {len(ahead)} frames in 10 s")
        return latencies

    def _send(self, frames: list[Frame]) -> Sent:
        self.sent += sum(frame.tokens for frame in frames)
        self.frames += len(frames)
        return self._fleet.send(frames)


def bare(url: str, pipe: Connection) -> None:
    """Read and unpack the bare stream over and over; tell the tokens, processor and wall seconds."""
    client = redis.Redis.from_url(url)
    tokens, cpu_used, wall, turn = 0, 0.0, 0.0, 0
    while cpu_used < 2.0:
        group = f"g{turn}"
        turn += 1
        client.xgroup_create(BARE_STREAM, group, id="0")
        frames: list[Any] = []
        began, began_cpu = time.monotonic(), time.process_time()
        while reply := cast("Any", client.xreadgroup(group, "c", {BARE_STREAM: ">"}, count=BATCH)):
            for _, fields in reply[0][1]:
                frames.append(msgpack.unpackb(fields[b"m"])["tokens"])
        wall += time.monotonic() - began
        cpu_used += time.process_time() - began_cpu
        tokens += sum(map(len, frames)) // 4
        client.xgroup_destroy(BARE_STREAM, group)
    pipe.send((tokens, cpu_used, wall))


def measure(samples: int, tokens: int, seconds: float, *, relayed: bool = True) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, System(Path(directory)) as system:
        case = Case(samples, tokens, seconds, system.url, system.join if relayed else None)
        pid = system.start_manager()
        ours, theirs = multiprocessing.Pipe()
        asking = multiprocessing.Process(target=trainer, args=(replace(case, join=None), theirs), daemon=True)
        asking.start()
        ours.recv()
        load = Load(case)
        ours.send("?")
        while ours.recv()[0] < IN_FLIGHT:  # until as many samples were finished as are in flight
            load.run(0.5)
            ours.send("?")
        sent, frames, at, cpu = load.sent, load.frames, time.monotonic(), cpu_s(pid)
        ours.send("?")
        done = ours.recv()[0]
        load.run(seconds)
        wall, cpu = time.monotonic() - at, cpu_s(pid) - cpu
        sent, frames = load.sent - sent, load.frames - frames
        ours.send("?")
        done = ours.recv()[0] - done
        busy = cpu / wall
        latencies = load.run_paced(min(seconds, 4.0), LATENCY_LOAD * frames / cpu)
        ours.send("end")
        asking.join(10)
        system.stop_manager()
        bare_tokens, bare_cpu, bare_wall = measure_bare(system.url, load.recent)
        return {
            "samples": samples,
            "tokens": tokens,
            "relayed": relayed,
            "tokens_per_cpu_s": round(sent / cpu),
            "bare_tokens_per_cpu_s": round(bare_tokens / bare_cpu),
            "ratio": round(sent / cpu / (bare_tokens / bare_cpu), 3),
            "tokens_per_s": round(sent / wall),
            "bare_tokens_per_s": round(bare_tokens / bare_wall),
            "manager_busy": round(busy, 2),
            "ns_per_token": round(cpu / sent * 1e9),
            "us_per_frame": round(cpu / frames * 1e6, 1),
            "bare_us_per_frame": round(bare_cpu / (bare_tokens / (sent / frames)) * 1e6, 1),
            "tokens_per_frame": round(sent / frames),
            "samples_per_s": round(done / wall),
            "latency_p50_ms": round(float(np.percentile(latencies, 50)) * 1e3, 1),
            "latency_p99_ms": round(float(np.percentile(latencies, 99)) * 1e3, 1),
        }


def measure_bare(url: str, frames: list[Frame]) -> tuple[int, float, float]:
    """Return tokens, processor seconds and wall seconds of the bare reader over these frames."""
    writer = FrameWriter(url)
    for _ in range(BARE_FRAMES // len(frames)):
        writer.write([(BARE_STREAM, frame.body) for frame in frames])
    ours, theirs = multiprocessing.Pipe()
    reading = multiprocessing.Process(target=bare, args=(url, theirs), daemon=True)
    reading.start()
    result: tuple[int, float, float] = ours.recv()
    reading.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 256], help="samples a frame")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16], help="tokens of a sample in a frame")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--direct", action="store_true", help="also measure with frames written to the token log")
    args = parser.parse_args()
    rows = []
    for samples, tokens, relayed in itertools.product(args.samples, args.tokens, [True, False][: 1 + args.direct]):
        rows.append(measure(samples, tokens, args.seconds, relayed=relayed))
        print(json.dumps(rows[-1]), flush=True)
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = {
        "tokens per CPU s": "tokens_per_cpu_s",
        "bare": "bare_tokens_per_cpu_s",
        "ratio": "ratio",
        "tokens/s": "tokens_per_s",
        "µs a frame": "us_per_frame",
        "bare µs": "bare_us_per_frame",
        "ns a token": "ns_per_token",
        "p50 ms": "latency_p50_ms",
        "p99 ms": "latency_p99_ms",
    }
    table = Table("frame", *columns)
    for row in rows:
        frame = f"{row['samples']} x {row['tokens']}" + ("" if row["relayed"] else ", direct")
        table.add_row(frame, *(f"{row[key]:,}" for key in columns.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
