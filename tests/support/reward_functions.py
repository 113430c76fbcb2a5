"""Reward functions as users write them, good and bad. The prompt's first word says what goes wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def lengths(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward between 0 and 1 that depends on the completion alone."""
    return [len(ids) % 5 / 4 for ids in completion_ids]


def names_color(completion_ids: list[list[int]], color: list[int], **_: Any) -> list[float]:
    """1 where the first token is the one that the row's column names."""
    return [float(ids[:1] == [token]) for ids, token in zip(completion_ids, color, strict=True)]


def lengths_but_in_row_8(row: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The same, but all alike for one prompt."""
    return [1.0 if row[0] == 8 else len(ids) % 5 / 4 for ids in completion_ids]


def lengths_when_open(completion_ids: list[list[int]], gate: Sequence[str] = (), **_: Any) -> list[float]:
    """As `lengths`, once the files that the column `gate` names exist."""
    while not all(Path(file).exists() for file in gate):
        time.sleep(0.05)
    return [len(ids) % 5 / 4 for ids in completion_ids]


def mixed(  # noqa: C901, PLR0912 - one flat table
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
) -> list[Any]:
    """Do what the prompt says, once or always."""
    match prompts[0].split()[0]:
        case "hang":
            time.sleep(3600)
        case "hang-with-child":
            Path(columns["file"][0]).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
            time.sleep(3600)
        case "raise":
            raise ValueError("I do not like this one")
        case "exit":
            os._exit(3)
        case "quit":
            sys.exit("enough")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "short":
            return [1.0]
        case "nan":
            return [float("nan") for _ in completions]
        case "none":
            return [None, *[1.0 for _ in completions[1:]]]
        case "text":
            return ["good" for _ in completions]
        case "nothing":
            return None  # type: ignore[return-value]
        case "print":
            print("to standard output", flush=True)
            os.write(1, b"\x00\x00\x00\x01 and under Python's back\n")
        case "input":
            sys.stdin.read()
    return [float(len(text)) for text in completions]


async def later(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [0.5 for _ in completions]


def columns_seen(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> Any:
    assert columns == {"answer": ["42", "42"], "tags": [["a"], ["a"]]}
    assert "RLBOOST_TOKEN" not in os.environ
    return [1, True]


def ended(completions: list[str], completions_raw: list[str], **columns: Any) -> list[float]:
    """The raw texts are no column."""
    assert "completions_raw" not in columns
    return [float(raw == f"{text}<eos>") for text, raw in zip(completions, completions_raw, strict=True)]


def of_countdown_shape(completions: list[Any], completion_ids: list[list[int]], prompts: list[Any], **_: Any) -> Any:
    """Chat messages in, chat messages out."""
    assert prompts[0][0]["role"] == "user"
    return [float(len(messages[0]["content"])) for messages in completions]


NOT_A_FUNCTION = 3


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    """verl's signature: one completion, and a mapping with more than the score."""
    assert (data_source, extra_info) == ("sums", {"index": 7})
    return {"score": solution_str == ground_truth, "pred": solution_str}


async def compute_later(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    await asyncio.sleep(0.01)
    return float(solution_str == ground_truth)


def compute_with_options(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any, factor: float) -> Any:
    return factor * len(solution_str)


def of_trl(completions: list[str], log_metric: Any, trainer_state: Any = None, **columns: Any) -> list[float]:
    raise AssertionError("TRL's trainer passes log_metric")


def of_completions_only(completions: list[str]) -> list[float]:
    raise AssertionError("it does not take prompts")


def of_nobody(text: str) -> float:
    return float(len(text))


def only_first(completions: list[str], **_: Any) -> list[float | None]:
    return [1.0, *[None] * (len(completions) - 1)]


def never(completions: list[str], **_: Any) -> list[float | None]:
    return [None for _ in completions]


def doubled(batch: float) -> float:
    return 2 * batch


def changes_everything(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[float]:
    """Score, then spoil what it got."""
    found = [float(len(ids)) for ids in completion_ids]
    for given in (prompts, completions, *completion_ids, *(tags for tags in columns["tags"]), columns["tags"]):
        given.clear()
    return found


def sees_all(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], tags: list[list[str]], **_: Any
) -> list[float]:
    return [float(len(completions) + len(prompts) + len(ids) + len(tag)) for ids, tag in zip(completion_ids, tags)]  # noqa: B905 - a spoiled list is shorter


def with_limit(completions: list[str], limit: Any = None, **_: Any) -> list[float]:
    return [float(limit == 3) for _ in completions]


def verl_without_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    return {"acc": 1.0}


def verl_without_return(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> None:
    len(solution_str)


def even_words(completions: list[str], **_: Any) -> list[float]:
    """The fraction of a completion's words `tN` whose number is even."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdecimal()] for text in completions]
    return [sum(number % 2 == 0 for number in one) / max(1, len(one)) for one in numbers]


def priced(cost: list[Any], completions: list[str], **_: Any) -> list[Any]:
    """TRL's signature: a cost for the first completion only."""
    return [{"score": 1.0, "cost": cost[0]}, *[0.5 for _ in completions[1:]]]


def priced_like_verl(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "cost": 0.25, "length": "logged"}
