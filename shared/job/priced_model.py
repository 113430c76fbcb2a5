"""A model of another server that environments and agents call for a price, within a budget of the job.

Users import `PricedModel` from `rlboost.environments`. In a process of a job, the trainer records each call: what it
may cost before it is sent, and its answer and cost before they are used. Code that runs again, after its process or the
trainer has died, makes the same calls and gets the recorded answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from rlboost.shared.errors import ConfigError, leaves
from rlboost.shared.job.environment import ToolUnavailable
from rlboost.shared.secrets import bearer

if TYPE_CHECKING:  # most environments need no HTTP client
    import httpx

Messages = str | Sequence[Mapping[str, Any]]
"""Chat messages, or the text of one of a user."""
_PER_MILLION = 1e-6
_MESSAGE_TOKENS = 16
"""More than the tokens that a chat template adds to a message."""
_BUSY = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_REFUSED = frozenset({400, 413, 422})
"""Statuses that say that the question is at fault."""
_DENIED = frozenset({401, 403, 404})
"""Statuses that say that the server answers no question."""
_SHOWN_CHARS = 300
_LOOK_EVERY_S = 0.05


class BudgetSpent(ToolUnavailable):
    """The next call may cost more than what is left; unless the environment or agent handles this, the job fails."""


def spent_budget(error: BaseException) -> BudgetSpent | None:
    """Return the spent budget that code ended with, perhaps in a group of exceptions; None if it is another error."""
    return next((leaf for leaf in leaves(error) if isinstance(leaf, BudgetSpent)), None)


class _Denied(ToolUnavailable):
    """The server refuses all questions, and takes nothing for it."""


class PaidCall(NamedTuple):
    """A call that is about to be sent."""

    key: str
    """Names it within its conversation."""
    name: str
    """Of the budget."""
    budget: float
    most: float
    """The most that it may cost."""


class Paid(NamedTuple):
    """A call that was answered."""

    answer: str
    cost: float


class PaidCalls(Protocol):
    """The record of a conversation's calls."""

    def key_of(self, request: str) -> str:
        """Return the key of the next call with this digest of a request: two questions alike are two calls."""

    async def open(self, call: PaidCall) -> Paid | None:
        """Return a call's recorded answer; without one, record that it is sent, once the budget has room for it.

        Raises:
            BudgetSpent: the budget has no room.

        """

    async def close(self, call: PaidCall, paid: Paid | None) -> None:
        """Record the answer of an open call; None: it was refused and cost nothing."""

    def lose(self, call: PaidCall) -> None:
        """Count an open call as the most that it may cost: no code waits for its answer any more."""


class Ledger:
    """What calls have cost and may still cost; one whose end is unknown counts as the most that it may cost."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        """Budget -> cost of the answered calls."""
        self.open: dict[str, tuple[str, float]] = {}
        """Key of a call without a known end -> its budget, and the most that it may cost."""
        self._in_flight: set[str] = set()
        """Those of them whose code waits for the answer; the others are lost, and count as spent."""

    def begin(self, key: str, call: PaidCall) -> None:
        """Note a call that is about to be sent."""
        self.open[key] = call.name, call.most
        self._in_flight.add(key)

    def lose(self, key: str) -> None:
        """Note that no code waits for a call any more."""
        self._in_flight.discard(key)

    def cancel(self, key: str) -> None:
        """Forget a call that cost nothing."""
        self.open.pop(key, None)
        self._in_flight.discard(key)

    def has_room(self, key: str, call: PaidCall) -> bool:
        """Return True if a call fits into its budget next to those in flight; False if it has to wait for these.

        Raises:
            BudgetSpent: it does not fit, whatever these cost.

        """
        others = {one: most for one, (name, most) in self.open.items() if name == call.name and one != key}
        in_flight = math.fsum(most for one, most in others.items() if one in self._in_flight)
        lost = math.fsum(most for one, most in others.items() if one not in self._in_flight)
        spent = self.spent.get(call.name, 0.0) + lost
        if spent + call.most > call.budget:
            raise BudgetSpent(
                f"the budget of {call.name} is spent: {spent:.6g} of {call.budget:g}, and the next call may cost "
                f"{call.most:.6g}: raise its budget, or lower its max_tokens"
            )
        return spent + in_flight + call.most <= call.budget

    def close(self, key: str, name: str, cost: float) -> None:
        """Count an answered call, once."""
        self.cancel(key)
        self.spent[name] = self.spent.get(name, 0.0) + cost


class _Unrecorded:
    """The calls of a process without a job: its budgets are of the process, and nothing is repeated."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._numbers = itertools.count()

    def key_of(self, request: str) -> str:
        return f"{request}.{next(self._numbers)}"

    async def open(self, call: PaidCall) -> Paid | None:
        # Those in flight end within `timeout_s`.
        while not self._ledger.has_room(call.key, call):  # noqa: ASYNC110 - no event is of all event loops
            await asyncio.sleep(_LOOK_EVERY_S)
        self._ledger.begin(call.key, call)
        return None

    async def close(self, call: PaidCall, paid: Paid | None) -> None:
        self._ledger.close(call.key, call.name, 0.0 if paid is None else paid.cost)

    def lose(self, call: PaidCall) -> None:
        self._ledger.lose(call.key)


@dataclass(frozen=True, kw_only=True)
class PricedModel:
    """An OpenAI-compatible chat model with prices: `await model(messages)` returns its answer's text.

    In a job, the cost of a call is added to that of the environment's step, or of the agent's session.
    """

    url: str
    """Up to and with `/v1`."""
    model: str
    input_price: float
    """For a million tokens of a question."""
    output_price: float
    """For a million tokens of an answer."""
    budget: float
    """What all calls of a job with this `name` may cost."""
    max_tokens: int = 1024
    """Of an answer."""
    timeout_s: float = 20.0
    """For one call with its retries: broken connections, and status 408, 409, 429 and 5xx."""
    api_key_variable: str = ""
    """The variable of the trainer's environment that has the key; empty for none."""
    name: str = ""
    """Of the budget, by default `model`."""
    calls: ClassVar[PaidCalls] = _Unrecorded()
    """The record, which the process of a job sets."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ConfigError: one of them is unusable; the text says which.

        """
        for field in ("input_price", "output_price", "budget", "max_tokens", "timeout_s"):
            value, is_price = getattr(self, field), field.endswith("price")
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0 or not (value or is_price):
                least = "0 or more" if is_price else "above 0"
                raise ConfigError(f"PricedModel: {field} is {value!r}: give a finite number, {least}")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"PricedModel: url is {self.url!r}, not of the form https://host/v1")
        if self.url.rstrip("/").endswith("/completions"):
            raise ConfigError(f"PricedModel: url is {self.url!r}: give it up to /v1, without the route")
        if not self.model:
            raise ConfigError("PricedModel: model is empty: give the name that the server knows it by")
        if self.api_key_variable and not os.environ.get(self.api_key_variable):
            raise ConfigError(f"PricedModel: {self.api_key_variable} is not set: set it where the trainer runs")

    async def __call__(self, messages: Messages) -> str:
        """Return the answer to a question.

        Raises:
            BudgetSpent: the budget has no room for it.
            ToolUnavailable: the server does not answer, or not as OpenAI's API does.
            TypeError: the content of a message is not text.
            ValueError: the server refused the question.

        """
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if not all(isinstance(message.get("content") or "", str) for message in asked):
            raise TypeError("PricedModel: a content is no text: what an image or a file costs at most is not known")
        body = json.dumps({"model": self.model, "messages": asked, "max_tokens": self.max_tokens}).encode()
        # No tokenizer makes more tokens than a text has bytes.
        most = self._cost(len(body) + _MESSAGE_TOKENS * len(asked), self.max_tokens)
        request = blake2b(self.url.encode() + body, digest_size=16).hexdigest()
        call = PaidCall(self.calls.key_of(request), self.name or self.model, float(self.budget), most)
        paid = await self.calls.open(call)
        if paid is None:
            try:
                paid = await self._ask(body)
            except (ValueError, _Denied):
                await self.calls.close(call, None)
                raise
            except BaseException:  # it may have been paid
                self.calls.lose(call)
                raise
            await self.calls.close(call, paid)
        return paid.answer

    def _cost(self, n_input: int, n_output: int) -> float:
        return _PER_MILLION * (n_input * self.input_price + n_output * self.output_price)

    async def _ask(self, body: bytes) -> Paid:
        import httpx  # noqa: PLC0415 - as above

        from rlboost.shared.process.waiting import retry_while  # noqa: PLC0415 - as above

        headers = {"content-type": "application/json"}
        if self.api_key_variable:
            headers["authorization"] = bearer(self.api_key_variable, os.environ[self.api_key_variable])
        url = f"{self.url.rstrip('/')}/chat/completions"
        client = _client()

        async def post() -> httpx.Response:
            answer = await client.post(url, content=body, headers=headers)
            if answer.status_code in _BUSY:
                raise httpx.TransportError(_shown(answer))
            return answer

        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await retry_while(httpx.TransportError, post)
        except TimeoutError as error:
            raise ToolUnavailable(f"{url} gave no answer within timeout_s, {self.timeout_s:g} s") from error
        except httpx.DecodingError as error:
            raise ToolUnavailable(f"{url} failed: {error}") from error
        if answer.status_code in _REFUSED:
            raise ValueError(f"{self.model} refused the question: {_shown(answer)}")
        if answer.status_code in _DENIED:
            raise _Denied(f"{url} answered {_shown(answer)}")
        if answer.status_code != 200:
            raise ToolUnavailable(f"{url} answered {_shown(answer)}")
        return self._paid(url, answer)

    def _paid(self, url: str, answer: httpx.Response) -> Paid:
        """Return the text of an answer and its cost."""
        try:
            document = answer.json()
            text, usage = document["choices"][0]["message"]["content"] or "", document["usage"]
            n_input, n_output = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            if n_input < 0 or n_output < 0:
                raise ValueError("usage is negative")  # noqa: TRY301 - as unusable as one that is missing
            return Paid(str(text), self._cost(n_input, n_output))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ToolUnavailable(f"{url} answered without choices, or without usage: {_shown(answer)}") from error


_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()
"""Event loop -> the client of all models called on it: creating one takes some 30 ms."""


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        from rlboost.shared.http.clients import IDENTITY, async_http_client, limit_async_answer  # noqa: PLC0415 - as above
        from rlboost.shared.proxies import external  # noqa: PLC0415 - as above

        _CLIENTS[loop] = async_http_client(
            external, timeout=None, headers=IDENTITY, event_hooks={"response": [limit_async_answer]}
        )
    return _CLIENTS[loop]


def _shown(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.text[:_SHOWN_CHARS]}"
