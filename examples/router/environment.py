"""Sends a question to a cheap or a dear model, as the policy chooses: after xRouter (arXiv 2510.08439)."""

from __future__ import annotations

import os
from typing import Any

from rlboost.environments import PricedModel, Step
from rlboost.examples.router.models import PORT

URL = os.environ.get("ROUTER_MODELS_URL", f"http://127.0.0.1:{PORT}/v1")
BUDGET = 10.0
"""Dollars, of each model."""
CHEAP = PricedModel(url=URL, model="cheap", input_price=0.1, output_price=0.4, budget=BUDGET, max_tokens=16)
DEAR = PricedModel(url=URL, model="dear", input_price=10.0, output_price=30.0, budget=BUDGET, max_tokens=16)


class Router:
    """Gives 1 for a right answer of the model that the policy chooses, by the first digit that it writes."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Begin with the row's prompt."""
        del seed
        self._question, self._answer = row["prompt"].rstrip(">"), row["answer"]

    async def step(self, text: str) -> Step:
        """Ask the cheap model after an even digit, the dear one after an odd one or none."""
        digit = next((character for character in text if character.isdigit()), "1")
        answer = await (DEAR if int(digit) % 2 else CHEAP)(self._question)
        return Step(reward=float(answer == self._answer), done=True)  # PricedModel adds the cost
