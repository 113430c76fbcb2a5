"""Carries out faults on a local system."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import redis

from benchmarks.chaos.holders import Participant, drip, hold
from benchmarks.chaos.schedule import Fault, Kind
from benchmarks.chaos.site import DISK_BYTES, TOKEN, Site
from rlboost.shared.errors import WaitTimedOut
from tests.support.small_job import small_job

KILLER_LOSS = "tests.support.losses:segfault"
"""Ends the trainer's process with SIGSEGV."""
_REDIS_LIMIT_S = 10.0
Undo = Callable[[], None]


class NotPossible(Exception):
    """There is nothing to do the fault to at the moment."""


class Faults:
    """Begins and ends faults on a system."""

    def __init__(self, site: Site, newest_job: Callable[[], str]) -> None:
        self._site = site
        self._newest_job = newest_job
        """Returns the id of the newest job; empty before the first."""
        self.killers: list[str] = []
        """Jobs that kill their trainer, and so must fail."""
        self.stuck: list[str] = []
        """What a participant that gives nothing has kept from ending."""
        self._begin: dict[Kind, Callable[[Fault], Undo | None]] = {
            "kill": lambda fault: self._signal(fault, signal.SIGKILL),
            "terminate": lambda fault: self._signal(fault, signal.SIGTERM),
            "stop": self._stop,
            "step_clock": self._step_clock,
            "disconnect": self._disconnect,
            "out_of_memory": self._out_of_memory,
            "disk_full": self._disk_full,
            "partition": self._partition,
            "flip_bytes": self._flip_bytes,
            "kill_all": self._kill_all,
            "hold": lambda _: self._participant(hold(self._site.box.url, TOKEN, undead=False)),
            "undead": lambda _: self._participant(hold(self._site.box.url, TOKEN, undead=True)),
            "drip": self._drip,
            "kill_trainer": self._kill_trainer,
        }

    def begin(self, fault: Fault) -> Undo | None:
        """Begin a fault; return what ends it, None if it has no end.

        Raises:
            NotPossible: says why.

        """
        return self._begin[fault.kind](fault)

    # --- signals ---

    def _victim(self, fault: Fault) -> int:
        pids: list[int] = sorted(process["pid"] for process in self._site.box.processes(fault.role))
        if not pids:
            raise NotPossible(f"no process of the role {fault.role} runs")
        return pids[fault.seed % len(pids)]

    def _signal(self, fault: Fault, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._victim(fault), number)

    def _stop(self, fault: Fault) -> Undo:
        victim = self._victim(fault)

        def resume() -> None:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)

        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
        return resume

    def _step_clock(self, fault: Fault) -> Undo:
        clocks, victim = self._site.clocks, self._victim(fault)
        if clocks is None:
            raise NotPossible("the system runs without clocks that can be set")
        clocks.step(victim, fault.offset_s)
        return lambda: clocks.step(victim, -fault.offset_s)

    def _kill_all(self, _: Fault) -> None:
        self._site.kill_all()

    # --- Redis ---

    def _on_redis(self, call: Callable[[redis.Redis], object]) -> None:
        """Retry while Redis is away or loads its data."""
        limit = time.monotonic() + _REDIS_LIMIT_S
        while True:
            with suppress(redis.RedisError), redis.Redis.from_url(self._site.box.redis_url, socket_timeout=2) as client:
                call(client)
                return
            if time.monotonic() > limit:
                raise NotPossible("Redis does not answer")
            time.sleep(0.1)

    def _disconnect(self, _: Fault) -> None:
        def kill(client: redis.Redis) -> None:
            for kind in ("normal", "pubsub"):
                client.client_kill_filter(_type=kind, skipme=True)

        self._on_redis(kill)

    def _out_of_memory(self, _: Fault) -> Undo:
        self._on_redis(lambda client: client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2))
        return lambda: self._on_redis(lambda client: client.config_set("maxmemory", 0))

    # --- disk and network ---

    def _disk_full(self, _: Fault) -> Undo:
        filler = self._site.box.state / "filler"
        for block_bytes in (1 << 20, 512):  # the small blocks fill what the large ones leave
            with suppress(OSError), filler.open("ab", buffering=0) as file:
                for _block in range(DISK_BYTES // block_bytes):
                    file.write(bytes(block_bytes))
        return lambda: filler.unlink(missing_ok=True)

    def _partition(self, _: Fault) -> Undo:
        remote = self._site.remote
        if remote is None:
            raise NotPossible("the remote worker does not run")
        remote.cut()
        return remote.mend

    def _flip_bytes(self, fault: Fault) -> None:
        chunks = sorted(path for path in self._site.chunks.glob("*/*") if path.is_file())
        if not chunks:
            raise NotPossible("the weight store has no chunk yet")
        _flip_byte(chunks[fault.seed % len(chunks)], fault.seed)

    # --- participants that give nothing, and a job that kills its trainer ---

    def _drip(self, _: Fault) -> Undo:
        job_id = self._newest_job()
        if not job_id:
            raise NotPossible("there is no job yet")
        return self._participant(drip(self._site.box.url, TOKEN, job_id))

    def _participant(self, participant: Participant) -> Undo:
        def end() -> None:
            participant.stop()
            if isinstance(participant.error, WaitTimedOut):  # the other errors are of other faults
                self.stuck.append(str(participant.error))

        return end

    def _kill_trainer(self, _: Fault) -> None:
        spec = small_job(2)
        spec["algorithm"] = {"group_size": spec["algorithm"]["group_size"], "loss": KILLER_LOSS}
        try:
            self.killers.append(self._site.box.submit(spec))
        except AssertionError as error:
            raise NotPossible("no manager answers") from error


def _flip_byte(path: Path, seed: int) -> None:
    with suppress(FileNotFoundError), path.open("r+b") as file:
        at = random.Random(seed).randrange(max(1, path.stat().st_size))
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0xFF]))
