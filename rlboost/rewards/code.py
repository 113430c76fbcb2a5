"""Reward for programs, run in a sandbox: `reward: {function: "rlboost.rewards.code:score"}`."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlboost.rewards.remote_calls import may_be_given, names_of_program
from rlboost.rewards.sandbox import Limits, Ran, available_isolation, run
from rlboost.shared.user_code import describe_value

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

_SHOWN_CHARS = 300


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
) -> list[float | None]:
    """Return 1.0 for each completion whose program passes, 0.0 for any other; None for a row that tests nothing.

    Args:
        completions: texts, or lists of messages, whose last message is used; the last fenced block is the program.
        tests: column of Python code that is appended to the program and raises if it is wrong (asserts).
        cases: column of lists of `{"input", "output"}`: expected output for each input, ignoring surrounding white
            space; all must match. A row has tests or cases, or both. If one of them is something else than this, such
            as tests that nothing calls or cases without text, the reward is None and a line is printed. So it is for
            tests that two processes cannot run. If that is due to a program's answer, it has 0.0, and a line says why.
        limits: per run, see `rlboost.rewards.sandbox.Limits`.
        isolated: see `rlboost.rewards.sandbox.run`.

    Raises:
        SandboxUnavailable: no isolation works on this machine.
        ValueError: the data have neither column.

    """
    if tests is None and cases is None:
        raise ValueError("the data has neither a column tests nor a column cases")
    allowed = replace(Limits(), **(limits or {}))
    rewards: list[float | None] = []
    problems: set[str] = set()
    for i, completion in enumerate(completions):
        text = completion if isinstance(completion, str) else str(completion[-1]["content"])
        test = tests[i] if tests is not None else None
        examples = cases[i] if cases is not None else None
        if problem := check_row({"tests": test, "cases": examples}):
            problems.add(problem)
            rewards.append(None)
            continue
        program = program_of(text)
        passed = program is not None and (
            (not test or _passes(program, test, allowed, isolated=isolated))
            and all(_prints(program, example, allowed, isolated=isolated) for example in examples or ())
        )
        rewards.append(float(passed))
    for problem in sorted(problems):
        print(f"rlboost.rewards.code: no reward: {problem}")
    return rewards


def check_row(row: Mapping[str, Any]) -> str:
    """Return why a row's tests and cases cannot tell right programs from wrong ones, empty if they can.

    `rlboost config check` shows it.
    """
    test, examples = row.get("tests"), row.get("cases")
    # A column that only other rows have is null here, or empty.
    given = [value for value in (test, examples) if value is not None and value not in ("", [])]
    if not given:
        return "the row has neither tests nor cases"
    if test in given and not _can_fail(test):
        shown = describe_value(test)
        return f"tests is no Python that asserts, raises or calls something outside of functions: {shown}"
    if isinstance(test, str) and test in given and (why := _undecidable(test)):
        return f"{why}, which two processes cannot do: change the tests, or use cases: {describe_value(test)}"
    if examples in given and not (isinstance(examples, Sequence) and all(map(_is_case, examples))):
        return f'cases is no list of {{"input", "output"}} with texts: {describe_value(examples)}'
    return ""


def _can_fail(test: object) -> bool:
    """Return True if a test is Python that may raise; a definition alone, which nothing calls, does not."""
    if not isinstance(test, str):
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(test, "tests", "exec", dont_inherit=True)
            waiting: list[ast.AST] = [ast.parse(test)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.Call):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def _undecidable(test: str) -> str:
    """Return why tests cannot judge any program, as far as they alone show it; empty if they can."""
    with warnings.catch_warnings(action="ignore"):
        nodes = list(ast.walk(ast.parse(test)))
        used, _ = names_of_program(test)
    if any(isinstance(node, ast.alias) and node.name == "*" for node in nodes):
        return ""  # any name may be an imported one
    theirs = used - set(dir(builtins))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    # `check(f)`: a parameter of check is the program's function.
    checks = {_name(call.func) for call in calls if theirs & set(map(_name, call.args))}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in checks]
    called = theirs | {parameter.arg for function in functions for parameter in function.args.args}
    kinds = {node.name for node in nodes if isinstance(node, ast.ClassDef)}

    def is_own(node: ast.AST) -> bool:
        return isinstance(node, ast.GeneratorExp) or (isinstance(node, ast.Call) and _name(node.func) in kinds)

    own = {_name(node.targets[0]) for node in nodes if isinstance(node, ast.Assign) and is_own(node.value)}
    own |= kinds | {name for name in used - theirs if not _may_be_given(getattr(builtins, name))}
    for node in nodes:
        if isinstance(node, ast.ClassDef) and theirs & set(map(_name, node.bases)):
            return f"the tests derive the class {node.name} from one of the program's"
        if isinstance(node, ast.Call) and _name(node.func) in called:
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                if is_own(value) or (isinstance(value, ast.Name) and value.id in own):
                    given = describe_value(ast.unparse(value))
                    return f"the tests give {given} to the program, which gets plain data and functions only"
    return ""


def _may_be_given(value: object) -> bool:
    return may_be_given(value, {}) or (isinstance(value, type) and issubclass(value, BaseException))


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is_case(example: object) -> bool:
    return isinstance(example, Mapping) and all(isinstance(example.get(name), str) for name in ("input", "output"))


def _prepare(*, isolated: bool = True, **_arguments: Any) -> None:
    """Refuse the job, instead of each of its programs, where no program can be isolated."""
    if isolated:
        available_isolation()
    else:
        print("isolated: false: generated programs run without isolation and may do what this user may do")


vars(score)["prepare"] = _prepare


def _passes(program: str, test: str, limits: Limits, *, isolated: bool) -> bool:
    ran = run(program, "", limits, isolated=isolated, tests=test)
    if ran.unsupported:
        # Other programs may pass, so this one has failed: an error would drop its whole group.
        print(f"rlboost.rewards.code: 0.0 for a program: {' '.join(ran.unsupported.split())[:_SHOWN_CHARS]}")
    return _succeeded(ran) and ran.completed


def _prints(program: str, example: Mapping[str, str], limits: Limits, *, isolated: bool) -> bool:
    ran = run(program, example["input"], limits, isolated=isolated)
    return _succeeded(ran) and ran.output.strip() == example["output"].strip()


def _succeeded(ran: Ran) -> bool:
    return ran.code == 0 and not ran.timed_out
