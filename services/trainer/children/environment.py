"""A process that runs environments: `python -m rlboost.services.trainer.children.environment SPEC`.

SPEC is JSON: the fields of `EnvironmentSpec` or `AgentSpec`, `kind`, and `call_style` with those of `CallStyle`. An
agent is an environment with one turn (`shared.job.agent`). `child` describes the
transport. A request is a map:

- `release`: id of a conversation whose environment to discard after its call, which `stop` ends at once; such a request
  has no other key.
- `paid`: the reply to a message with this number, see below, with an `answer` and its `cost`, None without one, or
  `spent` or `failed`, which say why there is none.
- `id`: names the request in its answer. Requests of different conversations are answered in any order.
- `conversation`: None asks for the start of a conversation, with `row` and `seed`. Otherwise the id of one, with
  `turns`, those that its environment has not processed: each its text without special tokens, with them, and whether
  it begins inside of a thought.
  Without an environment for it here, `turns` has all of them, and `row` and `seed` are given, too.

Messages to the trainer are maps, too: an answer, with its `id`; `begun`, when code of a request's environment runs for
the first time; and an empty one every second. With `paid`, a number, it opens a `call` of a priced model in a
`conversation`; with `is_paid` it closes the call, by `answer` and `cost` if it was paid; with `is_lost` it says that no
code waits for the call any more (`shared.job.priced_model`).
`restart` in one asks for the end of this process, because code in it cannot be stopped; with `unknown`, it is not known
which request's.

Async code runs on one event loop, in a thread of its own. Other code runs in `environment.threads` threads, one of them
the main thread, where modules were imported: signals, and what modules created there, work in it as in any program.
Further threads read requests and watch the event loop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import itertools
import json
import math
import os
import secrets
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import msgpack

from rlboost.services.trainer.children.child import Pipe
from rlboost.services.trainer.children.reward import reward_number
from rlboost.shared.job.agent import agent_factory
from rlboost.shared.job.environment import PLAIN_RUNNER, Plain, Step, ToolUnavailable, environment_factory
from rlboost.shared.job.priced_model import BudgetSpent, Paid, PaidCall, PricedModel, spent_budget
from rlboost.shared.model.tool_calls import CallStyle
from rlboost.shared.user_code import (
    MAX_CHARS,
    MAX_REWARD,
    checked_cost,
    describe_error,
    describe_import_error,
    has_parameter,
)

_TICK_S = 0.1
_SIGN_S = 1.0
_CANCEL_S = 1.0
"""How long async code may take to end once it is cancelled, or block the event loop beyond the limit."""
MAX_ANSWER_BYTES = 16 << 20
"""Of what an environment returns at once. More text fits no context, and the trainer would hold and tokenize it."""
_LENT_THREADS = 256
"""Threads for `asyncio.to_thread`."""


def main() -> int:
    """Answer requests until the input ends."""
    pipe = Pipe()
    spec = json.loads(sys.argv[1])
    function, kind = spec["function"], spec["kind"]
    make: Callable[[], Any]
    try:
        if kind == "agent":
            make = agent_factory(function, spec["arguments"], spec["timeout_s"])
        else:
            make = environment_factory(function, spec["arguments"], CallStyle(**spec["call_style"]))
    except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
        pipe.write({"failed": describe_import_error(function, kind, error)})
        return 1
    pipe.write({"ready": True})
    threads = Threads(spec.get("threads", 1))
    host = Host(pipe.write, make, threads, spec["timeout_s"], kind)
    _start_thread(_run_loop, host.serve(pipe.read), threads)
    threads.run()
    return 0


def reset_once(make: Callable[[], Any], row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the answer to a request for the start of a conversation, in the process of a check."""
    threads, conversation = Threads(1), Conversation(None)
    host = Host(lambda _: None, make, threads, math.inf)
    answers = list[dict[str, Any]]()

    async def ask() -> None:
        _CALL.set(Call(None, conversation, math.inf, host.write))
        answers.append(await host.answer(conversation, {"conversation": None, "row": row, "seed": seed, "turns": ()}))

    _start_thread(_run_loop, ask(), threads)
    threads.run()
    return answers[0]


def _run_loop(main: Coroutine[Any, Any, None], threads: Threads) -> None:
    try:
        asyncio.run(main)
    finally:
        threads.stop()


def _start_thread(run: Callable[..., None], *arguments: Any) -> None:
    def guarded() -> None:
        try:
            run(*arguments)
        except BaseException:  # noqa: BLE001 - without this thread the process would answer nothing
            traceback.print_exc()
            os._exit(1)

    # Context variables that modules set when they were imported, such as the precision of decimals.
    threading.Thread(target=copy_context().run, args=(guarded,), daemon=True).start()


class Threads:
    """Runs code that is not async, in the order of its arrival."""

    def __init__(self, n: int) -> None:
        """Start all threads but the main one, which calls `run`."""
        self.n = n
        self.running: dict[Future[Any], Call] = {}
        self._queue: SimpleQueue[tuple[Call, Plain, Future[Any]] | None] = SimpleQueue()
        for _ in range(n - 1):
            _start_thread(self.run)

    async def call(self, call: Call, code: Plain) -> Any:
        """Return what the code returns."""
        future: Future[tuple[Any, BaseException | None]] = Future()
        call.counts = call.is_expired
        self._queue.put((call, code, future))
        try:
            result, error = await asyncio.wrap_future(future)
        finally:
            call.counts = True
        if isinstance(error, StopIteration):  # which no coroutine can raise
            raise RuntimeError(f"it raised StopIteration: {error}").with_traceback(error.__traceback__)
        if error is not None:
            raise error
        return result

    def run(self) -> None:
        """Run code until `stop`."""
        while (work := self._queue.get()) is not None:
            call, code, future = work
            if not future.set_running_or_notify_cancel():
                continue
            self.running[future] = call
            result, error = None, None
            try:
                call.begin()
                result = code()
            except BaseException as raised:  # noqa: BLE001 - the user's code may raise anything, or exit
                error = raised
            del self.running[future]
            future.set_result((result, error))
        self.stop()

    def stop(self) -> None:
        """End the threads that wait for code."""
        self._queue.put(None)


class LentThreads(ThreadPoolExecutor):
    """Runs what async code of environments passes to `asyncio.to_thread`."""

    def __init__(self) -> None:
        """Start threads when they are needed."""
        super().__init__(_LENT_THREADS)
        self.running: dict[Future[Any], Call | None] = {}

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """See `Executor.submit`."""
        future = super().submit(function, *arguments, **named)
        self.running[future] = _CALL.get(None)
        future.add_done_callback(lambda done: self.running.pop(done, None))
        return future


class ReleasedError(Exception):
    """A conversation was released before its call began."""


@dataclass(eq=False)
class Conversation:
    """A conversation and its environment."""

    key: int | None
    """None: only its start is asked for."""
    environment: Any = None
    row: dict[str, Any] = field(default_factory=dict)
    is_released: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the call that runs."""
    n_paid: Counter[str] = field(default_factory=Counter)
    """Request to a priced model -> how often the environment has made it."""
    cost: float = 0.0
    """Of the priced calls since a turn began."""


@dataclass(eq=False)
class Call:
    """A request that is being answered, or the end of an environment, which has no id."""

    id: int | None
    conversation: Conversation
    left_s: float
    """Time that is left until its limit. It passes while code of the call runs or awaits something, but not while that
    waits for a thread or while code of other calls blocks the event loop."""
    write: Callable[[dict[str, Any]], None]
    """Sends a message to the trainer."""
    counts: bool = False
    """Whether time passes."""
    has_begun: bool = False
    is_expired: bool = False
    is_stopped: bool = False
    """Whether its conversation was released in its midst."""
    is_over: bool = False
    """Whether it has its answer."""
    task: asyncio.Task[dict[str, Any]] | None = None

    def begin(self) -> None:
        """Report the first code that runs, for which the time limit holds."""
        self.counts = True
        if self.has_begun or self.id is None:
            return
        if self.conversation.is_released:
            raise ReleasedError
        self.has_begun = True
        self.write({"id": self.id, "begun": True})


_CALL: ContextVar[Call] = ContextVar("call")


class RecordedCalls:
    """`PaidCalls` that the trainer records with the conversation whose code makes them."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        """Send messages to the trainer with `write`."""
        self._write = write
        # No number of an earlier process: a reply to it may still come.
        self._numbers = itertools.count(secrets.randbits(48))
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def key_of(self, request: str) -> str:
        n_paid = self._conversation().n_paid
        n_paid[request] += 1
        return f"{request}.{n_paid[request]}"

    async def open(self, call: PaidCall) -> Paid | None:
        conversation = self._conversation()
        asking = asyncio.create_task(self._ask(conversation, call, {}), name="open-paid-call")
        try:
            reply = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda asked: self._abandoned(conversation, call, asked))
            raise
        if reply["answer"] is None:
            return None
        conversation.cost += reply["cost"]
        return Paid(reply["answer"], reply["cost"])

    async def close(self, call: PaidCall, paid: Paid | None) -> None:
        conversation = self._conversation()
        await self._ask(conversation, call, (paid or Paid("", 0.0))._asdict() | {"is_paid": paid is not None})
        conversation.cost += 0.0 if paid is None else paid.cost

    def lose(self, call: PaidCall) -> None:
        self._send(self._conversation(), call, {"is_lost": True})

    def _abandoned(self, conversation: Conversation, call: PaidCall, asked: asyncio.Task[dict[str, Any]]) -> None:
        """Close a call that was opened after its code had stopped waiting for it."""
        if not asked.cancelled() and asked.exception() is None and asked.result()["answer"] is None:
            self._send(conversation, call, Paid("", 0.0)._asdict() | {"is_paid": False})

    def take(self, reply: dict[str, Any]) -> None:
        """Pass a reply of the trainer to the code that waits for it."""
        if (waiting := self._replies.pop(reply["paid"], None)) is not None and not waiting.done():
            waiting.set_result(reply)

    def _conversation(self) -> Conversation:
        call = _CALL.get(None)
        if call is None or call.conversation.key is None:
            raise RuntimeError("call a PricedModel in step, or in what it calls, as async code, so that it is recorded")
        return call.conversation

    def _send(self, conversation: Conversation, call: PaidCall, end: dict[str, Any]) -> int:
        number = next(self._numbers)
        self._write({"paid": number, "conversation": conversation.key, "call": list(call), **end})
        return number

    async def _ask(self, conversation: Conversation, call: PaidCall, end: dict[str, Any]) -> dict[str, Any]:
        reply = self._replies[self._send(conversation, call, end)] = asyncio.get_running_loop().create_future()
        found: dict[str, Any] = await reply
        if found.get("spent"):
            raise BudgetSpent(found["spent"])
        if found.get("failed"):
            raise ToolUnavailable(found["failed"])
        return found


class Host:
    """The environments of this process's conversations."""

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        make: Callable[[], Any],
        threads: Threads,
        timeout_s: float,
        kind: str = "environment",
    ) -> None:
        """Send messages to the trainer with `write`; see `serve`. The log calls the user's code by its `kind`."""
        self.write = write
        self._kind = kind
        self._make = make
        self._threads = threads
        self._lent_threads = LentThreads()
        self._paid_calls = PricedModel.calls = RecordedCalls(write)
        self._timeout_s = timeout_s
        self._tick_s = min(_TICK_S, timeout_s / 10)
        self._n_ticks = 0
        self._conversations: dict[int, Conversation] = {}
        self._calls: set[Call] = set()
        self._unstoppable: set[Call] = set()
        """Calls whose async code continues although it was cancelled."""
        self._input_ended = asyncio.Event()

    async def serve(self, read: Callable[[], dict[str, Any] | None]) -> None:
        """Answer the requests that `read` returns, until None; then close all environments."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(self._lent_threads)
        PLAIN_RUNNER.set(lambda code: self._threads.call(_CALL.get(), code))
        _start_thread(self._read, read)
        _start_thread(self._watch)
        ticking = asyncio.create_task(self._tick(), name="time-limits")
        await self._input_ended.wait()
        for call in self._calls:
            if call.task is not None and call.id is not None:
                call.task.cancel()
        for conversation in list(self._conversations):
            self._release(conversation)
        while tasks := [call.task for call in self._calls if call.task is not None]:
            await asyncio.wait(tasks, timeout=self._tick_s)
        ticking.cancel()

    def _read(self, read: Callable[[], dict[str, Any] | None]) -> None:
        while (request := read()) is not None:
            self._loop.call_soon_threadsafe(self._accept, request)
        self._loop.call_soon_threadsafe(self._input_ended.set)

    # --- requests ---

    def _accept(self, request: dict[str, Any]) -> None:
        if "release" in request:
            self._release(request["release"], stop=request.get("stop", False))
            return
        if "paid" in request:
            self._paid_calls.take(request)
            return
        key = request["conversation"]
        conversation = Conversation(key)
        if key is not None:
            conversation = self._conversations.setdefault(key, conversation)
        self._start(request["id"], conversation, len(request["turns"]), lambda: self.answer(conversation, request))

    def _start(self, number: int | None, conversation: Conversation, n_turns: int, work: Callable[[], Any]) -> None:
        call = Call(number, conversation, self._timeout_s * max(1, n_turns), self.write)

        async def run() -> dict[str, Any]:
            _CALL.set(call)
            async with conversation.lock:
                answer: dict[str, Any] = await work()
            return answer

        call.task = self._loop.create_task(run())
        self._calls.add(call)
        call.task.add_done_callback(lambda task: self._finish(call, task))

    def _release(self, key: int, *, stop: bool = False) -> None:
        if (conversation := self._conversations.pop(key, None)) is not None:
            conversation.is_released = True
            for call in [one for one in self._calls if stop and one.conversation is conversation]:
                call.is_stopped = True
                if call.task is not None:
                    call.task.cancel()
            self._start(None, conversation, 1, lambda: self._close(conversation))

    async def answer(self, conversation: Conversation, request: dict[str, Any]) -> dict[str, Any]:
        """Return the serializable answer to a request."""
        key = request["conversation"]
        try:
            answer = await (self._reset if key is None else self._step)(conversation, request)
            _check_sendable(answer)
        except ReleasedError:
            return {"released": True}
        except BaseException as error:  # the user's environment may raise anything, or exit
            if _CALL.get().is_expired or _CALL.get().is_stopped or self._input_ended.is_set():
                raise
            last = {"text": request["turns"][-1][0]} if request["turns"] else {}
            answer = {"raised": describe_error(error, {**conversation.row, **last})}
            if (spent := spent_budget(error)) is not None:
                answer["spent"] = str(spent)
            self._forget(conversation)
            await self._close(conversation)
        return answer

    async def _reset(self, conversation: Conversation, request: dict[str, Any]) -> dict[str, Any]:
        """Return the start of a conversation. Its own environment is created with its first turn."""
        prompt = await self._begin(conversation, request)
        tools = list(getattr(conversation.environment, "tools", None) or ())
        await self._close(conversation)
        return {"prompt": None if prompt is None else _checked_message(prompt, "reset"), "tools": tools}

    async def _begin(self, conversation: Conversation, request: dict[str, Any]) -> Any:
        conversation.row, conversation.n_paid = request["row"], Counter()
        conversation.environment = await self._run(self._make)
        return await self._run(conversation.environment.reset, request["row"], request["seed"])

    async def _step(self, conversation: Conversation, request: dict[str, Any]) -> dict[str, Any]:
        """Return the environment's result for each text."""
        if "row" in request:
            await self._begin(conversation, request)
        environment = conversation.environment
        pass_raw = has_parameter(environment.step, "text_raw")
        results = []
        for text, raw, in_thought in request["turns"]:
            if hasattr(environment, "in_thought"):
                environment.in_thought = in_thought
            named, conversation.cost = {"text_raw": raw} if pass_raw else {}, 0.0
            step = await self._run(environment.step, text, **named)
            results.append(_step_result(step, conversation.cost))
        return {"results": results}

    async def _close(self, conversation: Conversation) -> dict[str, Any]:
        """Close a conversation's environment; print an error of it."""
        environment, conversation.environment = conversation.environment, None
        if hasattr(environment, "close"):
            try:
                await self._run(environment.close)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's environment may raise anything
                print(f"{self._kind}.close: {type(error).__name__}: {error}", file=sys.stderr)
        return {}

    async def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        call = _CALL.get()
        if inspect.iscoroutinefunction(function):
            call.begin()
            return await function(*arguments, **named)
        result = await self._threads.call(call, lambda: function(*arguments, **named))
        return await result if inspect.isawaitable(result) else result

    def _forget(self, conversation: Conversation) -> None:
        if conversation.key is not None and self._conversations.get(conversation.key) is conversation:
            del self._conversations[conversation.key]

    # --- time limits ---

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._tick_s)
            passed_s = min(time.monotonic() - before, 2 * self._tick_s)
            self._n_ticks += 1
            for call in [one for one in self._calls if one.counts]:
                call.left_s -= passed_s
                if call.left_s <= 0 and not call.is_expired and call.task is not None:
                    call.is_expired = True
                    call.task.cancel()
                elif call.left_s <= -_CANCEL_S:
                    self._calls.discard(call)
                    self._unstoppable.add(call)
                    self._expire(call, "its code continues although it was cancelled")

    def _finish(self, call: Call, task: asyncio.Task[dict[str, Any]]) -> None:
        self._calls.discard(call)
        self._unstoppable.discard(call)
        if call.is_over:
            return
        if call.is_expired:
            try:
                task.result()
            except BaseException:  # noqa: BLE001 - its own error, or that it was cancelled
                self._expire(call, traceback.format_exc())
            else:
                self._expire(call, "")
        elif task.cancelled() and call.is_stopped:
            call.is_over = True
            self.write({"id": call.id, "released": True})
        elif not task.cancelled():
            call.is_over = True
            self.write({"id": call.id, **task.result()})

    def _expire(self, call: Call, where: str) -> None:
        """Answer a call that exceeds its limit, and discard its environment."""
        call.is_over = True
        print(f"{self._kind}: no answer within the time limit\n{where}", file=sys.stderr)
        self._forget(call.conversation)
        stuck = [one for one in list(self._threads.running.values()) if one.is_over]
        n_lent = sum(one is not None and one.is_over for one in list(self._lent_threads.running.values()))
        if call in stuck:
            faulthandler.dump_traceback()
        elif call not in self._unstoppable:
            self._start(None, call.conversation, 1, lambda: self._close(call.conversation))
        # A thread that is stuck may end later; code that expects to be alone must not run until then.
        restart = 2 * (len(stuck) + len(self._unstoppable)) > self._threads.n or 2 * n_lent > _LENT_THREADS
        self.write({"id": call.id, "timeout": True, "restart": restart})

    def _watch(self) -> None:
        """Write signs of life; report code that blocks the event loop for longer than the limit."""
        seen: tuple[asyncio.Task[Any] | None, int] | None = None
        blocked_s, unwritten_s = 0.0, _SIGN_S
        while True:
            before = time.monotonic()
            time.sleep(self._tick_s)
            passed_s = min(time.monotonic() - before, 2 * self._tick_s)
            unwritten_s += passed_s
            if unwritten_s >= _SIGN_S:
                unwritten_s = 0.0
                self.write({})
            now = asyncio.current_task(self._loop), self._n_ticks
            if now != seen:
                seen, blocked_s = now, 0.0
                continue
            blocked_s += passed_s
            call = next((one for one in list(self._calls) if one.task is now[0]), None)
            if call is not None:  # its own code, whose time `_tick` does not count
                call.left_s -= passed_s
            if blocked_s > self._timeout_s + _CANCEL_S:
                break
        faulthandler.dump_traceback()
        report = {"restart": True, "unknown": call is None}
        self.write(report if call is None else {**report, "id": call.id, "timeout": True})


def _step_result(step: object, paid: float) -> list[Any]:
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}, not rlboost.environments.Step")
    reward = reward_number(step.reward)
    if reward is None or not abs(reward) <= MAX_REWARD:
        raise ValueError(
            f"step returned the reward {step.reward}: return a finite number, at most {MAX_REWARD:g}; 0 for none"
        )
    done: object = step.done
    if isinstance(done, str):
        raise TypeError(f"step returned done={done!r}, which is text: return True or False")
    observation, warning = _checked_message(step.observation, "step"), str(step.warning)[:MAX_CHARS]
    return [observation, reward, bool(step.done), warning, checked_cost(step.cost) + paid]


def _check_sendable(answer: dict[str, Any]) -> None:
    try:
        packed: bytes = msgpack.packb(answer)
        msgpack.unpackb(packed)  # unpacking rejects some values that can be packed
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the environment returned a value that cannot be sent, use text and JSON values: {error}"
        ) from error
    if len(packed) > MAX_ANSWER_BYTES:
        raise ValueError(
            f"the environment returned {len(packed)} bytes, more than {MAX_ANSWER_BYTES}: return less text"
        )


def _checked_message(value: object, who: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value):
        return value
    raise TypeError(f"{who} returned {type(value).__name__}: return text or a list of chat messages with a role")


if __name__ == "__main__":
    sys.exit(main())
