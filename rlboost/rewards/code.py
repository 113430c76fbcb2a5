"""Reward for programs, run in a sandbox: `reward: {function: "rlboost.rewards.code:score"}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlboost.rewards.sandbox import Limits, Ran, available_isolation, run

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def program_of(text: str) -> str | None:
    """Return the last fenced block of Python in a text, None if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def score(
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    tests: Sequence[str] | None = None,
    cases: Sequence[Sequence[Mapping[str, str]]] | None = None,
    limits: Mapping[str, Any] | None = None,
    isolated: bool = True,
    **_columns: Any,
) -> list[float]:
    """Return 1.0 for each completion whose program passes, 0.0 for any other.

    Args:
        completions: texts, or lists of messages, whose last message is used; the last fenced block is the program.
        tests: column of Python code that is appended to the program and raises if it is wrong (asserts).
        cases: column of lists of `{"input", "output"}`: expected output for each input, ignoring surrounding white
            space; all must match. A row has tests or cases.
        limits: per run, see `rlboost.rewards.sandbox.Limits`.
        isolated: see `rlboost.rewards.sandbox.run`.

    Raises:
        SandboxUnavailable: no isolation works on this machine.
        ValueError: a row has neither tests nor cases.

    """
    allowed = replace(Limits(), **(limits or {}))
    rewards = []
    for i, completion in enumerate(completions):
        text = completion if isinstance(completion, str) else str(completion[-1]["content"])
        test = tests[i] if tests is not None else None
        examples = cases[i] if cases is not None else None
        if not test and not examples:
            raise ValueError("the data has neither a column tests nor a column cases for this row")
        program = program_of(text)
        passed = program is not None and (
            (not test or _passes(program, test, allowed, isolated=isolated))
            and all(_prints(program, example, allowed, isolated=isolated) for example in examples or ())
        )
        rewards.append(float(passed))
    return rewards


def _prepare(*, isolated: bool = True, **_arguments: Any) -> None:
    """Refuse the job, instead of each of its programs, where no program can be isolated."""
    if isolated:
        available_isolation()
    else:
        print("isolated: false: generated programs run without isolation and may do what this user may do")


vars(score)["prepare"] = _prepare


def _passes(program: str, test: str, limits: Limits, *, isolated: bool) -> bool:
    ran = run(program, "", limits, isolated=isolated, epilogue=test)
    return _succeeded(ran) and ran.completed


def _prints(program: str, example: Mapping[str, str], limits: Limits, *, isolated: bool) -> bool:
    ran = run(program, example["input"], limits, isolated=isolated)
    return _succeeded(ran) and ran.output.strip() == example["output"].strip()


def _succeeded(ran: Ran) -> bool:
    return ran.code == 0 and not ran.timed_out
