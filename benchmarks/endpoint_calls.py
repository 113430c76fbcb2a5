"""Processor time of the manager's event loop per call of its OpenAI endpoint.

    python -m benchmarks.endpoint_calls [--calls 64] [--tokens 512] [--frame 4] [--words 300 4000]

The manager's routes run in this process, over a bus in memory; its text processes are real. All calls are open at once,
and each gets `--frame` more tokens at a time, as workers send them. Counted is the time of this thread between turns of
the manager: reading a call, what wakes it, its text and its response; not the HTTP server's parser, nor the turns.
Other programs on the machine lengthen it less than anything by the clock.

One JSON line per kind of call: `ms_per_call`, and the longest iteration of the loop among them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.manager_stalls import words, write_model
from benchmarks.support.system import TOKEN
from rlboost.services.rollout_manager.adapters.text import TextProcesses, load_model_files
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.domain.effects import Deliver
from rlboost.services.rollout_manager.serving.routes import add_openai_routes, error_format
from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_manager.waiters import Waiter
from rlboost.shared.ids import SampleId
from rlboost.shared.job.agent import SESSION, SessionId, SessionRecord, key_of_start, session_key
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, SampleFinished, Sampling
from rlboost.shared.process.system import collect_garbage_rarely
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.wire import F32, I32, pack
from tests.support.serving_rig import Rig

KINDS: dict[str, dict[str, Any]] = {"whole": {}, "streamed": {"stream": True}, "session": {"model": "policy"}}
SETTLED = 50
"""Iterations of the loop after which all calls that can continue have."""


class Calls:
    """Calls of one kind, which a benchmark advances."""

    def __init__(self, rig: Rig, app: Any, tokens: int) -> None:
        self._rig, self._app, self._tokens = rig, app, tokens
        self.used_s = self.longest_s = 0.0

    async def call(self, body: bytes, key: str) -> int:
        """Return the status of one call."""
        statuses, ended = list[int](), asyncio.Event()
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not received:
                await ended.wait()
                return {"type": "http.disconnect"}
            return received.pop()

        async def send(message: dict[str, Any]) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        headers = {"host": "m", "content-type": "application/json", "authorization": f"Bearer {key}"}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("m", 80),
        }
        await self._app(scope, receive, send)
        ended.set()
        return statuses[0]

    def add_tokens(self, n: int) -> None:
        """Give each open call its next `n` tokens."""
        for waiter in list(self._rig.manager.completion_waiters._waiters.values()):  # noqa: SLF001 - plays the loop
            if (sample := waiter.sample(0)) is None or sample.finish != FINISH_NONE:
                continue
            at = sample.n_tokens
            sample.tokens += pack(range(3 + at, 3 + at + n), I32)
            sample.logprobs += pack([-0.5] * n, F32)
            sample.spans[:] = [("a", 0, sample.n_tokens)]
            if sample.n_tokens >= self._tokens:
                self._end(waiter, bytes(sample.tokens), bytes(sample.logprobs))

    def _end(self, waiter: Waiter, tokens: bytes, logprobs: bytes) -> None:
        sample = waiter.sample(0)
        assert sample is not None
        sample.finish = FINISH_LENGTH
        if waiter.request.session:
            spans = [("a", 0, self._tokens)]
            end = SampleFinished(
                sample=waiter.request.group, tokens=tokens, logprobs=logprobs, finish="length", spans=spans,
                attempts=1, group_done=True,
            )  # fmt: skip
            self._rig.manager.completion_waiters.end([Deliver("j", end)])

    async def settle(self) -> None:
        """Let all calls continue that can, and count the time."""
        manager = self._rig.manager
        began = time.thread_time()
        manager.completion_waiters.notify(manager.world, self._rig.clock)
        for _ in range(SETTLED):
            at = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - at)
        self.used_s += time.thread_time() - began


async def measure(rig: Rig, app: Any, kind: str, n_words: int, args: argparse.Namespace) -> dict[str, Any]:
    calls = Calls(rig, app, args.tokens)
    body = {"model": "j", "max_tokens": args.tokens, "messages": [{"role": "user", "content": words(n_words)}]}
    request = json.dumps({**body, **KINDS[kind]}).encode()
    keys = await open_sessions(rig, args) if kind == "session" else [TOKEN] * args.calls
    began = time.thread_time()
    tasks = [asyncio.create_task(calls.call(request, key)) for key in keys]
    waiters = rig.manager.completion_waiters._waiters  # noqa: SLF001 - see above
    while len(waiters) < len(tasks):  # noqa: ASYNC110 - the calls pass through other processes
        await asyncio.sleep(0.001)
    calls.used_s += time.thread_time() - began
    while any(waiter.sample(0) is None for waiter in waiters.values()):
        await rig.turn()
    while not all(task.done() for task in tasks):
        calls.add_tokens(args.frame)
        await calls.settle()
    assert {task.result() for task in tasks} == {200}
    await rig.turn()
    return {
        "kind": kind,
        "prompt_words": n_words,
        "ms_per_call": round(calls.used_s / args.calls * 1e3, 2),
        "longest_ms": round(calls.longest_s * 1e3, 1),
    }


async def open_sessions(rig: Rig, args: argparse.Namespace) -> list[str]:
    """Open as many sessions as there are calls; return their keys."""
    rig.groups += 1
    keys = []
    for i in range(args.calls):
        sample = SampleId(1, False, rig.groups, i, 0).pack()
        sampling = Sampling(max_tokens=args.tokens, whole_logprobs=True)
        record = SessionRecord(
            sample=sample, version=0, first=args.calls + i, stride=args.calls, max_turns=9, n_ids=9, seed=1,
            sampling=sampling,
        )  # fmt: skip
        session = SessionId("j", sample)
        await rig.bus.transact([HashSet(session.redis_key, {SESSION: record.model_dump_json()})])
        keys.append(key_of_start(session_key(TOKEN, session), "a"))
    return keys


async def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=64, help="open at once")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--frame", type=int, default=4, help="tokens that a call gets at a time")
    parser.add_argument("--words", type=int, nargs="+", default=[300, 4000], help="tokens of the prompt")
    args = parser.parse_args(arguments)
    rig, text = Rig(), TextProcesses()
    await rig.start("a")
    routes = partial(add_openai_routes, load_model_files=load_model_files, text=text)
    app = build(rig.manager, rig.bus, Settings(token=TOKEN), [routes], error_format)
    with tempfile.TemporaryDirectory() as directory:
        job = rig.manager.world.jobs["j"].record
        job.spec = job.spec.model_copy(update={"model": str(write_model(Path(directory) / "model"))})
        collect_garbage_rarely()
        await measure(rig, app, "whole", 300, args)  # what happens once is not counted
        for kind in KINDS:
            for n_words in args.words:
                print(json.dumps(await measure(rig, app, kind, n_words, args)), flush=True)
    await text.close()


if __name__ == "__main__":
    asyncio.run(main())
