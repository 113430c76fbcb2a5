"""A trainer that does not train: it keeps work in flight constant and takes what is finished."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Any

import msgpack
import redis

from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import parse, to_json
from rlboost.shared.messages import (
    GroupRequested,
    JobCommand,
    JobReport,
    JobState,
    Message,
    Sampling,
    StepReport,
    WeightsCommitted,
)
from rlboost.shared.messages.codec import encode
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, pack

GROUP_SIZE = 8
CHECKPOINT_EVERY = 2
LEASE_MS = 10_000


class RequestingTrainer:
    """One job. A step has `groups_per_step` groups; a group that finishes is replaced at once, without a barrier."""

    def __init__(
        self, url: str, no: int, *, groups: int, groups_per_step: int, mean_tokens: int, seed: int = 0
    ) -> None:
        """Create the job, with `groups` groups in flight.

        Args:
            url: of Redis.
            no: the job's number, from 1.
            groups: how many are in flight.
            groups_per_step: a step is reported after this many finished groups.
            mean_tokens: about the mean length of a sample; lengths are lognormal, and similar within a group.
            seed: of the lengths.

        """
        self._client = redis.Redis.from_url(url)
        self._random = random.Random(seed)
        self.job_id, self._no = f"load-{no}", no
        self._groups_per_step, self._mean_tokens = groups_per_step, mean_tokens
        self._requested = self._done = self.steps_done = 0
        self._open: Counter[int] = Counter()
        """Step -> groups of it in flight."""
        self._marks = ["0-0"]
        self._cursor = "0-0"
        self.samples = self.tokens = 0
        """Delivered so far."""
        spec = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 1_000_000}
        command = JobCommand(
            command_id=self.job_id,
            action="create",
            job_id=self.job_id,
            job_no=no,
            spec_json=to_json(parse(spec)),
        )
        self._append(names.JOB_COMMANDS, command)
        self._report("running")
        committed = WeightsCommitted(job_id=self.job_id, version=0, manifest_digest="", n_bytes=0, at=time.time())
        self._append(names.WEIGHTS_COMMITTED, committed)
        self._lease_at = 0.0
        self._ask(groups)

    def step(self) -> None:
        """Take what is finished, ask for as many groups anew, report and trim what a checkpoint covers."""
        self._hold_lease()
        done = 0
        read: Any = self._client.xread({names.rollouts_finished(self.job_id): self._cursor}, count=512)
        for _, entries in read or ():
            self._cursor = entries[-1][0].decode()
            for _, fields in entries:
                done += self._take(msgpack.unpackb(fields[b"m"]))
        self._ask(done)
        self._done += done
        while self._done >= self._groups_per_step:
            self._done -= self._groups_per_step
            self._finish_step()

    def end(self) -> None:
        """Complete the job."""
        self._report("completed")
        self._client.delete(names.trainer_lease(self.job_id))
        self._client.close()

    def _take(self, message: dict[str, Any]) -> bool:
        if message["t"] == "SampleFinished":
            self.samples += 1
            self.tokens += len(message["tokens"]) // I32.itemsize
        elif message["t"] == "SampleDropped":
            raise RuntimeError(f"a sample was dropped: {message['reason']}")
        if message.get("group_done"):
            step = SampleId.unpack(message["sample"]).step
            self._open[step] -= 1
            if not self._open[step]:
                del self._open[step]
            return True
        return False

    def _ask(self, groups: int) -> None:
        pipe = self._client.pipeline(transaction=False)
        for _ in range(groups):
            step, group = divmod(self._requested, self._groups_per_step)
            self._requested += 1
            self._open[step] += 1
            length = int(self._mean_tokens * 0.73 * self._random.lognormvariate(0.0, 0.8))  # 0.73 = exp(-0.8 ** 2 / 2)
            request = GroupRequested(
                job_id=self.job_id,
                group=SampleId(self._no, False, step, group, 0).pack(),
                n=GROUP_SIZE,
                prompt=pack(range(64), I32),
                sampling=Sampling(max_tokens=min(8 * self._mean_tokens, max(1, length))),
                version=0,
                seed=step,
            )
            pipe.xadd(names.rollouts_requested(self.job_id), {"m": encode(request)})
        pipe.execute()

    def _finish_step(self) -> None:
        # Groups of several steps are in flight at once: nobody asks again for those before the oldest.
        report = StepReport(
            job_id=self.job_id,
            step=self.steps_done,
            metrics={"loss": 0.5, "reward": 0.5},
            checkpointed_step=min(self._open, default=0),
        )
        self.steps_done += 1
        self._append(names.JOB_REPORTS, report)
        if self.steps_done % CHECKPOINT_EVERY == 0:
            self._client.xtrim(names.rollouts_finished(self.job_id), minid=self._marks[0], approximate=False)
            self._marks = [*self._marks, self._cursor][-2:]

    def _hold_lease(self) -> None:
        now = time.monotonic()
        if now - self._lease_at > 1.0:
            self._lease_at = now
            self._client.set(names.trainer_lease(self.job_id), json.dumps({"waiting": None}), px=LEASE_MS)

    def _report(self, state: JobState) -> None:
        self._append(names.JOB_REPORTS, JobReport(job_id=self.job_id, state=state, step=self.steps_done))

    def _append(self, stream: str, message: Message) -> None:
        self._client.xadd(stream, {"m": encode(message)})
