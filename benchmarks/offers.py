"""What a mix of offers costs over traces of prices and capacity, against hindsight, one kind, and the cheapest now.

    python -m benchmarks.offers [--seeds 5] [--hours 10] [--startup-s 120] [--trace FILE ...]

Four offers: L4 in two zones, A10G and L40S. Their prices are generated, as is their capacity, unless recorded traces
are given, which the offers take in turn, each from another hour on. The fleet should generate 4,000 tokens per second
next to a reserved machine. One JSON line per seed, with dollars per million tokens relative to `hindsight`, a bound
that no policy passes, also one that knows the traces (no start-up, no preemption, fractions of workers):

- `mix`: the rollout manager's decisions;
- `cheapest_now`: at each minute the lowest price per token, whatever is lost by a change;
- `one_kind`: the mean over the offers, each used alone; `best_kind`: the best of them, known in hindsight only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from rlboost.services.rollout_manager.domain.offers import Pool
from rlboost.simulation.offers import MarketOffer, Replay, hindsight_bound, price_path, replay
from rlboost.simulation.traces import G4DN, FleetTrace, generate_trace, read_trace

KINDS = {
    # kind: (GPU, place, mean dollars per hour, tokens per second of one worker)
    "l4-a": ("L4", "zone a", 0.28, 500.0),
    "l4-b": ("L4", "zone b", 0.28, 500.0),
    "a10g": ("A10G", "", 0.45, 750.0),
    "l40s": ("L40S", "", 0.85, 1500.0),
}
WHAT = Replay(tokens_per_s=4000.0, reserved_tokens_per_s=2000.0, reserved_dollars_per_hour=4.0)


def market(seed: int, hours: float, startup_s: float, traces: list[FleetTrace]) -> list[MarketOffer]:
    offers = []
    for i, (kind, (gpu, place, dollars, tokens_per_s)) in enumerate(KINDS.items()):
        number = seed * len(KINDS) + i
        if traces:
            whole = traces[number % len(traces)]
            start_s = (0.37 * number * whole.duration_s) % max(1.0, whole.duration_s - hours * 3600)
            trace = whole.between(start_s, start_s + hours * 3600)
        else:
            trace = generate_trace(G4DN, number).between(0.0, hours * 3600)
        pool = Pool(kind=kind, gpu=gpu, place=place, tokens_per_s=tokens_per_s)
        offers.append(MarketOffer(pool, price_path(dollars, hours * 3600, number), trace, startup_s))
    return offers


def figures(seed: int, hours: float, startup_s: float, traces: list[FleetTrace]) -> dict[str, float | int | str]:
    offers = market(seed, hours, startup_s, traces)
    bound = hindsight_bound(offers, WHAT).dollars_per_million_tokens
    mix, cheapest = (replay(offers, WHAT, policy) for policy in ("mix", "cheapest-now"))
    alone = [replay([offer], WHAT, "mix").dollars_per_million_tokens / bound for offer in offers]
    return {
        "seed": seed,
        "hindsight": round(bound, 4),
        "mix": round(mix.dollars_per_million_tokens / bound, 3),
        "cheapest_now": round(cheapest.dollars_per_million_tokens / bound, 3),
        "one_kind": round(statistics.mean(alone), 3),
        "best_kind": round(min(alone), 3),
        "starts": mix.starts,
        "starts_cheapest_now": cheapest.starts,
        "preemptions": mix.preemptions,
        "last_reason": mix.reasons[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--startup-s", type=float, default=120.0, help="from a request until the worker generates")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="recorded capacity of instances")
    options = parser.parse_args()
    traces = [read_trace(path) for path in options.trace]
    for seed in range(options.seeds):
        print(json.dumps(figures(seed, options.hours, options.startup_s, traces)), flush=True)


if __name__ == "__main__":
    main()
