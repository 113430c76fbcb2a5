"""What more workers would change, and what the job would have cost without spot workers: texts of REST answers."""

from __future__ import annotations

from collections.abc import Iterator

from rlboost.client import Json
from rlboost.job_lines import dollars, duration


def fleet_text(fleet: Json) -> str:
    """Format how many workers are worth having, what one more is worth, the fleet's price, and autoscaling.

    It is empty while none of that is known.
    """
    return "; ".join([*_worth(fleet), *_scaling(fleet["autoscaling"])])


def _worth(fleet: Json) -> Iterator[str]:
    target, worth = fleet["target_workers"], fleet["worth_of_one_more"]
    if target is not None and target > fleet["present"]:
        yield f"up to {target} spot workers would shorten the steps"
    elif target is not None:
        yield f"more than {target} spot workers would not shorten the steps"
    if worth is not None:
        value, price = worth["dollars_per_hour"], worth["price_per_hour"]
        yield (
            f"one more would generate {worth['tokens_per_hour']:,.0f} more tokens per hour"
            + (f", worth {dollars(value)}" if value else "")
            + (f", and costs {dollars(price)}" if price else "")
        )


def _scaling(scaling: Json) -> Iterator[str]:
    price, most = scaling["dollars_per_hour"], scaling["max_dollars_per_hour"]
    if price or most is not None:
        yield f"all workers cost {dollars(price)} per hour" + ("" if most is None else f" of at most {dollars(most)}")
    for pool in scaling["pools"]:
        target = "-" if pool["target"] is None else pool["target"]
        limit = f", limited by {scaling['limited_by']}" if scaling["limited_by"] else ""
        error = f", provider: {pool['error']}" if pool["error"] else ""
        of = f"{target} of at most {pool['max_workers']} {pool['kind']}"
        yield f"autoscaling ({scaling['workers']}): {of}{limit}{error}"


def reserved_only_text(only: Json, spent: float) -> str:
    """Format what the reserved workers alone would have taken and cost so far; `spent` is what the job has cost."""
    saved = 1 - spent / only["dollars"]
    return (
        f"the reserved workers alone would have taken about {duration(only['seconds'])} and cost "
        f"{dollars(only['dollars'])}: with spot workers the job is {100 * abs(saved):.0f} % "
        f"{'cheaper' if saved >= 0 else 'more expensive'}"
    )
