"""A question about a product, and a tool that multiplies."""

from __future__ import annotations

import re

from rlboost.environments import ToolEnvironment


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    """
    return a * b


class Calculator(ToolEnvironment):
    """Gives 1 if the last number of the final answer is that of the row."""

    def __init__(self) -> None:
        super().__init__([multiply])

    def score(self, text: str) -> float:
        """Return the reward of a conversation that ends with `text`."""
        numbers = re.findall(r"\d+", text.replace(",", ""))
        return float(numbers[-1:] == [self.row["answer"]])
