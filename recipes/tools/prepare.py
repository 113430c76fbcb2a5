"""Write `train.jsonl`, `eval.jsonl` and `warmup.jsonl` to this folder: `python prepare.py`. Downloads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from rlboost.recipes import write_rows
from environment import Calculator

N_EVAL = 128
N_TRAIN = 2560
N_WARMUP = 16_000
CALLS = 0.5
"""Share of the warm-up's conversations with a call; the others guess, nearly always wrongly."""
SLIP = 0.2
"""Share of the warm-up's calls, and of its answers after one, with a wrong digit."""


def question(a: int, b: int) -> dict[str, Any]:
    """Return a problem: the prompt, and a column for the environment."""
    return {"prompt": [{"role": "user", "content": f"{a}*{b}?"}], "answer": str(a * b)}


def to_imitate(problems: list[tuple[int, int]], rng: Random) -> Iterator[dict[str, Any]]:
    """Yield conversations that have the right form; whether they are right is left to the reward."""
    tools = Calculator().tools
    for _ in range(N_WARMUP):
        a, b = rng.choice(problems)
        asked = question(a, b)["prompt"]
        if rng.random() >= CALLS:
            yield {"messages": [*asked, _said(str(rng.randint(100, 9999)))], "tools": tools}
            continue
        given = {"a": int(_slipped(str(a), rng)), "b": int(_slipped(str(b), rng))}
        result = str(given["a"] * given["b"])
        call = {"type": "function", "function": {"name": "multiply", "arguments": given}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        told = {"role": "tool", "name": "multiply", "content": result}
        yield {"messages": [*asked, called, told, _said(_slipped(result, rng))], "tools": tools}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _slipped(number: str, rng: Random) -> str:
    if rng.random() >= SLIP:
        return number
    at = rng.randrange(len(number))
    return number[:at] + rng.choice("123456789") + number[at + 1 :]


def main(folder: Path) -> None:
    """Write the three files; the same bytes every time."""
    rng = Random(0)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(problems)
    held_out, train = problems[:N_EVAL], problems[N_EVAL:]
    write_rows(folder / "eval.jsonl", (question(a, b) for a, b in held_out))
    write_rows(folder / "train.jsonl", (question(a, b) for a, b in train[:N_TRAIN]))
    write_rows(folder / "warmup.jsonl", to_imitate(train, rng))


if __name__ == "__main__":
    main(Path())
