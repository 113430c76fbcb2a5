"""Environments of the package `verifiers`, as people publish them: nothing here knows of RLBoost."""

from __future__ import annotations

import os
from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def is_even(completion: Any) -> float:
    """Return 1 if the last message is an even digit."""
    text = completion[-1]["content"] or ""
    return float(text.isdigit() and int(text) % 2 == 0)


def has_called(completion: Any) -> float:
    """Return 1 if a tool was called."""
    return float(any(message["role"] == "tool" for message in completion))


def are_different(completions: list[Any]) -> list[float]:
    """Return the share of different messages, for each of a group."""
    texts = [completion[-1]["content"] for completion in completions]
    return [len(set(texts)) / len(texts)] * len(texts)


class Broken(vf.SingleTurnEnv):  # type: ignore[misc]
    """Fails as sandboxes do, for some rows."""

    async def setup_state(self, state: Any) -> Any:
        match state["info"]["fault"]:
            case "sandbox":
                raise vf.SandboxError("no machine is left")
            case "key":
                raise KeyError("a bug")
        return state


def load_environment(kind: str = "single", n: int = 16, **options: Any) -> Any:
    """Return the environment: single, tools, broken or compares."""
    assert "OPENAI_API_KEY" not in os.environ
    rows = [{"question": f"{i % 4}+{i % 3}?", "answer": str(i), "info": {"fault": None}} for i in range(n)]
    if kind == "broken":
        for row, fault in zip(rows, ("sandbox", "key"), strict=False):
            row["info"] = {"fault": fault}
    dataset = Dataset.from_list(rows)
    if kind == "compares":
        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[are_different]))
    if kind == "tools":
        rubric = vf.Rubric(funcs=[has_called, is_even], weights=[0.5, 0.5])
        return vf.ToolEnv(dataset=dataset, tools=[add], max_turns=3, rubric=rubric, **options)
    made = Broken if kind == "broken" else vf.SingleTurnEnv
    return made(dataset=dataset, system_prompt="Answer.", rubric=vf.Rubric(funcs=[is_even]), **options)
