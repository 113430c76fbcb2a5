"""Compares an engine's log-probabilities with the trainer's: the last check before loaded weights are served.

Digests show that the engine has the published bytes. They cannot show that it computes the same with them as the
trainer: that an output layer is tied, that no tensor is used transposed, that a kernel is correct.

That check scores given tokens. The *sampling check* covers the path of training data: the engine samples as in
training, and then scores what it has sampled. What it reported must be what it computes, and it must draw tokens as
often as it reports: an engine may report correct log-probabilities and yet never draw some tokens.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlboost.services.rollout_worker.domain.requests import Emission, Request
from rlboost.shared.errors import Fatal
from rlboost.shared.ids import WeightsRef
from rlboost.shared.messages import Sampling
from rlboost.shared.weights.manifest import ParityDtype, ParityReference

Precision = Literal[ParityDtype, "quantized"]
"""The precision in which an engine computes."""
FLOAT32_TOLERANCE = 0.005
"""Allowed mean difference in nats, whatever the model: float32 kernels differ by about 1e-5."""
RELATIVE_TOLERANCE: dict[Precision, float] = {"float32": 0.0, "bfloat16": 0.1, "quantized": 0.4}
"""Allowed mean difference as a fraction of the spread (standard deviation) of the reference's log-probabilities, by the
coarser of the two precisions. Rounding and wrong weights both change logits in proportion to their size, so the
fraction separates them in confident and in untrained models. See docs/engines.md for the measurements."""
MIXTURE_TOLERANCE = 0.2
"""The smallest fraction for a mixture of experts below float32, where that of its precision is smaller: if two experts
score nearly the same, rounding selects the other one."""
MAX_PER_MEAN = 10.0
"""Allowed difference of one token, as a multiple of the mean's tolerance: single unlikely tokens differ most."""
SAMPLED_TOKENS = 16
"""Tokens of each continuation of the sampling check."""
DRAWS = 256
"""First tokens of one prompt that the sampling check counts."""
_DRAW_DEVIATIONS, _DRAW_FLOOR = 8.0, 20.0
"""Allowed difference between the probability of the tokens that were not drawn and its estimate, in standard deviations
and in draws. Not exceeded in 20,000 trials of each of 11 distributions, by any; the largest was half of it. And if no
token was drawn once or twice, tokens of more than 20/n are missed with a probability of e^-20."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences between two sets of log-probabilities."""

    mean: float
    """Mean of the absolute differences, in nats at temperature 1."""
    worst: float
    """The largest of them."""
    mean_tolerance: float
    max_tolerance: float

    @property
    def agrees(self) -> bool:
        """Return True if both are within their tolerance; NaN and infinity are not."""
        return self.mean <= self.mean_tolerance and self.worst <= self.max_tolerance

    def __str__(self) -> str:
        return (
            f"{self.mean:.3g} nats mean and {self.worst:.3g} nats maximal difference exceed the tolerance of "
            f"{self.mean_tolerance:.3g} and {self.max_tolerance:.3g}"
        )


class ParityCheckFailed(Fatal):
    """The engine's log-probabilities differ from the trainer's, or from those that it reports for what it samples."""

    def __init__(self, weights: WeightsRef, problem: str, remedy: str, verdict: Verdict | None = None) -> None:
        super().__init__(
            f"{weights}: the engine holds the published weights, but {problem}; the version is not served. {remedy}"
        )
        self.weights = weights
        self.verdict = verdict
        """The differences, if they are what the check found."""


def judge(
    reference: ParityReference,
    scored: Sequence[Sequence[float]],
    *,
    precision: Precision,
    has_experts: bool = False,
    tolerance: float = 0.0,
) -> Verdict:
    """Compare an engine's log-probabilities with the trainer's.

    Args:
        reference: canary prompts with the trainer's log-probabilities.
        scored: the engine's log-probability of each completion token, at the reference's temperature.
        precision: the precision in which the engine computes.
        has_experts: True for a mixture of experts.
        tolerance: tolerated mean difference in nats; 0 derives it from precision and model.

    """
    reported = [logprob for row in reference.rows for logprob in row.logprobs]
    allowed = tolerance or _tolerance(reported, reference, precision, has_experts=has_experts)
    return _verdict(reported, [logprob for row in scored for logprob in row], reference.temperature, allowed)


def continuations(reference: ParityReference) -> list[Request]:
    """Return requests that sample as in training, one for each of the reference's prompts.

    The prompt is repeated, so that speculative decoding finds something to propose.
    """
    sampling = Sampling(
        temperature=reference.temperature, top_p=reference.top_p, max_tokens=SAMPLED_TOKENS, whole_logprobs=True
    )
    return [Request(n, 1, [*row.prompt, *row.prompt], [], sampling, n) for n, row in enumerate(reference.rows)]


def draws(reference: ParityReference) -> list[Request]:
    """Return requests for the next token of one prompt, without top-p."""
    sampling = Sampling(temperature=reference.temperature, max_tokens=1, whole_logprobs=True)
    return [Request(n, 1, list(reference.rows[0].prompt), [], sampling, n) for n in range(DRAWS)]


def judge_continuations(
    reference: ParityReference,
    sampled: Iterable[Emission],
    scored: Sequence[Sequence[float]],
    *,
    precision: Precision,
    has_experts: bool = False,
    tolerance: float = 0.0,
) -> Verdict:
    """Compare what an engine reported for sampled tokens with what it computes for them; arguments as of `judge`."""
    reported = [logprob for emission in sampled for logprob in emission.logprobs]
    again = [logprob for row in scored for logprob in row]
    finite = [logprob for logprob in again if math.isfinite(logprob)]
    allowed = tolerance or _tolerance(finite or [0.0], reference, precision, has_experts=has_experts)
    return _verdict(reported, again, reference.temperature, allowed)


def judge_draws(drawn: Iterable[Emission]) -> str:
    """Return how the tokens that were drawn contradict the reported log-probabilities; empty if they do not.

    Independent draws miss tokens whose probabilities add up to about n1 / n (Good and Turing), with n draws, n1 tokens
    drawn once and n2 twice. The standard deviation of the difference is about sqrt(n1 + 2 n2) / n. The estimate needs
    no probability of a token that was not drawn, whose number may be large. An engine that leaves tokens out misses
    more: those of top-k have no unlikely ones among them, so n1 is 0.
    """
    probabilities: dict[int, float] = {}
    counts: Counter[int] = Counter()
    for emission in drawn:
        token, logprob = emission.tokens[0], emission.logprobs[0]
        probabilities[token] = math.exp(logprob)
        counts[token] += 1
    n, frequencies = counts.total(), Counter(counts.values())
    missing, expected = 1 - sum(probabilities.values()), frequencies[1] / n
    allowed = (_DRAW_DEVIATIONS * math.sqrt(frequencies[1] + 2 * frequencies[2]) + _DRAW_FLOOR) / n
    if abs(missing - expected) <= allowed:
        return ""
    return (
        f"{n} draws of one token gave {len(counts)} tokens, and by their log-probabilities the others have "
        f"{missing:.3g} of the probability, where {expected:.3g} is expected, with a tolerance of {allowed:.3g}"
    )


def in_order(emissions: Iterable[Emission], requests: Sequence[Request]) -> list[Emission]:
    """Return the emissions in the order of their requests."""
    by_key: Mapping[int, Emission] = {emission.sample: emission for emission in emissions}
    return [by_key[request.sample] for request in requests]


def _verdict(one: Sequence[float], other: Sequence[float], temperature: float, allowed: float) -> Verdict:
    # Compare at temperature 1: a lower one magnifies differences of logits.
    differences = [abs(ours - theirs) * temperature for ours, theirs in zip(one, other, strict=True)]
    broken = not differences or not all(map(math.isfinite, differences))
    mean = math.inf if broken else sum(differences) / len(differences)
    return Verdict(mean, math.inf if broken else max(differences), allowed, MAX_PER_MEAN * allowed)


def _tolerance(
    logprobs: Sequence[float], reference: ParityReference, precision: Precision, *, has_experts: bool
) -> float:
    fraction = max(RELATIVE_TOLERANCE[precision], RELATIVE_TOLERANCE[reference.dtype])
    if has_experts and fraction:
        fraction = max(fraction, MIXTURE_TOLERANCE)
    return max(FLOAT32_TOLERANCE, fraction * statistics.pstdev(logprobs) * reference.temperature)
