"""Calls of priced models: real processes and HTTP, the trainer's record of them, and code that dies in between."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlboost.environments import BudgetSpent, PricedModel, ToolUnavailable
from rlboost.examples.router.models import Models
from rlboost.services.trainer.adapters.environment_pool import EnvironmentPool
from rlboost.services.trainer.children.environment import _CALL, Call, Conversation, RecordedCalls
from rlboost.services.trainer.job.job import Job, RetryingBus
from rlboost.services.trainer.ports.samples import EnvironmentFault
from rlboost.services.trainer.step.durable import DurablePaidCalls
from rlboost.shared.errors import ConfigError
from rlboost.shared.http import clients
from rlboost.shared.ids import SampleId
from rlboost.shared.job.priced_model import Ledger, Paid, PaidCall
from rlboost.shared.job.reward import AgentSpec, EnvironmentSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus

COST = 100 * 10e-6 + 10 * 30e-6
"""Of one answer of `dear`: 0.0013."""
FIRST = SampleId(1, False, 3, 0, 0).pack()
"""A conversation of step 3."""


class Site:
    """A trainer's record in a memory bus."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.waits = Waits()

    async def record(self) -> DurablePaidCalls:
        """Return what a trainer process that starts now has."""
        job = SimpleNamespace(
            id="job-1",
            lease=SimpleNamespace(fence=None),
            bus=RetryingBus(self.bus, self.waits, 5),
            waits=self.waits,
            limit_s=0.3,
        )
        return await DurablePaidCalls.load(cast("Job", job))

    async def fields(self) -> dict[str, str]:
        return await self.bus.hash_all(names.job_paid_calls("job-1"))


@pytest.fixture
def models() -> Iterator[Models]:
    with Models() as models:
        thread = threading.Thread(target=models.serve_forever)
        thread.start()
        yield models
        models.shutdown()
        thread.join()


async def pool(function: str, record: DurablePaidCalls, *, timeout_s: float = 30, **arguments: Any) -> EnvironmentPool:
    spec = EnvironmentSpec(
        function=f"tests.support.priced_environments:{function}", arguments=arguments, timeout_s=timeout_s
    )
    pool = EnvironmentPool(spec, Waits())
    pool.record_calls(record)
    await pool.start()
    return pool


async def test_turns_that_are_replayed_after_deaths_pay_nothing_again(models: Models, tmp_path: Path) -> None:
    """The process dies in the second turn, after its call; later another trainer replays all turns."""
    site = Site()
    made = await pool("Sums", await site.record(), url=models.url, dies=str(tmp_path / "died"))
    try:
        (first,) = await made.step(FIRST, {}, 0, ["1+2 1+2"])
        assert first.observation == "3 3"
        assert first.cost == pytest.approx(2 * COST)
        with pytest.raises(EnvironmentFault, match="its process ended with code 3"):
            await made.step(FIRST, {}, 0, ["1+2 1+2", "30+4 die"])
        results = await made.step(FIRST, {}, 0, ["1+2 1+2", "30+4 die"])
        assert [one.observation for one in results] == ["3 3", "34"]
        assert [one.cost for one in results] == pytest.approx([2 * COST, COST])
    finally:
        await made.close()
    assert (tmp_path / "died").exists()
    again = await pool("Sums", await site.record(), url=models.url, dies=str(tmp_path / "died"))
    try:
        assert await again.step(FIRST, {}, 0, ["1+2 1+2", "30+4 die"]) == results
    finally:
        await again.close()
    assert models.asked == {("dear", "1+2"): 2, ("dear", "30+4"): 1}, "two questions alike are two calls"


async def test_other_conversation_pays_for_the_same_question(models: Models) -> None:
    made = await pool("Sums", await Site().record(), url=models.url)
    try:
        await asyncio.gather(*(made.step(FIRST + i, {}, 0, ["1+2"]) for i in range(3)))
    finally:
        await made.close()
    assert models.asked == {("dear", "1+2"): 3}


async def test_spent_budget_is_a_fault_of_its_own_unless_it_is_handled(models: Models) -> None:
    record = await Site().record()
    made = await pool("Sums", record, url=models.url, budget=0.0035)
    try:
        text = r"the budget of dear is spent: 0\.0026 of 0\.0035, .*: raise its budget"
        with pytest.raises(EnvironmentFault, match=text) as caught:
            await made.step(FIRST, {}, 0, ["1+2 1+3 1+4"])
        assert (caught.value.reason, caught.value.may_pass) == ("environment_budget", False)
        with pytest.raises(EnvironmentFault, match=text) as caught:
            await made.step(FIRST + 2, {}, 0, ["together 1+4"])
        assert caught.value.reason == "environment_budget"
        (result,) = await made.step(FIRST + 1, {}, 0, ["1+2 handled"])
        assert result.observation == "no money"
    finally:
        await made.close()
    agent = AgentSpec(function="tests.support.priced_environments:agent", arguments={"url": models.url, "budget": 1e-9})
    agents = EnvironmentPool(agent, Waits())
    agents.record_calls(record)
    try:
        await agents.start()
        text = '{"base_url": "u", "key": "k", "sample": "s", "step": 0, "is_eval": false}'
        with pytest.raises(EnvironmentFault, match="the budget of dear is spent"):
            await agents.step(FIRST + 2, {}, 0, [text])
    finally:
        await agents.close()


@pytest.mark.parametrize(("statuses", "text"), [([401, 418], "1+2"), ([], "crash"), ([], "hang")])
async def test_calls_of_unknown_end_are_spent_and_refused_ones_are_not(
    models: Models, statuses: list[int], text: str
) -> None:
    """Nothing waits for them; the limit of one call is 0.0018."""
    models.statuses = statuses
    timeout_s = 1.0 if text == "hang" else 30.0
    made = await pool("Sums", await Site().record(), timeout_s=timeout_s, url=models.url, budget=0.003)
    try:
        for number in range(max(1, len(statuses))):
            with pytest.raises(EnvironmentFault) as caught:
                await made.step(FIRST + number, {}, 0, [text])
            assert caught.value.reason != "environment_budget"
        with pytest.raises(EnvironmentFault, match=r"the budget of dear is spent: 0\.00.* of 0\.003"):
            await made.step(FIRST + 9, {}, 0, ["1+2"])
    finally:
        await made.close()


async def test_call_whose_code_stopped_waiting_is_closed_once_it_is_opened() -> None:
    written: list[dict[str, Any]] = []
    calls, conversation = RecordedCalls(written.append), Conversation(FIRST)
    _CALL.set(Call(1, conversation, 1.0, written.append))
    for replied_first in (False, True):
        opening = asyncio.create_task(calls.open(PaidCall("a.1", "dear", 1.0, 0.75)))

        async def is_asked(n: int = len(written)) -> bool:
            return len(written) > n

        await eventually(is_asked)
        asked = written[-1]
        if replied_first:
            calls.take({"paid": asked["paid"], "answer": None})
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        if not replied_first:
            calls.take({"paid": asked["paid"], "answer": None})

        async def is_closed() -> bool:
            return written[-1].get("is_paid") is False

        await eventually(is_closed)
        assert written[-1]["call"] == asked["call"]


async def test_call_stops_waiting_once_those_before_it_are_lost_or_trimmed() -> None:
    site, call = Site(), PaidCall("a.1", "dear", 1.0, 0.75)
    record = await site.record()
    for end in (lambda: record.lose(FIRST, call), lambda: record.trim(4)):
        await record.open(FIRST, call)
        waiting = asyncio.create_task(record.open(FIRST, call._replace(key="b.1")))

        async def waits() -> bool:
            return bool(site.waits.current())

        await eventually(waits)
        if (ending := end()) is not None:
            await ending
        with pytest.raises(BudgetSpent, match=r"is spent: 0\.75 of 1"):
            await waiting
    await record.close(FIRST, call, Paid("late", 0.1))
    assert list(await site.fields()) == ["total:dear"], "it is trimmed"
    with pytest.raises(BudgetSpent):
        await record.open(FIRST, call._replace(key="c.1"))


async def test_call_in_flight_when_the_trainer_died_is_spent_unless_its_code_runs_again() -> None:
    site, call = Site(), PaidCall("a.1", "dear", 1.0, 0.75)
    await (await site.record()).open(FIRST, call)
    record = await site.record()
    with pytest.raises(BudgetSpent):
        await record.open(FIRST, call._replace(key="b.1"))
    assert await record.open(FIRST, call) is None
    await record.close(FIRST, call, Paid("", 0.25))
    assert await record.open(FIRST, call._replace(key="b.1")) is None


async def test_answers_and_totals_outlive_the_trainer_and_are_trimmed() -> None:
    site, call = Site(), PaidCall("a.1", "dear", 1.0, 0.25)
    record = await site.record()
    assert await record.open(FIRST, call) is None
    await record.close(FIRST, call, Paid("yes", 0.125))
    assert await record.open(FIRST, call._replace(key="b.1")) is None, "in flight when the trainer dies"
    record = await site.record()
    assert await record.open(FIRST, call) == Paid("yes", 0.125)
    await record.trim(3)
    assert len(await site.fields()) == 2
    await record.trim(4)
    assert list(await site.fields()) == ["total:dear"]
    for successor in (record, await site.record()):
        with pytest.raises(BudgetSpent, match=r"0\.375 of 1, and the next call may cost 0\.75"):
            await successor.open(FIRST, PaidCall("c.1", "dear", 1.0, 0.75))


async def test_call_waits_by_name_for_those_that_may_spend_the_rest() -> None:
    site, call = Site(), PaidCall("a.1", "dear", 1.0, 0.75)
    record = await site.record()
    await record.open(FIRST, call)
    waiting = asyncio.create_task(record.open(FIRST, call._replace(key="b.1")))

    async def listed() -> bool:
        return [wait.subject for wait in site.waits.current()] == ["the budget of dear"]

    await eventually(listed)
    await record.close(FIRST, call, Paid("", 0.1))
    assert await waiting is None
    await record.close(FIRST, call._replace(key="b.1"), None)
    assert await record.open(FIRST, call._replace(key="c.1")) is None, "a refused call cost nothing"


async def test_busy_server_is_asked_again_and_a_refused_question_is_an_error(models: Models) -> None:
    model = PricedModel(url=models.url, model="dear", input_price=10, output_price=30, budget=1, timeout_s=10)
    models.statuses = [503, 429, 200, 400, 401]
    assert await model("2+2") == "4"
    with pytest.raises(ValueError, match="dear refused the question: 400"):
        await model("2+2")
    with pytest.raises(ToolUnavailable, match="answered 401"):
        await model("2+2")


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": "many", "completion_tokens": 1},
        {"prompt_tokens": -5, "completion_tokens": 1},
        {"prompt_tokens": float("inf"), "completion_tokens": 1},
        None,
    ],
)
async def test_answer_with_unusable_usage_counts_as_the_most_that_it_may_cost(
    models: Models, monkeypatch: pytest.MonkeyPatch, usage: object
) -> None:
    answered = {"choices": [{"message": {"content": "3"}}], "usage": usage}
    monkeypatch.setattr(models, "answer", lambda _: (200, answered))
    model = PricedModel(url=models.url, model=f"of {usage}", input_price=10, output_price=30, budget=0.05)
    with pytest.raises(ToolUnavailable, match="without usage"):
        await model("1+2")
    with pytest.raises(BudgetSpent, match=r"is spent: 0\.03"):
        await model("1+2")


async def test_answer_that_would_fill_the_memory_fails(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_ANSWER_BYTES", 100)
    monkeypatch.setattr(models, "answer", lambda _: (200, {"more": "x" * 100}))
    model = PricedModel(url=models.url, model="large", input_price=10, output_price=30, budget=1)
    with pytest.raises(ToolUnavailable, match="more than 100 bytes"):
        await model("1+2")


async def test_calls_of_a_process_without_a_job_wait_for_those_in_flight(models: Models) -> None:
    """Two at the same time may cost 0.0036."""
    prices: Any = {"url": models.url, "model": "dear", "input_price": 10, "output_price": 30}
    model = PricedModel(**prices, name="alone", budget=0.0035, max_tokens=20)
    assert list(await asyncio.gather(model("1+2"), model("1+3"))) == ["3", "4"]
    with pytest.raises(BudgetSpent, match=r"is spent: 0\.0026 of 0\.0035"):
        await model("1+4")


async def test_content_that_is_not_text_is_refused(models: Models) -> None:
    model = PricedModel(url=models.url, model="dear", input_price=10, output_price=30, budget=1)
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(TypeError, match="a content is no text"):
        await model([{"role": "user", "content": [image]}])
    assert not models.asked


def test_call_in_reset_is_an_error_of_the_check_as_in_a_job() -> None:
    code = """
from rlboost.services.trainer.children.environment import reset_once
from tests.support.priced_environments import Early
print(reset_once(Early, {}, 0)["raised"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "call a PricedModel in step" in done.stdout


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"url": "host/v1"}, "url is 'host/v1', not of the form"),
        ({"url": "http://h/v1/chat/completions/"}, "give it up to /v1"),
        ({"model": ""}, "model is empty"),
        ({"budget": 0}, "budget is 0: give a finite number, above 0"),
        ({"input_price": float("nan")}, "input_price is nan: give a finite number, 0 or more"),
        ({"api_key_variable": "NOT_SET_HERE"}, "NOT_SET_HERE is not set"),
    ],
)
def test_unusable_argument_is_named(change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"url": "http://h/v1", "model": "m", "input_price": 1, "output_price": 1, "budget": 1}
    with pytest.raises(ConfigError, match=text):
        PricedModel(**{**given, **change})


def test_ledger_counts_calls_in_flight_of_its_own_budget_only() -> None:
    ledger = Ledger()
    ledger.begin("a", PaidCall("a", "dear", 1.0, 0.6))
    assert ledger.has_room("a", PaidCall("a", "dear", 1.0, 0.6)), "it is the one in flight"
    assert not ledger.has_room("b", PaidCall("b", "dear", 1.0, 0.6))
    assert ledger.has_room("b", PaidCall("b", "cheap", 1.0, 0.6))
