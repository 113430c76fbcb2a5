"""Countdown by two policies that learn together, a solver and a verifier of its answers. Needs the package `openai`."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rlboost.agents import Session
from rlboost.examples.countdown.task import EOS, HIT, MISS, Problem, answer_of

HTTP = DefaultAsyncHttpxClient()
"""Shared by all sessions of the process: creating one takes some 30 ms."""


async def run(session: Session, row: dict[str, Any]) -> dict[str, Any]:
    """Return 1 for the solver if its last answer is right, and for the verifier the share of right verdicts.

    The solver tries again once, if the verifier rejects its first answer.
    """
    first, second, third = row["numbers"]
    problem = Problem((first, second, third), row["target"])
    solver, verifier = _Chat(session), _Chat(session.policies["verifier"])
    verdicts, solved = list[bool](), False
    question = problem.prompt
    for _ in range(2):
        answer = answer_of(await solver.ask(question) + EOS)
        solved = answer is not None and answer.solves(problem)
        verdict = await verifier.judge(f"{problem.prompt}{answer or ''}")
        verdicts.append(verdict == (HIT if solved else MISS))
        if verdict != MISS:
            break
        question = MISS + problem.prompt
    return {"reward": float(solved), "policies": {"verifier": sum(verdicts) / len(verdicts)}}


async def self_play(session: Session, row: dict[str, Any]) -> dict[str, Any]:
    """Have one policy in both roles: each of its answers has a reward of its own."""
    first, second, third = row["numbers"]
    problem = Problem((first, second, third), row["target"])
    solver, verifier = _Chat(session), _Chat(session)
    answer = answer_of(await solver.ask(problem.prompt) + EOS)
    solved = answer is not None and answer.solves(problem)
    verdict = await verifier.judge(f"{problem.prompt}{answer or ''}")
    right = verdict == (HIT if solved else MISS)
    return {"reward": float(solved), "rewards": {solver.last: float(solved), verifier.last: float(right)}}


class _Chat:
    """A conversation with one policy."""

    def __init__(self, session: Session) -> None:
        # So many retries outlast a restart of the rollout manager.
        self._client = AsyncOpenAI(base_url=session.base_url, api_key=session.key, http_client=HTTP, max_retries=10)
        self._messages: list[Any] = []
        self.last = ""
        """Id of the last answer."""

    async def ask(self, text: str) -> str:
        """Return the answer to a text, after those before it."""
        self._messages.append({"role": "user", "content": text})
        return await self._answer()

    async def judge(self, text: str) -> str:
        """Return one token that follows a text, alone."""
        self._messages = [{"role": "user", "content": text}]
        return await self._answer(max_tokens=1)

    async def _answer(self, **options: Any) -> str:
        made = await self._client.chat.completions.create(model="policy", messages=self._messages, **options)
        self._messages.append(made.choices[0].message)
        self.last = made.id
        return made.choices[0].message.content or ""
