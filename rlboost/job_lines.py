"""Format what is known of a job as lines of text: pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

# --- States of workers, as the REST API reports them ------------------------------------------------------------------


GONE = frozenset({"lost", "left"})
"""States of workers that no longer exist."""


# --- Lines ------------------------------------------------------------------------------------------------------------


_SHOWN = ("reward/mean", "perplexity", "rewards/accuracies", "completions/mean_length", "perf/tokens_per_s")
RECENT_STEPS = 10
"""Steps whose mean duration is used to estimate how long a job will take."""
_PHASES = {"publishing": "publishing weights", "finishing": "saving the model"}
"""Texts of phases that their names alone do not explain."""
_INDENT = "    "
_BRIEF_S = 5.0
_LEAST_DOLLARS = 1e-6
_ROUNDS_TO_A_DOLLAR = 0.995
_CAUSES = {
    "late": "regenerated: arrived after the sample had migrated",
    "sample_over": "discarded: arrived after the sample was complete",
    "gap": "regenerated: arrived after lost tokens",
    "dropped": "generated for a sample that was dropped",
}
"""Why tokens were paid for in vain."""
_UNITS = (("day", 86_400), ("h", 3_600), ("min", 60))


def step_line(row: Mapping[str, Any], steps: int, width: int | None = None) -> str:
    """Format a finished step: the main metrics, and all of the evaluation; on one line if no width is given."""
    shown = _SHOWN if "reward/mean" in row else ("loss", *_SHOWN)
    names = [name for name in shown if name in row] + sorted(name for name in row if name.startswith("eval/"))
    if row["step"] < steps:
        lines = [f"step {row['step'] + 1:>4}/{steps}"]
    else:
        lines = ["after the last step" if steps else "done"]
    for field in (f"{name} {row[name]:.4g}" for name in names):
        if width is None or len(lines[-1]) + 2 + len(field) <= width:
            lines[-1] += f"  {field}"
        else:
            lines.append(_INDENT + field)
    return "\n".join(lines)


def wait_line(wait: Mapping[str, Any], now: float) -> str:
    """Format a wait as one line; `now` is Unix seconds."""
    so_far_s = now - unix_s(wait["since"])
    times = [f"{duration(so_far_s)} so far"] if so_far_s >= _BRIEF_S else []
    times += [f"{duration(wait['limit_s'])} at most"] if wait.get("limit_s") else []
    return f"waiting for {wait['for']} because {wait['because']}" + (f" ({', '.join(times)})" if times else "")


def activity_line(job: Mapping[str, Any], now: float) -> str:
    """Format what a job does and what it waits for as one line; empty where neither is known."""
    phase, wait = job.get("phase"), job["waiting"]
    doing = "" if phase is None or (wait and phase["name"] == "paused") else phase_line(phase, now)
    return "; ".join(text for text in (doing, wait_line(wait, now) if wait else "") if text)


def phase_line(phase: Mapping[str, Any], now: float) -> str:
    """Format what a job's trainer does as one line; `now` is Unix seconds."""
    last = f" (the last took {duration(phase['last_s'])})" if phase.get("last_s") else ""
    return f"{phase_name(phase)}, for {duration(now - unix_s(phase['since']))}{last}"


def phase_name(phase: Mapping[str, Any]) -> str:
    """Format what a job's trainer does, without times; names of a newer release are shown as they are."""
    if phase["name"] == "training":
        return f"training step {phase['step'] + 1}"
    return _PHASES.get(phase["name"], str(phase["name"]))


def warning_lines(job_id: str, text: str) -> str:
    """Format a warning for standard error; further lines of its text are indented."""
    return f"rlboost: {job_id}: warning: " + f"\n{_INDENT}".join(text.strip().splitlines())


def lost_line(outage: Mapping[str, Any]) -> str:
    """Format the loss of the connection: `{since, because, limit_s}`."""
    since = datetime.fromtimestamp(outage["since"]).astimezone().strftime("%H:%M:%S")
    limit = duration(outage["limit_s"])
    return f"the manager has not answered since {since}: retrying for {limit} ({outage['because']})"


def back_line(outage: Mapping[str, Any]) -> str:
    """Format the end of an outage: `{outage_s}`."""
    return f"the manager answers again, after {duration(outage['outage_s'])}"


def begin_line(job: Mapping[str, Any]) -> str:
    """Format a job's state when a follower joins it."""
    return f"{job['id']} is {job['state']}" + (f": {job['step']} of {job['steps']} steps" if job["steps"] else "")


def end_line(job: Mapping[str, Any], logs: str) -> str:
    """Format how a job ended; `logs` is the command that prints its log."""
    ended = f"{job['id']} {job['state']}"
    match job["state"]:
        case "completed":
            return f"{ended}: {job['step']} steps"
        case "cancelled":
            after = f"{ended} after {job['step']} of {job['steps']} steps" if job["steps"] else ended
            return after + (f": {job['error']}" if job["error"] else "")
    return f"{ended}: " + (job["error"] or f"'{logs}' prints its log")


def cost_line(cost: Mapping[str, Any]) -> str:
    """Format `GET /v1/jobs/{job_id}/cost` as the web page does, and kinds without a price if there is a budget.

    One sentence or more per line; empty without prices and budget.
    """
    lines = [_spent(cost), *_cost_details(cost)] if cost.get("dollars") else []
    if priced := [model for model in cost.get("models", ()) if model["dollars"]]:
        shown = [f"{model['job_id']} {dollars(model['dollars'])} for {_hours(model['hours'])}" for model in priced]
        lines.append(f"Its other models cost, in addition: {', '.join(shown)}.")
    if cost.get("max_dollars") is not None:
        lines += _unpriced(cost)
    return "\n".join(lines)


def _spent(cost: Mapping[str, Any]) -> str:
    spent = dollars(cost["dollars"]) + (f" of at most {dollars(cost['max_dollars'])}" if cost["max_dollars"] else "")
    payees = [f"{_payee(of)} {dollars(of['dollars'])} for {_hours(of['hours'])}" for of in cost["workers"]]
    return (
        f"{spent}: {', '.join(payees)}. {dollars(cost['dollars_per_step'])} a step, "
        f"{dollars(cost['dollars_per_1000_samples'])} per 1,000 samples, "
        f"{dollars(cost['dollars_per_million_tokens'])} per million tokens. "
        f"Migration saved {dollars(cost['dollars_saved_by_migration'])} of tokens; "
        f"{dollars(cost['dollars_regenerated'])} were regenerated."
    )


def _cost_details(cost: Mapping[str, Any]) -> Iterator[str]:
    if only := cost["reserved_only"]:
        saved, price = 1 - cost["dollars"] / only["dollars"], only["break_even_price_per_hour"]
        verdict = f"{_fixed(100 * abs(saved), 0)} % {'cheaper' if saved >= 0 else 'more expensive'}"
        yield (
            f"The reserved workers alone would have taken about {_hours(only['seconds'] / 3600)} and cost "
            f"{dollars(only['dollars'])} so far: with spot workers the job is {verdict}.{_break_even(price)}"
        )
    for cause, spent in cost["dollars_regenerated_by_cause"].items():
        if spent:
            yield f"Tokens {_CAUSES.get(cause, cause)}: {dollars(spent)}."


def _break_even(price_per_hour: float | None) -> str:
    if price_per_hour is None:
        return ""
    if not price_per_hour:
        return " They do not make it cheaper at any price."
    return f" They make it cheaper while each costs less than {dollars(price_per_hour)} per hour."


def _unpriced(cost: Mapping[str, Any]) -> Iterator[str]:
    if free := [_payee(of) for of in cost["workers"] if of["hours"] and not of["dollars"]]:
        yield (
            f"Without a price, and so not counted by elastic.max_dollars: {', '.join(free)}: set their price in the "
            "manager's RLBOOST_MANAGER_PRICE_FILE, or RLBOOST_WORKER_PRICE_PER_HOUR where they start."
        )


def _payee(of: Mapping[str, Any]) -> str:
    """Return the role and the kind of what was paid for; the trainer has no kind."""
    role = "spot" if of["role"] == "preemptible" else of["role"]
    return f"{role} {of['kind']}".rstrip()


def mix_text(scaling: Mapping[str, Any]) -> str:
    """Format why autoscaling chose its mix of several pools; empty if there is one, or nothing was chosen."""
    return (scaling["reason"] or "") if len(scaling["pools"]) > 1 else ""


def dollars(value: float | None) -> str:
    """Format an amount as the web page does: to the cent, below a dollar to two significant digits."""
    if value is None:
        return "-"
    if 0 < value < _LEAST_DOLLARS:
        return "< $0.000001"
    if value == 0 or value >= _ROUNDS_TO_A_DOLLAR:
        return f"${_fixed(value, 2)}"
    rounded = Context(prec=2, rounding=ROUND_HALF_UP).create_decimal_from_float(value)
    return f"${rounded:.{1 - rounded.adjusted()}f}"


def _hours(hours: float) -> str:
    return f"{_fixed(hours, 2)} h"


def _fixed(value: float, places: int) -> str:
    """Format a number as JavaScript's `toFixed`, which rounds a tie up, where Python rounds it to even."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))


def remaining(job: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format how long a running job will take, from the rows of its last steps; empty if that is unknown."""
    times = [row["time/step_s"] for row in rows if "time/step_s" in row]
    left = job["steps"] - job["step"]
    if job["state"] != "running" or not times or left <= 0:
        return ""
    step_s = sum(times) / len(times)
    return f"about {duration(left * step_s)} left ({step_s:.3g} s a step)"


def duration(seconds: float) -> str:
    """Format a duration in its largest units: `45 s`, `12 min`, `3 h 20 min`, `30 days`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    for place, (unit, unit_s) in enumerate(_UNITS):
        if whole >= unit_s:
            n, rest = divmod(whole, unit_s)
            shown = f"{n} {unit}{'s' if unit == 'day' and n > 1 else ''}"
            finer = _UNITS[place + 1] if place + 1 < len(_UNITS) else None
            n_finer = rest // finer[1] if finer else 0
            return f"{shown} {n_finer} {finer[0]}" if finer and n_finer and n < 10 else shown
    raise AssertionError("unreachable: a minute is the smallest unit")


def brief_duration(seconds: float) -> str:
    """Format a duration, below 10 s to a tenth of a second."""
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def moment(at: str, now: float) -> str:
    """Format an RFC 3339 time in the local time zone, with how long ago it was."""
    then = unix_s(at)
    local = datetime.fromtimestamp(then).astimezone()
    return f"{local:%Y-%m-%d %H:%M:%S} ({duration(now - then)} ago)"


def unix_s(at: str) -> float:
    """Return an RFC 3339 time as Unix seconds; without a time zone it is UTC."""
    parsed = datetime.fromisoformat(at)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def fitted(text: str, width: int | None) -> str:
    """Break lines at spaces to fit a width, further lines indented; with None return the text as it is."""
    if width is None:
        return text
    return "\n".join(
        textwrap.fill(line, max(20, width), subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
