"""A host of agents: takes the sessions of a job whose agent is remote, runs them here, and posts their rewards.

Consumes: sessions, up to the number that it runs at the same time, from `POST /v1/jobs/{job}/sessions/next`.
Produces: rewards, or why there is none, and renewed leases.
Waits for: the manager, for at most `OUTAGE_LIMIT_S`; each agent, for at most `agent.timeout_s`.
Ends when: the job has ended, or the stop is set; agents that still run are then stopped, and their sessions are offered
    to other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import structlog

from rlboost.agents import Session
from rlboost.shared.errors import Conflict, Fatal
from rlboost.shared.http.clients import async_http_client
from rlboost.shared.http.server_url import MAX_REDIRECTS, redirected_origin
from rlboost.shared.job.agent import NO_REWARDS, Agent, AgentRun, check_time, load_agent
from rlboost.shared.job.priced_model import BudgetSpent
from rlboost.shared.proxies import internal
from rlboost.shared.secrets import bearer
from rlboost.shared.user_code import describe_import_error

log = structlog.get_logger(__name__)

OUTAGE_LIMIT_S = 900.0
"""How long the manager may not answer."""
WAIT_S = 20.0
"""For how long one request waits for sessions."""
RENEW_EVERY_S = 8.0
"""Several times in the time of a lease."""
RETRY_S = 0.5
MAX_AT_ONCE = 1024
"""Sessions of one request."""
MAX_TEXT = 4000
THREADS = 256
_ANSWER_S = 30.0


class JobOver(Exception):
    """The job has ended."""


@dataclass(slots=True, eq=False)
class Host:
    """Runs one function for the sessions of one job."""

    url: str
    """Of the manager, without `/v1`."""
    token: str
    job: str
    path: str
    """`package.module:function`, or a class."""
    concurrency: int
    n_ended: int = 0
    n_failed: int = 0
    """Sessions without a reward."""
    _agents: dict[str, Agent] = field(default_factory=dict)
    """Arguments as JSON -> the agent with them."""
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Id of a session's start -> its agent."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _spent: asyncio.Queue[BudgetSpent] = field(default_factory=asyncio.Queue)
    """Why no further agent of this host can be run."""
    _http: httpx.AsyncClient = field(init=False)

    async def __aenter__(self) -> Self:
        """Open no connection yet."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        self._http = async_http_client(internal, timeout=httpx.Timeout(WAIT_S + _ANSWER_S, connect=5.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the agents that run, and close the connections."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._http.aclose()

    async def run(self, stop: asyncio.Event) -> None:
        """Run agents until the job has ended or the stop is set.

        Raises:
            Fatal: the manager refuses the token or does not know the job, or does not answer; the agent cannot be made
                with the job's arguments and time; or the budget of a `PricedModel` is spent.

        """
        stopping = asyncio.create_task(stop.wait(), name="stop")
        works = ("take", self._take()), ("renew", self._renew()), ("budget", self._end_without_budget())
        loops = [asyncio.create_task(loop, name=name) for name, loop in works]
        done, _ = await asyncio.wait({stopping, *loops}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, *loops):
            task.cancel()
        await asyncio.gather(stopping, *loops, return_exceptions=True)
        for task in done - {stopping}:
            with contextlib.suppress(JobOver):
                task.result()

    async def _take(self) -> None:
        while True:
            if (free := self.concurrency - len(self._running)) <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            query = {"count": min(free, MAX_AT_ONCE), "wait": WAIT_S}
            answer = await self._post(f"jobs/{self.job}/sessions/next", self.token, params=query)
            for given in answer.json():
                try:
                    check_time(self._agent(given["arguments"]), given["timeout_s"])
                except Exception as error:
                    raise Fatal(describe_import_error(self.path, "agent", error)) from error
                task = asyncio.create_task(self._serve(given), name=f"session-{given['sample']}")
                self._running[given["id"]] = task
                task.add_done_callback(lambda _, name=given["id"]: self._ended(name))  # type: ignore[misc]

    def _ended(self, name: str) -> None:
        self._running.pop(name, None)
        self._changed.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            names = list(self._running)
            for at in range(0, len(names), MAX_AT_ONCE):
                some = names[at : at + MAX_AT_ONCE]
                answer = await self._post(f"jobs/{self.job}/sessions/renew", self.token, json={"sessions": some})
                for name in answer.json()["over"]:
                    if (task := self._running.get(name)) is not None:
                        task.cancel()

    async def _end_without_budget(self) -> None:
        spent = await self._spent.get()
        raise Fatal(str(spent)) from spent

    async def _serve(self, given: Mapping[str, Any]) -> None:
        """Run the agent of one session, and post its end."""
        session = Session(f"{self.url}/v1", given["key"], given["sample"], given["step"], given["is_eval"])
        run = AgentRun(self._agent(given["arguments"]))
        await run.reset(given["row"], 0)
        raised, returned, spent = f"no reward within {given['timeout_s']:g} s", NO_REWARDS, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(given["timeout_s"]):
                try:
                    returned, raised = await run.run(session)
                except BudgetSpent as error:
                    raised, spent = str(error), error
        # Managers of earlier releases know neither `rewards` nor `cost`.
        given_values = {name: value for name, value in returned._asdict().items() if value or name == "reward"}
        body = {"infrastructure": raised[:MAX_TEXT]} if raised else given_values
        if raised:
            self.n_failed += 1
            log.warning("agent_failed", sample=given["sample"], detail=raised)
        try:
            await self._post(f"sessions/{given['session']}/reward", given["key"], json=body)
            if spent is not None:
                self._spent.put_nowait(spent)
        except Fatal as error:  # the group was dropped, or another host has the session
            log.warning("reward_refused", sample=given["sample"], reason=str(error))
            return
        except JobOver:
            return
        self.n_ended += 1

    def _agent(self, arguments: Mapping[str, Any]) -> Agent:
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._agents:
            self._agents[key] = load_agent(self.path, arguments)
        return self._agents[key]

    async def _post(self, path: str, token: str, **arguments: Any) -> httpx.Response:
        """Return the answer to a request; repeat it while the manager does not answer.

        Raises:
            Fatal: it is refused, or the manager does not answer.
            JobOver: the job has ended.

        """
        limit = time.monotonic() + OUTAGE_LIMIT_S
        while True:
            try:
                answer = await self._send(path, token, **arguments)
            except httpx.TransportError as error:
                problem = f"{self.url} does not answer ({str(error) or type(error).__name__})"
            else:
                if answer.is_success:
                    return answer
                problem = _detail(answer)
                if answer.status_code == httpx.codes.GONE:
                    raise JobOver(problem)
                if answer.status_code not in {httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS}:
                    raise Fatal(problem)
            if time.monotonic() > limit:
                raise Fatal(f"{problem}; gave up after {OUTAGE_LIMIT_S:g} s")
            await asyncio.sleep(RETRY_S)

    async def _send(self, path: str, token: str, **arguments: Any) -> httpx.Response:
        origin = self.url
        for _ in range(1 + MAX_REDIRECTS):
            url, headers = f"{origin}/v1/{path}", {"Authorization": bearer("the token", token)}
            answer = await self._http.post(url, headers=headers, **arguments)
            try:
                other = redirected_origin(url, answer.status_code, answer.headers.get("location", ""))
            except Conflict as error:
                raise Fatal(str(error)) from error
            if other is None:
                return answer
            origin = other
        raise httpx.TransportError("the managers redirect to each other")


def _detail(answer: httpx.Response) -> str:
    try:
        document = answer.json()
        return str(document.get("detail") or document.get("error", {}).get("message"))
    except (ValueError, AttributeError):
        return f"status {answer.status_code}: {answer.text[:200]}"
