"""Runs the user's environments, or agents, in a pool of processes.

A conversation stays in one process, which holds its environment and serves many conversations at the same time. If a
process ends, `domain.admission` decides which calls are repeated, and which one failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rlboost.services.trainer.adapters.tokens import PromptTokenizer
from rlboost.services.trainer.adapters.user_code import (
    BROKEN,
    IMPORT_LIMIT_S,
    UserCodeFault,
    UserCodeLog,
    UserCodeProcess,
    UserProgram,
    start_all,
)
from rlboost.services.trainer.domain.admission import Admission
from rlboost.services.trainer.ports.samples import CallRecord, EnvironmentFault, ResetResult, StepResult
from rlboost.shared.data.messages import TEMPLATE_KWARGS, TOOLS, Tools, template_kwargs_of, tools_of
from rlboost.shared.errors import ConfigError, RLBoostError
from rlboost.shared.job.environment import Message
from rlboost.shared.job.priced_model import BudgetSpent, Paid, PaidCall
from rlboost.shared.job.reward import AgentSpec, EnvironmentSpec
from rlboost.shared.model.tool_calls import HERMES, CallStyle
from rlboost.shared.process.waiting import Waits

# --- Formats prompts and observations of environments as token ids. The model's own tokens stay as they are -----------


class TokenizerChatFormatter:
    """`ChatFormatter` with a tokenizer of transformers."""

    def __init__(self, tokens: PromptTokenizer) -> None:
        self._tokens = tokens
        self.max_length = tokens.max_length

    def format_prompt(
        self, prompt: Message, tools: Sequence[dict[str, Any]], columns: Mapping[str, Any] | None = None
    ) -> list[int]:
        with _faults():
            if isinstance(prompt, str) and self._tokens.template_kwargs:
                raise ConfigError(
                    "the environment's prompt is text, which no chat template renders: return chat messages, or remove "
                    "data.chat_template_kwargs"
                )
            return self._tokens.prompt(prompt, *_options(tools, columns or {}))

    def format_observation(
        self,
        prompt: Message,
        last: int,
        observation: Message,
        tools: Sequence[dict[str, Any]],
        columns: Mapping[str, Any] | None = None,
    ) -> list[int]:
        with _faults():
            if not isinstance(prompt, str):
                messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
                return self._tokens.observation(prompt, last, messages, *_options(tools, columns or {}))
            if not isinstance(observation, str):
                raise ConfigError("step returned messages, but the prompt is text: return text")
            return self._tokens.text_observation(last, observation)


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise EnvironmentFault("unformattable", str(error)) from error


def _options(tools: Tools, columns: Mapping[str, Any]) -> tuple[Tools, dict[str, Any]]:
    """Return the tools and the arguments of the chat template for a row.

    Raises:
        ConfigError: row and environment have different tools.

    """
    of_row = tools_of(columns.get(TOOLS))
    if tools and of_row and list(tools) != list(of_row):
        raise ConfigError("the row's column 'tools' differs from the environment's tools: remove the column")
    return tools or of_row, template_kwargs_of(columns.get(TEMPLATE_KWARGS))


# --- The pool of processes --------------------------------------------------------------------------------------------


_Turn = tuple[str, str, bool]
"""The text of a turn without special tokens, with them, and whether it begins inside of a thought."""

_CLOSE_LIMIT_S = 5.0
"""How long a process may take to close its environments."""
_SILENCE_S = 5.0
"""How much longer than `environment.timeout_s` a process may give no sign of life, which it does every second."""
_MAX_FRUITLESS = 10
"""More than the search for one call of 65,536 needs (`domain.admission`)."""


class EnvironmentPool:
    """`Environments` over `environment.workers` processes, or those of an agent."""

    def __init__(
        self, spec: EnvironmentSpec | AgentSpec, waits: Waits, log: UserCodeLog | None = None, style: CallStyle = HERMES
    ) -> None:
        """Start no process yet: see `start`. Their output goes to `log`; the model writes tool calls in `style`."""
        self._waits = waits
        self._what = "the agent" if isinstance(spec, AgentSpec) else "the environment"
        self._log = log
        self._hosts = [_Host(spec, log, style) for _ in range(spec.workers)]
        self._host_of: dict[int, _Host] = {}
        """Conversation -> its process."""

    async def start(self) -> None:
        await start_all((host.process for host in self._hosts), self._waits, self._what)

    def record_calls(self, record: CallRecord) -> None:
        for host in self._hosts:
            host.record = record

    async def reset(self, row: dict[str, Any], seed: int) -> ResetResult:
        host = min(self._hosts, key=lambda host: host.n_calls)
        answer = await host.call(None, row, seed, ())
        return ResetResult(answer["prompt"], answer["tools"])

    async def step(
        self,
        conversation: int,
        row: dict[str, Any],
        seed: int,
        texts: Sequence[str],
        texts_raw: Sequence[str] | None = None,
        in_thought: Sequence[bool] | None = None,
    ) -> list[StepResult]:
        """See `Environments.step`. The time limit starts when code of the conversation's environment runs."""
        host = self._host_of.get(conversation)
        if host is None:
            host = self._host_of[conversation] = min(self._hosts, key=lambda host: len(host.conversations))
            host.conversations.add(conversation)
        raw, thoughts = texts_raw or texts, in_thought or [False] * len(texts)
        turns = list(zip(texts, raw, thoughts, strict=True))
        answer = await host.call(conversation, row, seed, turns)
        return [StepResult(*result) for result in answer["results"]]

    def release(self, conversation: int) -> None:
        if (host := self._host_of.pop(conversation, None)) is not None:
            host.release(conversation)

    def stop(self, conversation: int) -> None:
        if (host := self._host_of.pop(conversation, None)) is not None:
            host.release(conversation, stop=True)

    async def close(self) -> None:
        async with self._waits.on(self._what, because="what is open closes", limit_s=_CLOSE_LIMIT_S + 5):
            await asyncio.gather(*(host.close() for host in self._hosts))
        if self._log is not None:
            self._log.close()


class _Host:
    """One process and its conversations."""

    def __init__(self, spec: EnvironmentSpec | AgentSpec, log: UserCodeLog | None, style: CallStyle) -> None:
        kind = "agent" if isinstance(spec, AgentSpec) else "environment"
        program = UserProgram(
            "rlboost.services.trainer.children.environment",
            json.dumps({**spec.model_dump(mode="json"), "kind": kind, "call_style": asdict(style)}),
            f"{kind}.function",
            spec.function or "",
            # The class of an agent may load data.
            IMPORT_LIMIT_S + (spec.timeout_s if kind == "agent" else 0),
        )
        self.process = UserCodeProcess(program, log)
        self.conversations: set[int] = set()
        """Conversations assigned to this process."""
        self._limit_s = spec.timeout_s
        self._n_processed: dict[int, int] = {}
        """Conversation whose environment is in the process -> turns that the environment has processed."""
        self._ids = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._admission = Admission(spec.concurrency)
        self._lock = asyncio.Lock()
        """Held while the process starts."""
        self._reader: asyncio.Task[None] | None = None
        """Reads what the process writes, until it has ended."""
        self._n_fruitless = 0
        """How often in a row the process ended without an answer."""
        self._is_cancelled = False
        """Whether the process is killed because a caller was cancelled."""
        self.record: CallRecord | None = None
        self._recording: dict[asyncio.Task[None], bool] = {}
        """What opens (True) or closes a paid call."""
        self._paid_calls: set[tuple[int, PaidCall]] = set()
        """Open calls of the process, with their conversations."""

    @property
    def n_calls(self) -> int:
        """Return the number of calls that wait or run."""
        return len(self._calls)

    def release(self, conversation: int, *, stop: bool = False) -> None:
        """Discard a conversation's environment, after the call that runs, or stop that."""
        self.conversations.discard(conversation)
        self._n_processed.pop(conversation, None)
        self.process.send(self.process.pack({"release": conversation, "stop": stop}))

    async def close(self) -> None:
        """Close the environments and stop the process."""
        await self.process.kill(_CLOSE_LIMIT_S)
        for task in self._recording:
            task.cancel()
        if self._reader is not None:
            await self._reader

    async def call(
        self, conversation: int | None, row: dict[str, Any], seed: int, turns: Sequence[_Turn]
    ) -> dict[str, Any]:
        """Call the process: `reset` without a conversation, else `step`.

        Raises:
            EnvironmentFault: the environment failed, or the conversation was released before the call started.

        """
        number, call = next(self._ids), _Call(conversation, row, seed, turns)
        self._calls[number] = call
        self._admission.enter(number)
        self._admit()
        try:
            while True:
                await call.admitted
                async with self._lock:
                    if not call.admitted.done():  # the process ended in the meantime
                        continue
                    await self._run_process()
                    self._send(number, call)
                if (answer := await call.answer) is not None:
                    return self._checked(call, answer)
        except UserCodeFault as fault:
            raise EnvironmentFault(fault.reason, fault.detail) from fault
        except asyncio.CancelledError:
            if call.is_sent:  # calls of a job are cancelled together, and their code may hang
                self._is_cancelled = True
                await self.process.kill()
            raise
        finally:
            del self._calls[number]
            self._admission.leave(number)
            self._admit()

    def _admit(self) -> None:
        for number in self._admission.admit():
            if (call := self._calls.get(number)) is not None and not call.admitted.done():
                call.admitted.set_result(None)

    async def _run_process(self) -> None:
        """Start the process if it has ended, and the task that reads its messages."""
        if self._reader is not None and not self.process.is_running:
            await asyncio.shield(self._reader)  # it looks after the calls of the ended process
        if self._reader is None or self._reader.done():
            await self.process.restart_if_ended()
            self._n_processed.clear()
            self._is_cancelled = False
            self._reader = asyncio.create_task(self._read(), name="environment-answers")

    def _send(self, number: int, call: _Call) -> None:
        conversation = call.conversation
        if conversation is not None and conversation not in self.conversations:
            raise EnvironmentFault("released", "its conversation was released before the call started")
        n_processed = None if conversation is None else self._n_processed.get(conversation)
        unprocessed = list(call.turns[n_processed or 0 :])
        request: dict[str, Any] = {"id": number, "conversation": conversation, "turns": unprocessed}
        if n_processed is None:
            request |= {"row": call.row, "seed": call.seed}
        packed = self.process.pack(request)
        if conversation is not None:  # until the call succeeds: after a fault the environment is created again
            self._n_processed.pop(conversation, None)
        call.is_sent, call.limit_s = True, self._limit_s * max(1, len(unprocessed))
        self.process.send(packed)

    def _checked(self, call: _Call, answer: dict[str, Any]) -> dict[str, Any]:
        if "spent" in answer:
            raise UserCodeFault("budget", str(answer["spent"]))
        if "raised" in answer:
            raise self.process.raised(answer)
        if "released" in answer:
            raise EnvironmentFault("released", "its conversation was released before the call started")
        if "timeout" in answer:
            killed = "; its process was killed" if answer["restart"] else ""
            raise UserCodeFault("timeout", f"no answer within {call.limit_s:g} s{killed}{self.process.where()}")
        return answer

    async def _read(self) -> None:
        reason, detail, blames = "crashed", "", True
        try:
            while True:
                message = await self._receive()
                self._take(message)
                if message.get("restart"):
                    blames = message.get("unknown", False)
                    reason, detail = "timeout", f"it blocked its process for longer than {self._limit_s:g} s"
                    await self.process.kill()
                    return
        except TimeoutError:
            try:
                where = await self.process.write_stack()
            finally:
                await self.process.kill()
            limit_s = self._limit_s + _SILENCE_S
            reason, detail = "timeout", f"it blocked its process for {limit_s:g} s; the process was killed{where}"
        except BROKEN as error:
            detail = await self.process.describe_end(error)
        finally:
            self._ended(UserCodeFault(reason, detail), blames=blames and not self._is_cancelled)

    async def _receive(self) -> dict[str, Any]:
        # In two halves: after a pause of this process, the first may be over although there is a message.
        half_s = (self._limit_s + _SILENCE_S) / 2
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(half_s):
                return await self.process.receive()
        async with asyncio.timeout(half_s):
            return await self.process.receive()

    async def _pay(self, message: dict[str, Any]) -> None:
        """Open or close a paid call, and reply to its process."""
        reply: dict[str, Any] = {"paid": message["paid"], "answer": None}
        try:
            assert self.record is not None, "set before the first step"
            conversation, call = message["conversation"], PaidCall(*message["call"])
            if "is_paid" in message:
                paid = Paid(message["answer"], message["cost"]) if message["is_paid"] else None
                self._paid_calls.discard((conversation, call))
                await self.record.close(conversation, call, paid)
            elif "is_lost" in message:
                self._paid_calls.discard((conversation, call))
                self.record.lose(conversation, call)
            elif (found := await self.record.open(conversation, call)) is not None:
                reply |= found._asdict()
            else:
                self._paid_calls.add((conversation, call))
        except BudgetSpent as error:
            reply["spent"] = str(error)
        except RLBoostError as error:
            reply["failed"] = f"a paid call cannot be recorded: {error}"
        self.process.send(self.process.pack(reply))

    def _take(self, message: dict[str, Any]) -> None:
        if "paid" in message:
            task = asyncio.create_task(self._pay(message), name="paid-call")
            self._recording[task] = not {"is_paid", "is_lost"} & message.keys()
            task.add_done_callback(self._recording.pop)
            return
        call = self._calls.get(message.get("id", -1))
        if call is None or call.answer.done():
            return
        if "begun" in message:
            call.has_begun = True
            return
        self._n_fruitless = 0
        if "results" in message and call.conversation in self.conversations:
            self._n_processed[call.conversation] = len(call.turns)
        call.answer.set_result(message)

    def _ended(self, fault: UserCodeFault, *, blames: bool) -> None:
        """Let the calls of the ended process fail or be repeated."""
        self._n_processed.clear()
        for task in [task for task, opens in self._recording.items() if opens]:
            task.cancel()
        for conversation, paid_call in self._paid_calls:
            if self.record is not None:
                self.record.lose(conversation, paid_call)
        self._paid_calls.clear()
        open_calls = {number: call for number, call in self._calls.items() if not call.answer.done()}
        begun = [number for number, call in open_calls.items() if call.has_begun]
        culprit = self._admission.process_ended(begun, blames=blames)
        self._n_fruitless = 0 if culprit is not None else self._n_fruitless + 1
        for number, call in open_calls.items():
            if number == culprit or (call.is_sent and self._n_fruitless > _MAX_FRUITLESS):
                call.answer.set_exception(fault)
            elif call.admitted.done():
                call.repeat()
        self._admit()


class _Call:
    """A call that waits or runs."""

    def __init__(self, conversation: int | None, row: dict[str, Any], seed: int, turns: Sequence[_Turn]) -> None:
        self.conversation = conversation
        self.row = row
        self.seed = seed
        self.turns = turns
        self.limit_s = 0.0
        self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self.admitted: asyncio.Future[None] = loop.create_future()
        """Done when the call may run."""
        self.answer: asyncio.Future[dict[str, Any] | None] = loop.create_future()
        """What the process answered; None if the call must be repeated."""
        self.is_sent = False
        self.has_begun = False
        """Whether code of its environment runs or has run."""

    def repeat(self) -> None:
        """Wait to be admitted again."""
        lost = self.answer
        self._wait()
        lost.set_result(None)
