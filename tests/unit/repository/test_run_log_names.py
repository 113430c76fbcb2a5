"""Every metric that the trainer gives is in docs/run-log.md, and so is every name that the field expects."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ("advantages", "curriculum", "loss/preference", "metrics")
ALONE = {"loss", "lr", "kl", "entropy", "grad_norm", "mismatch_kl", "frac_reward_zero_std", "perplexity"} | {
    "accuracy",
    "margin",
    "mean_reward",
    "min_reward",
    "max_reward",
}
"""Metrics without a slash."""
EXPECTED = (
    "reward/mean",
    "reward/std",
    "reward/right/mean",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    "clip_ratio/low",
    "clip_ratio/high",
    "grad_norm",
    "lr",
    "completions/mean_length",
    "completions/clipped_ratio",
    "off_policy/staleness",
    "mismatch_kl",
    "ratio/mean",
    "ratio/mean_clipped",
    "ratio/max",
    "ratio/max_clipped",
    "time/step_s",
    "perf/throughput",
    "perf/mfu",
    "eval/pass@1",
    "eval/pass@8",
)
"""What users of other frameworks look for."""
_METRIC = re.compile(r"[a-z_]+(/[\w@]+)+")


def documented() -> list[re.Pattern[str]]:
    """Return a pattern for each name in the table, `<reason>` being any word."""
    table = (ROOT / "docs/run-log.md").read_text(encoding="utf-8").partition("## Metrics")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in names]


def given() -> list[str]:
    """Return the names in the code, `word` in place of what is filled in."""
    found = set()
    for source in SOURCES:
        tree = ast.parse((ROOT / f"services/trainer/domain/{source}.py").read_text(encoding="utf-8"))
        inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "word" for part in node.values]
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
                text = node.value
            else:
                continue
            if _METRIC.fullmatch(text) or text in ALONE:
                found.add(text.replace("skipped_word", "skipped_solved"))
    # A prefix, and a name made with it.
    return sorted(found - {"eval/reward", "word/word/mean"})


@pytest.mark.parametrize("name", [*given(), *EXPECTED])
def test_a_metric_is_documented(name: str) -> None:
    assert any(pattern.fullmatch(name) for pattern in documented()), f"put {name} into docs/run-log.md"


def test_the_names_are_found_in_the_code() -> None:
    assert {"reward/mean", "groups/dropped/word", "eval/pass@word", "perf/mfu", "lr", "perplexity"} <= set(given())
