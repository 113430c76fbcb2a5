"""Means over seeds as a table, and the ratios between policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.scheduling.measure import ORACLE, Result

Key = tuple[str, int]
"""(case, preemptions)"""
OURS = "ours"

_COLUMNS = (
    ("step s", "step_s", "{:.2f}"),
    ("window s", "window_s", "{:.2f}"),
    ("trainer idle s", "trainer_idle_s", "{:.2f}"),
    ("worker idle", "worker_idle", "{:.0%}"),
    ("made again ‰", "made_again", "{:.1f}"),
    ("prefilled again ‰", "prefilled_again", "{:.0f}"),
    ("moves", "moves", "{:.0f}"),
    ("retracted", "retractions", "{:.0f}"),
    ("share off", "share_off", "{:.1f}"),
    ("tail s", "tail_s", "{:.1f}"),
    ("µs/decision", "decide_us", "{:.0f}"),
)


def by_case(results: Iterable[Result]) -> dict[Key, dict[str, Result]]:
    """Return the means over seeds: (case, preemptions) -> policy -> means."""
    runs: dict[Key, dict[str, list[Result]]] = {}
    for result in results:
        runs.setdefault((result.case, result.preemptions), {}).setdefault(result.policy, []).append(result)
    return {key: {policy: _mean(some) for policy, some in policies.items()} for key, policies in runs.items()}


def _mean(results: Sequence[Result]) -> Result:
    first = results[0]
    means = {
        field.name: fmean(getattr(result, field.name) for result in results)
        for field in fields(Result)
        if isinstance(getattr(first, field.name), float)
    }
    return Result(case=first.case, preemptions=first.preemptions, seed=-1, policy=first.policy, **means)


def tail_part(ours: Result, oracle: Result) -> float:
    """Return which part of the difference to the oracle is the tail."""
    more_s = ours.step_s - oracle.step_s
    return min(1.0, ours.tail_lost_s / more_s) if more_s > 0 else 0.0


def table(results: Iterable[Result]) -> Table:
    """Return what people read: a row a case and policy; ratios of throughput are against our own policy."""
    out = Table(title="a step's means over the measured steps and the seeds")
    for name in ("case", "policy", *(title for title, _, _ in _COLUMNS), "ours/it", "part of it tail"):
        out.add_column(name, justify="left" if name in {"case", "policy"} else "right")
    for (case, preemptions), policies in by_case(results).items():
        oracle = policies[ORACLE]
        for i, (policy, mean) in enumerate(policies.items()):
            ratio = f"{mean.step_s / policies[OURS].step_s:.3f}" if OURS in policies else ""
            cells = [form.format(getattr(mean, name)) for _, name, form in _COLUMNS]
            if policy == ORACLE:
                cells = [cells[0], *[""] * (len(cells) - 1)]
            tail = "" if policy == ORACLE else f"{tail_part(mean, oracle):.0%}"
            out.add_row("" if i else f"{case}, {preemptions} go", policy, *cells, ratio, tail)
        out.add_section()
    return out


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Return the ratios of throughput: their geometric means and the worst case of each."""
    cases = by_case(results)
    ratios: dict[str, dict[str, float]] = {}
    for (case, preemptions), policies in cases.items():
        if OURS not in policies:
            continue
        ours = policies[OURS].step_s
        name = f"{case}/{preemptions}"
        for policy, mean in policies.items():
            if policy == ORACLE:
                ratios.setdefault("oracle/ours", {})[name] = ours / mean.step_s
            elif policy != OURS:
                ratios.setdefault(f"ours/{policy}", {})[name] = mean.step_s / ours
    out: dict[str, Any] = {"benchmark": "scheduling"}
    for ratio, values in ratios.items():
        worst = max(values, key=values.__getitem__) if ratio == "oracle/ours" else min(values, key=values.__getitem__)
        out[ratio] = round(math.exp(fmean(math.log(value) for value in values.values())), 4)
        out[f"{ratio}, worst"] = [worst, round(values[worst], 4)]
    tails = [tail_part(policies[OURS], policies[ORACLE]) for policies in cases.values() if OURS in policies]
    if tails:
        out["tail part of the difference to the oracle"] = round(fmean(tails), 3)
    return out
