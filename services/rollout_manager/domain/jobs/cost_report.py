"""What a job has cost, as `GET /v1/jobs/{job_id}/cost` answers it."""

from __future__ import annotations

from typing import Any

from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.jobs.cost import Cost
from rlboost.shared.units import HOUR_S


def cost_report(audit: Audit, steps: int, max_dollars: float | None) -> dict[str, Any]:
    """Return the fields of `GET /v1/jobs/{job_id}/cost`; a ratio is None before its denominator is above 0.

    Args:
        audit: the job's.
        steps: finished steps.
        max_dollars: the job's budget.

    """
    dollars = audit.cost.dollars
    per_token = _ratio(dollars, audit.tokens_generated)
    regenerated = sum(audit.tokens_regenerated.values())
    return {
        "dollars": dollars,
        "max_dollars": max_dollars,
        "budget_reached": audit.cost.budget_reached,
        "workers": [
            {"role": time.role, "kind": time.kind, "hours": time.seconds / HOUR_S, "dollars": time.dollars}
            for time in audit.cost.workers.values()
        ],
        "dollars_per_step": _ratio(dollars, steps),
        "dollars_per_1000_samples": _ratio(1e3 * dollars, audit.delivered),
        "dollars_per_million_tokens": None if per_token is None else 1e6 * per_token,
        "tokens_saved": audit.tokens_saved,
        "dollars_saved_by_migration": None if per_token is None else per_token * audit.tokens_saved,
        "tokens_regenerated": regenerated,
        "dollars_regenerated": None if per_token is None else per_token * regenerated,
        "dollars_regenerated_by_cause": {
            cause: per_token * tokens for cause, tokens in audit.tokens_regenerated.items() if per_token is not None
        },
        "reserved_only": _reserved_only(audit.cost),
    }


def _reserved_only(cost: Cost) -> dict[str, Any] | None:
    """Return what the finished steps would have taken and cost without preemptible workers, None while unknown.

    The break-even price is what an hour of a preemptible worker may cost for the job to cost as much as without any;
    None before one has served it.
    """
    if not cost.reserved_only_dollars:
        return None
    spot_s = sum(time.seconds for time in cost.workers.values() if time.role == "preemptible")
    other_dollars = sum(time.dollars for time in cost.workers.values() if time.role != "preemptible")
    saved = max(0.0, cost.reserved_only_dollars - other_dollars)
    return {
        "seconds": cost.reserved_only_s,
        "dollars": cost.reserved_only_dollars,
        "break_even_price_per_hour": _ratio(saved * HOUR_S, spot_s),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
