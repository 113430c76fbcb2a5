"""Countdown with a second try, by an agent that calls the model as OpenAI's API has it. Needs the package `openai`."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rlboost.agents import Session
from rlboost.examples.countdown.task import EOS, MISS, Problem, answer_of

HTTP = DefaultAsyncHttpxClient()
"""Shared by all sessions of the process: creating one takes some 30 ms."""


async def run(session: Session, row: dict[str, Any]) -> float:
    """Return 1 for a problem that is solved at once and 1/2 for one that is solved the second time."""
    first, second, third = row["numbers"]
    problem = Problem((first, second, third), row["target"])
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    # So many retries outlast a restart of the rollout manager.
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.key, http_client=HTTP, max_retries=10)
    for n_tries in (1, 2):
        made = await client.chat.completions.create(model="policy", messages=messages)
        answer = answer_of((made.choices[0].message.content or "") + EOS)
        if answer is not None and answer.solves(problem):
            return 1.0 / n_tries
        messages += [made.choices[0].message, {"role": "user", "content": MISS + problem.prompt}]
    return 0.0
